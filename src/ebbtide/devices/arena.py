"""Host memory that is dear to make, such as what is registered with a driver: parts of large segments, for any size.

What is freed merges with what is free beside it, so memory of one size serves others later. The smallest free stretch
that will do is taken, of equal ones the first: the same requests get the same places.

Segments stay. Only where none has room for what is asked, wholly free ones go first, as many bytes as are made anew, so
that what is kept follows the most that was ever out at once and not the number of sizes.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

import torch

from ebbtide.units import round_up

SEGMENT = 1 << 30


class Arena:
    def __init__(
        self, make: Callable[[int], torch.Tensor], end: Callable[[torch.Tensor], bool], least: int = SEGMENT
    ) -> None:
        """`make` gives a segment of so many bytes, and is asked for `least` or more; `end` is told that nobody uses one
        any more, and says whether it could be given up."""
        self._make, self._end, self._least = make, end, least
        self._lock = threading.Lock()
        self._returned: deque[torch.Tensor] = deque()
        self._segments: dict[int, torch.Tensor] = {}
        """By number, in the order in which they were made."""
        self._numbers: dict[int, int] = {}
        """Of segments, by storage."""
        self._made = 0
        self._free: list[tuple[int, int, int]] = []
        """(bytes, segment, first byte) of each free stretch, sorted."""
        self._last: dict[tuple[int, int], int] = {}
        """Where a free stretch ends, by segment and first byte."""
        self._first: dict[tuple[int, int], int] = {}
        """Where it begins, by segment and end. Segments may be neighbours in memory, and never merge."""

    def take(self, count: int) -> torch.Tensor:
        """`count` bytes, contents undefined."""
        with self._lock:
            self._take_back()
            number, first = self._find(_whole_pages(count))
            return self._segments[number][first : first + count]

    def put(self, memory: torch.Tensor) -> None:
        """Takes back what `take` gave. Nothing reads or writes it any more, a device's copies neither."""
        # Nothing else: the collector may free what an engine left, on a thread that has the lock.
        self._returned.append(memory)

    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(size for size, _, _ in self._free)

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            number = self._numbers[memory.untyped_storage()._cdata]
            first = int(memory.storage_offset())
            self._add(number, first, first + _whole_pages(memory.numel()))

    def _find(self, size: int) -> tuple[int, int]:
        """(segment, first byte) of `size` bytes that are free no longer."""
        place = bisect_left(self._free, (size, 0, 0))
        if place == len(self._free):
            self._grow(size)
            place = bisect_left(self._free, (size, 0, 0))
        _, number, first = self._free[place]
        last = self._remove(number, first)
        if first + size < last:
            self._add(number, first + size, last)
        return number, first

    def _grow(self, size: int) -> None:
        count = max(self._least, size)
        self._shrink(count)
        segment = self._make(count)
        number, self._made = self._made, self._made + 1
        self._segments[number] = segment
        self._numbers[segment.untyped_storage()._cdata] = number
        self._add(number, 0, count)

    def _shrink(self, most: int) -> None:
        """Gives up wholly free segments until that is `most` bytes."""
        for number, segment in list(self._segments.items()):
            if most <= 0:
                return
            if self._last.get((number, 0)) == segment.numel() and self._end(segment):
                most -= segment.numel()
                self._remove(number, 0)
                del self._segments[number], self._numbers[segment.untyped_storage()._cdata]

    def _add(self, number: int, first: int, last: int) -> None:
        """A stretch is free, and one with what is free on both sides of it."""
        if (number, last) in self._last:
            last = self._remove(number, last)
        before = self._first.get((number, first))
        if before is not None:
            self._remove(number, before)
            first = before
        insort(self._free, (last - first, number, first))
        self._last[number, first], self._first[number, last] = last, first

    def _remove(self, number: int, first: int) -> int:
        """The stretch is no longer free as a whole; where it ends."""
        last = self._last.pop((number, first))
        del self._first[number, last]
        del self._free[bisect_left(self._free, (last - first, number, first))]
        return last


def _whole_pages(count: int) -> int:
    """No two share a page, and those of no bytes have a place, too."""
    return round_up(max(count, 1), mmap.PAGESIZE)
