"""What user code can change, held as it is: each kind says what it has now and brings it back.

Containers are asked through the methods of the kind that they derive from, never through their own: those may do more
than hold (load what they name, say).
"""

from __future__ import annotations

import functools
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType
from typing import Any, Protocol

import torch

MISSING = object()
ARRAY = 1 << 20
"""Bytes of an array of numbers that is copied to be put back."""

Other = Callable[[Any], Any]
"""The value that stands in for one while a pass is imagined, or the value itself."""


class Holding(Protocol):
    def values(self) -> Iterable[Any]: ...

    def replace(self, other: Other) -> None: ...

    def put_back(self) -> None: ...


class Mapping:
    """A dict of any kind."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held
        self._kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
        self._contents = dict(self._kind.items(held))

    def values(self) -> Iterable[Any]:
        return self._contents.values()

    def replace(self, other: Other) -> None:
        for key, value in self._contents.items():
            if (found := other(value)) is not value:
                self._kind.__setitem__(self._held, key, found)

    def put_back(self) -> None:
        now = list(self._kind.items(self._held))
        if len(now) == len(self._contents) and all(
            a is b and left is right
            for (a, left), (b, right) in zip(now, self._contents.items(), strict=True)
        ):
            return
        self._kind.clear(self._held)
        for key, value in self._contents.items():
            self._kind.__setitem__(self._held, key, value)


class Sequence:
    """A list or a deque of any kind."""

    def __init__(self, held: list[Any] | deque[Any]) -> None:
        self._held = held
        kind: Any = list if isinstance(held, list) else deque
        self._kind = kind
        self._contents: list[Any] = list(self._kind.__iter__(held))

    def values(self) -> Iterable[Any]:
        return self._contents

    def replace(self, other: Other) -> None:
        for place, value in enumerate(self._contents):
            if (found := other(value)) is not value:
                self._kind.__setitem__(self._held, place, found)

    def put_back(self) -> None:
        now = list(self._kind.__iter__(self._held))
        if len(now) == len(self._contents) and all(a is b for a, b in zip(now, self._contents, strict=True)):
            return
        self._kind.clear(self._held)
        self._kind.extend(self._held, self._contents)


class Unordered:
    """A set; what is in one is never replaced, for its place hangs on what it is."""

    def __init__(self, held: set[Any]) -> None:
        self._held, self._contents = held, set(set.__iter__(held))

    def values(self) -> Iterable[Any]:
        return self._contents

    def replace(self, other: Other) -> None: ...

    def put_back(self) -> None:
        if not set.__eq__(self._held, self._contents):
            set.clear(self._held)
            set.update(self._held, self._contents)


class Cell:
    """A variable that a function closes over."""

    def __init__(self, held: CellType) -> None:
        self._held, self._contents = held, held.cell_contents

    def values(self) -> Iterable[Any]:
        return (self._contents,)

    def replace(self, other: Other) -> None:
        self._held.cell_contents = other(self._contents)

    def put_back(self) -> None:
        self._held.cell_contents = self._contents


class Names:
    """Names of a module: those that a function mentions, whether they are there yet or not."""

    def __init__(self, names: dict[str, Any], mentioned: Iterable[str]) -> None:
        self._names = names
        self._contents = {name: names.get(name, MISSING) for name in mentioned}

    def values(self) -> Iterable[Any]:
        return [value for value in self._contents.values() if value is not MISSING]

    def replace(self, other: Other) -> None: ...

    def put_back(self) -> None:
        for name, value in self._contents.items():
            if self._names.get(name, MISSING) is value:
                continue
            if value is MISSING:
                del self._names[name]
            else:
                self._names[name] = value


class ClassAttributes:
    """What a class has beside its functions, such as a count of all its instances."""

    def __init__(self, held: type) -> None:
        self._held, self._before = held, set(vars(held))
        self._contents = {name: value for name, value in vars(held).items() if _is_state(name, value)}

    def values(self) -> Iterable[Any]:
        return self._contents.values()

    def replace(self, other: Other) -> None: ...

    def put_back(self) -> None:
        for name in [name for name in vars(self._held) if name not in self._before]:
            if not name.startswith("__"):
                delattr(self._held, name)
        for name, value in self._contents.items():
            if vars(self._held).get(name, MISSING) is not value:
                setattr(self._held, name, value)


def _is_state(name: str, value: Any) -> bool:
    return not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__"))


class Numbers:
    """An array that is written in place: of NumPy, of `array`, or bytes."""

    def __init__(self, held: Any) -> None:
        self._held, self._contents = held, held[...].copy() if hasattr(held, "shape") else held[:]

    def values(self) -> Iterable[Any]:
        return ()

    def replace(self, other: Other) -> None: ...

    def put_back(self) -> None:
        if not hasattr(self._held, "shape"):
            if self._held != self._contents:
                self._held[:] = self._contents
        elif self._held.tobytes() != self._contents.tobytes():
            self._held.flags.writeable = True
            self._held[...] = self._contents


class Undone:
    """What one call brings back."""

    def __init__(self, put_back: Callable[[], Any]) -> None:
        self.put_back = put_back

    def values(self) -> Iterable[Any]:
        return ()

    def replace(self, other: Other) -> None: ...


def holding(value: Any) -> Holding | None:
    """Of what a value holds itself, beside its attributes; None where it holds nothing that could change."""
    if isinstance(value, dict):
        return Mapping(value)
    if isinstance(value, list | deque):
        return Sequence(value)
    if isinstance(value, set):
        return Unordered(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return Undone(partial(_forget, value, value.cache_info().misses))
    if (again := generator(value)) is not None:
        return Undone(again)
    if _is_array(value):
        return Numbers(value)
    return None


def _forget(cached: Any, misses: int) -> None:
    """What the imagined pass had computed for a cache; others' entries are computed again."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def _is_array(value: Any) -> bool:
    if isinstance(value, bytearray | array):
        return len(value) * memoryview(value).itemsize <= ARRAY
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and value.ndim > 0
        and value.flags.c_contiguous
        and value.flags.writeable
        and value.dtype.kind in "biufc"
        and value.nbytes <= ARRAY
    )


def generator(value: object) -> Callable[[], Any] | None:
    """What brings a generator of random numbers back to where it is now."""
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
