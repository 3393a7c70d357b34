"""Passes of the user's in which nothing is real, while chunks are away: they leave the engine as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ebbtide
from harness import config_of
from sampling import crossed

WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def imagined(engine: ebbtide.Engine) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert engine.module(mode.from_tensor(batch(90))).shape == ()


def imagined_without_leave(engine: ebbtide.Engine) -> None:
    """The mode wants no real tensors; there are some."""
    with FakeTensorMode() as mode, pytest.raises(AssertionError):
        engine.module(mode.from_tensor(batch(90)))


def differentiated_forward(engine: ebbtide.Engine) -> None:
    value, slope = torch.func.jvp(engine, (batch(90),), (batch(91),))
    assert value.isfinite() and slope.isfinite()


def mapped(engine: ebbtide.Engine) -> None:
    with torch.no_grad():
        found = torch.func.vmap(engine.module)(torch.stack([batch(90), batch(91)]))
        assert torch.allclose(found[0], engine(batch(90)))


def exported(engine: ebbtide.Engine) -> None:
    program = torch.export.export(engine.module, (batch(90),)).module()
    with engine.resident(), torch.no_grad():
        assert torch.equal(program(batch(90)), engine(batch(90)))


@pytest.mark.parametrize(
    ("deed", "memory"),
    crossed(
        [imagined, imagined_without_leave, differentiated_forward, mapped, exported],
        [60_000, 66_000, 100_000],
    ),
)
def test_the_engine_goes_on(deed: Callable[[ebbtide.Engine], None], memory: int) -> None:
    shas = []
    for disturbed in (True, False):
        tight = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
        engine = ebbtide.initialize(Net(), config_of(precision="fp32", **tight))
        for number in range(6):
            if disturbed and number > 1:
                deed(engine)
                engine.check_integrity()
            engine.backward(engine(batch(number)))
            engine.step()
        assert engine.stats()["moved_bytes"]["host_to_device"] > 0
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]
