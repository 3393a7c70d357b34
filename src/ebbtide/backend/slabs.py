"""Mapped host memory, by size, kept for reuse.

Fresh memory costs four times a refill on first touch, so what is freed is kept; it is given up only when more of other
sizes is asked for than was ever handed out at once, and then its huge pages go to what is asked for (`backend.pages`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch

from ebbtide.backend.pages import HUGE, Mapping, give_back


class Slabs:
    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._kept = 0
        """Bytes of free slabs and of loose pages."""
        self._out = 0
        self._most = 0
        self._mappings: dict[int, Mapping] = {}
        """By storage."""
        self._loose: list[int] = []
        """Huge pages of slabs that were given up, by address."""
        weakref.finalize(self, give_back, self._loose).atexit = False

    def owns(self, storage: int) -> bool:
        return storage in self._mappings

    def take(self, count: int) -> torch.Tensor:
        self._out += count
        self._most = max(self._most, self._out)
        stack = self._free[count]
        if stack:
            self._kept -= count
            return stack.pop()
        return self._map(count)

    def put(self, slab: torch.Tensor) -> None:
        count = slab.numel()
        self._out -= count
        self._kept += count
        self._free[count].append(slab)

    def trim(self, most: int) -> None:
        """Gives back what is free until no more than `most` bytes of it are kept."""
        self._keep(most, 0)

    def _map(self, count: int) -> torch.Tensor:
        mapping = Mapping(count)
        wanted = mapping.wanted
        self._keep(self._most - self._out, wanted)
        # Neighbours stay neighbours: to the kernel they are one mapping then.
        first = max(0, len(self._loose) - wanted)
        pages = self._loose[first:]
        del self._loose[first:]
        self._kept -= len(pages) * HUGE
        mapping.move_in(pages)
        slab = mapping.tensor()
        self._mappings[slab.untyped_storage()._cdata] = mapping
        return slab

    def _keep(self, most: int, wanted: int) -> None:
        """Gives up slabs until no more than `most` bytes are kept beside `wanted` of the loose pages."""
        sizes = sorted(self._free, reverse=True)
        while self._kept - HUGE * min(wanted, len(self._loose)) > most:
            if len(self._loose) > wanted:
                give_back([self._loose.pop()])
                self._kept -= HUGE
                continue
            while sizes and not self._free[sizes[0]]:
                del sizes[0]
            if not sizes:
                return
            self._give_up(self._free[sizes[0]].pop())

    def _give_up(self, slab: torch.Tensor) -> None:
        mapping = self._mappings.pop(slab.untyped_storage()._cdata)
        # Somebody may look at what was there, long after: that stays mapped as long as they do.
        pages = mapping.take_apart() if users(slab) == _OURS else []
        self._loose += pages
        self._kept -= slab.numel() - HUGE * len(pages)


def users(memory: torch.Tensor) -> int:
    """How many look at a tensor's storage."""
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata)


_OURS = users(torch.empty(1))
"""Of a tensor that nothing else shares a storage with."""
