"""What passes gave that somebody still holds: memory that the next pass finds taken.

`out = engine(**batch)` keeps the last outputs until forward has given new ones, and a loop that validates may keep those
of a larger batch. A trace knows what its own pass leaves; what else is there lies beside the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_leaves

from ebbtide.backend import Backend
from ebbtide.plan.uses import SCALARS


class Outputs:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """By the address of a storage's object: its bytes, and whether it is still there."""
        self._old: set[int] = set()

    def add(self, output: Any) -> None:
        """A pass has given this. The memory is what counts: a view of it keeps all."""
        for leaf in leaves(output):
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or is_wrapper(leaf):
                continue
            try:
                storage = leaf.untyped_storage()
            except NotImplementedError:
                continue  # within a transform of torch.func; it goes with it
            key = storage._cdata
            if storage.device.type == self._backend.device.type and not self._backend.owns(key):
                self._held[key] = storage.nbytes(), weakref.ref(storage)
                self._old.discard(key)

    def begin(self) -> None:
        """A training pass begins: what is there is old."""
        self._tidy()
        self._old = set(self._held)

    @property
    def nbytes(self) -> int:
        """Of all that are still held."""
        self._tidy()
        return sum(count for count, _ in self._held.values())

    @property
    def old(self) -> int:
        """Of those from before the pass that is under way."""
        self._tidy()
        return sum(self._held[key][0] for key in self._old if key in self._held)

    def _tidy(self) -> None:
        gone = [key for key, (_, there) in self._held.items() if there() is None]
        for key in gone:
            del self._held[key]


def beside(held: int, known: int) -> int:
    """Bytes that outputs take beside a plan which knows of some. A few losses have room at every moment of it."""
    return max(0, held - known - SCALARS // 2)


def leaves(output: Any) -> Iterator[Any]:
    """All that a module gave, looked for in dataclasses, too."""
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tree_leaves([getattr(leaf, one.name, None) for one in fields(leaf)])
        else:
            yield leaf
