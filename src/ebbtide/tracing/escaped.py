"""Tensors of an imagined pass that outlive it: which they are, and what holds them.

They have no values, so whatever uses one later fails far from where it was kept. The fake mode of a pass lives as long
as any tensor of it does: where it is gone, nothing has to be looked for.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from functools import _lru_cache_wrapper
from types import CellType, FrameType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.tracing.imagining_flag import ImaginedMode

DEPTH = 6
"""Containers within containers that are followed to the one that has a name."""


class Escapes:
    """Of the passes that were imagined since it was made."""

    def __init__(self) -> None:
        self._modes: list[weakref.ref[ImaginedMode]] = []

    def watch(self, mode: ImaginedMode) -> None:
        self._modes.append(weakref.ref(mode))

    def find(self) -> list[str]:
        """What holds each of them, in words; caches of Python's are emptied, and not among it."""
        if not any(ref() is not None for ref in self._modes):
            return []
        gc.collect()  # what hangs on itself only
        modes = {id(mode) for ref in self._modes if (mode := ref()) is not None}
        self._modes.clear()
        if not modes:
            return []
        fakes = [one for one in gc.get_objects() if type(one) is FakeTensor and id(one.fake_mode) in modes]
        found: dict[str, None] = {}
        for fake in fakes:
            held = _holder(fake, {id(fakes)})
            if held:
                found[f"{held}, of shape {tuple(fake.shape)}"] = None
        return list(found)


def _holder(value: Any, apart: set[int], depth: int = DEPTH) -> str:
    """The first name on the way to what holds a value; empty where nothing that has one does."""
    for one in gc.get_referrers(value) if depth else ():
        if id(one) in apart or isinstance(one, FrameType | torch.Tensor):
            continue
        if isinstance(one, _lru_cache_wrapper):
            one.cache_clear()
        elif isinstance(one, CellType):
            return "a variable that a function closes over"
        elif isinstance(one, dict) and (named := _named(one, value)):
            return named
        elif isinstance(one, dict | list | set | tuple | deque):
            further = _holder(one, apart | {id(value)}, depth - 1)
            return f"a {type(one).__name__}" + (f" in {further}" if further else "")
        else:
            return _attribute(one, value)
    return ""


def _named(names: dict[Any, Any], value: Any) -> str:
    """Where the dict is one of a module's or an object's names."""
    key = next((key for key, one in names.items() if one is value), None)
    for owner in gc.get_referrers(names):
        if getattr(owner, "__dict__", None) is names:
            named = isinstance(owner, ModuleType)
            return f"{owner.__name__}.{key}" if named else f"attribute {key!r} of a {type(owner).__name__}"
    return ""


def _attribute(owner: Any, value: Any) -> str:
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*getattr(owner, "__dict__", ()), *slots):
        if getattr(owner, name, None) is value:
            return f"attribute {name!r} of a {type(owner).__name__}"
    return f"a {type(owner).__name__}"
