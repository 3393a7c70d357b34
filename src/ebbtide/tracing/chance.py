"""What a pass that is only imagined draws at random is drawn again after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def undrawn() -> Iterator[None]:
    """By the generators that torch, Python, and NumPy where that is in use, have for all. `unchanged` does the same for
    generators of the user's own."""
    numpy = sys.modules.get("numpy.random")
    put_back: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        put_back.append(partial(numpy.set_state, numpy.get_state(legacy=False)))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for again in put_back:
            again()
