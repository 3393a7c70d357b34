"""When moves are triggered: as early as memory allows, in the order in which they are needed.

First every eviction is advanced to the moment after the chunk's last use: the traffic is the same and the
room is there sooner. Then each fetch is advanced while the chunk still fits in every moment that it
would sit through. Moves over one link keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbtide.planner.retention import Move, Residency


@dataclass(frozen=True, slots=True)
class Trigger:
    """At the start of `moment` the move of `item` starts."""

    moment: int
    item: int
    fetch: bool


def on_demand(residency: Residency, sources: Mapping[int, int]) -> list[Trigger]:
    """Every move at the moment that needs it: what `prefetch = false` runs."""
    return _ordered([Trigger(move.moment, move.item, move.fetch) for move in residency.moves], sources)


def _ordered(triggers: list[Trigger], sources: Mapping[int, int]) -> list[Trigger]:
    """At each moment first what leaves, then what comes, and what is gathered from that last."""
    return sorted(triggers, key=lambda t: (t.moment, t.fetch, t.item in sources))


def advance(
    residency: Residency, rooms: Sequence[int], sizes: Sequence[int], sources: Mapping[int, int]
) -> list[Trigger]:
    """The same moves, started as early as room and order allow. What is gathered goes by a link of its own, but not
    before its source is there."""
    length = len(rooms)
    free = Free([room - held for room, held in zip(rooms, residency.occupied, strict=True)])
    triggers: list[Trigger] = []
    fetches: list[Move] = []
    for move in residency.moves:
        if move.fetch:
            fetches.append(move)
            continue
        earliest = max(move.earliest, move.moment - length + 1)
        free.add(earliest, move.moment, sizes[move.item])
        triggers.append(Trigger(earliest % length, move.item, False))
    before = {True: -length, False: -length}
    came: dict[int, int] = {}
    for move in sorted(fetches, key=lambda m: (m.moment, m.item in sources)):
        gathered = move.item in sources
        floor = max(move.earliest, before[gathered], move.moment - length + 1)
        if gathered:
            floor = max(floor, came.get(sources[move.item], floor))
        start = free.reach(floor, move.moment, sizes[move.item])
        free.add(start, move.moment, -sizes[move.item])
        before[gathered] = came[move.item] = start
        triggers.append(Trigger(start % length, move.item, True))
    return _ordered(triggers, sources)


class Free:
    """Bytes that are free, by moment; those before the iteration's start are the end of the one before. Kept in blocks,
    for what is asked and changed are long stretches."""

    WIDTH = 64

    def __init__(self, free: Sequence[int]) -> None:
        self._length = len(free)
        self._blocks = [list(free[i : i + self.WIDTH]) for i in range(0, len(free), self.WIDTH)]
        self._least = [min(block) for block in self._blocks]
        self._more = [0] * len(self._blocks)
        """What all of a block have beside what is written there; the least have it."""

    def add(self, first: int, last: int, count: int) -> None:
        """To the moments from `first` to before `last`."""
        if first < 0:
            self._add(first + self._length, min(last, 0) + self._length, count)
        self._add(max(first, 0), last, count)

    def _add(self, first: int, last: int, count: int) -> None:
        while first < last:
            index, place = divmod(first, self.WIDTH)
            block = self._blocks[index]
            end = min(len(block), place + last - first)
            if end - place == len(block):
                self._more[index] += count
                self._least[index] += count
            else:
                block[place:end] = [value + count for value in block[place:end]]
                self._least[index] = min(block) + self._more[index]
            first += end - place

    def reach(self, floor: int, last: int, count: int) -> int:
        """The first moment, not before `floor`, from which to before `last` there are `count` bytes."""
        found = self._reach(max(floor, 0), last, count) if last > 0 else last
        if found > 0 or floor >= 0:
            return found
        return self._reach(floor + self._length, found + self._length, count) - self._length

    def _reach(self, floor: int, last: int, count: int) -> int:
        while last > floor:
            index, place = divmod(last - 1, self.WIDTH)
            start = last - 1 - place
            block = self._blocks[index]
            if self._least[index] >= count:
                last = max(start, floor)
                continue
            needed = count - self._more[index]
            stop = max(floor - start, 0)
            while place >= stop and block[place] >= needed:
                place -= 1
            if place >= stop:
                return start + place + 1
            last = start + stop
        return last
