"""What a pass that is only imagined draws at random is drawn again after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def undrawn(module: nn.Module) -> Iterator[None]:
    """By torch, Python, and NumPy where that is in use; and by generators that modules have of their own."""
    numpy = sys.modules.get("numpy.random")
    put_back: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        put_back.append(partial(numpy.set_state, numpy.get_state(legacy=False)))
    for child in module.modules():
        put_back += [again for value in vars(child).values() if (again := _again(value)) is not None]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for again in put_back:
            again()


def _again(value: object) -> Callable[[], Any] | None:
    """What brings a generator back to where it is now."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if numpy is not None and isinstance(value, numpy.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
