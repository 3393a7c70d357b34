"""Activations that leave the device and come back: the same numbers, within the promised budgets."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from harness import config_of


class Modified(nn.Module):
    """Writes in place into what `exp` saved, where it is asked to."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.wrong = wrong
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).exp()
        self.seen = weakref.ref(y.untyped_storage())
        if self.wrong:
            y.mul_(2)
        return y.float().sum()


@pytest.mark.parametrize("wrong", [False, True])
def test_what_was_saved_and_then_written_is_refused(wrong: bool) -> None:
    engine = ebbtide.initialize(Modified(wrong), config_of())
    loss = engine(torch.randn(8, 64).bfloat16())
    if wrong:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
    else:
        engine.backward(loss)
    engine.close()


def test_a_graph_that_nobody_runs_backward_goes() -> None:
    """What an operator saves of its own output must not keep the operator alive."""
    engine = ebbtide.initialize(Modified(False), config_of())
    loss = engine(torch.randn(8, 64).bfloat16())
    assert engine.module.seen() is not None
    del loss
    gc.collect()
    assert engine.module.seen() is None
    engine.close()
