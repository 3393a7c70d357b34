"""Mapped host memory, by size, kept for reuse.

Fresh memory costs four times a refill on first touch (and on a GPU machine a registration), so what is freed is
kept; it is given back only when more of other sizes is asked for than was ever handed out at once.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable

import torch

_HUGE = 2 << 20


def map_memory(count: int) -> torch.Tensor:
    """Fresh zeroed memory, in huge pages where it is large."""
    # Private: the kernel has no huge pages for shared mappings unless an administrator asks for them.
    memory = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if count >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count)


class Slabs:
    def __init__(self, source: Callable[[int], torch.Tensor] = map_memory, returns: bool = True) -> None:
        """`source` makes a new slab; `returns` says whether it can be given back one by one."""
        self._source = source
        self._returns = returns
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._kept = 0
        self._out = 0
        self._most = 0
        self.storages: set[int] = set()

    def take(self, count: int) -> torch.Tensor:
        self._out += count
        self._most = max(self._most, self._out)
        stack = self._free[count]
        if stack:
            self._kept -= count
            return stack.pop()
        if self._returns:
            self._give_back(self._out + self._kept - self._most)
        slab = self._source(count)
        self.storages.add(slab.untyped_storage()._cdata)
        return slab

    def put(self, slab: torch.Tensor) -> None:
        count = slab.numel()
        self._out -= count
        self._kept += count
        self._free[count].append(slab)

    def trim(self, most: int) -> None:
        """Gives back free slabs until no more than `most` bytes of them are kept."""
        if self._returns and self._kept > most:
            self._give_back(self._kept - most)

    def _give_back(self, excess: int) -> None:
        for count in sorted(self._free, reverse=True):
            stack = self._free[count]
            while stack and excess > 0:
                self.storages.discard(stack.pop().untyped_storage()._cdata)
                self._kept -= count
                excess -= count
