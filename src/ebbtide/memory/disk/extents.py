"""Which bytes of the SSD tier are taken: books only, no file is touched."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

from ebbtide.errors import BudgetError, IntegrityError, StateError
from ebbtide.planner.sizes import BLOCK
from ebbtide.units import format_size, round_up


@dataclass(frozen=True, slots=True)
class Extent:
    start: int
    """In the space, a multiple of BLOCK."""
    nbytes: int


class Extents:
    """First fit: what is allocated in order lies in order, so that its requests can be merged."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        """(start, bytes) in order; never two that touch."""
        self._held: dict[int, Extent] = {}
        self._room = size
        # A finalizer may free on whatever thread the collector runs.
        self._lock = threading.RLock()

    @property
    def room(self) -> int:
        return self._room

    @property
    def held(self) -> int:
        return self.size - self._room

    def allocate(self, nbytes: int) -> Extent:
        if nbytes < 1:
            raise StateError(f"ssd: expected an extent of at least one byte, found {nbytes}")
        count = round_up(nbytes, BLOCK)
        with self._lock:
            for place, (start, length) in enumerate(self._free):
                if length >= count:
                    self._free[place : place + 1] = (
                        [(start + count, length - count)] if length > count else []
                    )
                    extent = self._held[start] = Extent(start, nbytes)
                    self._room -= count
                    return extent
            raise self._full(count)

    def _full(self, count: int) -> BudgetError:
        largest = max((length for _, length in self._free), default=0)
        short = count - (self._room if self._room < count else largest)
        where = f", the largest piece {format_size(largest)}" if self._room >= count else ""
        return BudgetError(
            f"ssd: an extent of {format_size(count)} does not fit: {format_size(self.size)} in all, "
            f"{format_size(self._room)} free{where}; short by {format_size(short)}",
            tier="ssd",
            short=short,
            advice="raise ssd.memory, or lower what goes there with more host memory",
        )

    def require(self, extent: Extent) -> None:
        """Identity, not equality: an extent that was freed stays refused when its bytes are taken again."""
        if self._held.get(extent.start) is not extent:
            raise StateError(
                f"ssd: {extent} is not allocated (any more); allocate it first, use it until free"
            )

    def free(self, extent: Extent) -> None:
        with self._lock:
            self.require(extent)
            del self._held[extent.start]
            start, count = extent.start, round_up(extent.nbytes, BLOCK)
            self._room += count
            place = bisect_left(self._free, (start, 0))
            first, last = place, place
            if place and sum(self._free[place - 1]) == start:
                first = place - 1
                start = self._free[first][0]
                count += self._free[first][1]
            if place < len(self._free) and start + count == self._free[place][0]:
                last = place + 1
                count += self._free[place][1]
            self._free[first:last] = [(start, count)]

    def check(self) -> None:
        """Raises unless free and held bytes tile the space."""
        with self._lock:
            held = [(one.start, round_up(one.nbytes, BLOCK)) for one in self._held.values()]
            end = 0
            for start, count in sorted(self._free + held):
                if start != end:
                    raise IntegrityError(f"ssd: expected the next extent at {end}, found it at {start}")
                end = start + count
            if end != self.size or self._room != sum(count for _, count in self._free):
                raise IntegrityError(
                    f"ssd: extents end at {end} of {self.size}, {self._room} said to be free"
                )
