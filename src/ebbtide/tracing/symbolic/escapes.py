"""Whether code runs in an imagined pass (`ebbtide.imagining()`), and which of its tensors outlive it.

A tensor of an imagined pass has no values, so a later use fails far from where it was kept. The pass's meter knows
which storages are still alive; where none is, nothing has to be looked for.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from functools import _lru_cache_wrapper
from types import CellType, FrameType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ebbtide.tracing.meter import StorageMeter

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class ImaginedMode(FakeTensorMode):
    """The fake mode of a pass that is imagined."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def imagining() -> bool:
    """Whether this runs in a pass that the engine only imagines, to know what memory it will take: before the first
    batch of a shape, under a budget. Tensors have shapes there and no values. What must happen once for each real pass
    and lies where the engine cannot put it back (a request over a network, an experiment tracker) asks this first."""
    return isinstance(torch._C._get_dispatch_mode(_FAKE), ImaginedMode)


FEW = 5
"""Tensors that are named: to ask what holds one looks at all that there is."""
_WALKERS = ("list_iterator", "generator", "list_reverseiterator")
DEPTH = 6
"""Containers within containers that are followed to the one that has a name."""


class Escapes:
    """Of the passes that were imagined since it was made."""

    def __init__(self) -> None:
        self._passes: list[tuple[weakref.ref[ImaginedMode], StorageMeter]] = []

    def watch(self, mode: ImaginedMode, meter: StorageMeter) -> None:
        self._passes.append((weakref.ref(mode), meter))

    def find(self) -> list[str]:
        """What holds them, in words: a few of many. Caches of Python's are emptied, and not among it."""
        try:
            return self._find()
        except Exception:  # what is asked here is the user's, and may raise whatever it likes
            return []

    def _find(self) -> list[str]:
        if not any(meter.holds for _, meter in self._passes):
            return []
        gc.collect()  # what hangs on itself only
        left = [(ref(), meter) for ref, meter in self._passes if meter.holds]
        self._passes.clear()
        if not left:
            return []
        fakes = [one for one in gc.get_objects() if type(one) is FakeTensor and _is_of(one, left)]
        found: dict[str, None] = {}
        for fake in fakes[:FEW]:
            held = _holder(fake, {id(fakes), id(left)})
            if held:
                found[f"{held}, of shape {tuple(fake.shape)}"] = None
        return list(found)


def _is_of(fake: Any, passes: list[tuple[ImaginedMode | None, StorageMeter]]) -> bool:
    """Whether one of these passes made it."""
    return any(fake.fake_mode is mode and meter.knows(fake.untyped_storage()) for mode, meter in passes)


def _holder(value: Any, apart: set[int]) -> str:
    """The first name on the way to what holds a value; empty where nothing that has one does."""
    kinds: list[str] = []
    for _ in range(DEPTH):
        holders = gc.get_referrers(value)
        apart = {*apart, id(holders), id(value)}
        container = None
        for one in holders:
            if id(one) in apart or isinstance(one, FrameType | torch.Tensor):
                continue
            if type(one) is _lru_cache_wrapper:
                one.cache_clear()
            elif type(one) is CellType:
                return _of(kinds, "a variable that a function closes over")
            elif isinstance(one, dict) and (named := _named(one, value)):
                return _of(kinds, named)
            elif isinstance(one, dict | list | set | tuple | deque):
                container = one
            elif type(one).__name__ not in _WALKERS:
                return _of(kinds, _attribute(one, value))
        if container is None:
            return _of(kinds[:-1], kinds[-1]) if kinds else ""
        kinds.append(f"a {type(container).__name__}")
        value = container
    return _of(kinds[:-1], kinds[-1])


def _of(kinds: list[str], name: str) -> str:
    return " in ".join([*kinds, name])


def _named(names: dict[Any, Any], value: Any) -> str:
    """Where the dict is one of a module's or an object's names."""
    key = next((key for key, one in list(dict.items(names)) if one is value), None)
    for owner in gc.get_referrers(names):
        if _names_of(owner) is names:
            named = isinstance(owner, ModuleType)
            return f"{owner.__name__}.{key}" if named else f"attribute {key!r} of a {type(owner).__name__}"
    return ""


def _names_of(owner: Any) -> dict[str, Any]:
    """Asked without code of the user's."""
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found


def _attribute(owner: Any, value: Any) -> str:
    kind = type(owner)
    for name, one in _names_of(owner).items():
        if one is value:
            return f"attribute {name!r} of a {kind.__name__}"
    for one in kind.__mro__:
        for name, slot in vars(one).items():
            if isinstance(slot, MemberDescriptorType) and _held_in(slot, owner) is value:
                return f"attribute {name!r} of a {kind.__name__}"
    return f"a {kind.__name__}"


def _held_in(slot: MemberDescriptorType, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # nothing yet
        return None
