"""Which chunks are on the device at which moment: the iteration replayed against a room that rises and falls.

The room for chunks in a moment is what budget, fixed bytes and non-model peak leave: the tide. The
replay walks the uses of an iteration, over and over until it repeats, and yields the moves that a policy
needs. It is exact about bytes and knows no time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ebbtide.planner.eviction_choice import NEVER, Candidate, choose

KEEP, FREE, STALE, SPILL = "keep", "free", "stale", "spill"


@dataclass(frozen=True, slots=True)
class Use:
    """Chunk `item` must be on the device from moment `first` to the end of `last`.

    `creates`: what it held before does not matter, nothing is fetched. `after` says what becomes of it:
    it is kept, its payload is dead (free), a newer copy appears elsewhere (stale; of a gathered item it is the
    source's copy that is out of date, and the gathered one is dead), or it must go to the host (spill).
    `fresh`: the moment from which a newer copy can be fetched.
    """

    item: int
    first: int
    last: int
    creates: bool = False
    writes: bool = False
    after: str = KEEP
    fresh: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    rooms: tuple[int, ...]
    sizes: tuple[int, ...]
    uses: tuple[Use, ...]
    sources: Mapping[int, int] = field(default_factory=dict)
    """Items that are gathered, each with the one that must be on the device for it."""
    staying: frozenset[int] = frozenset()
    """Items that make no room for others."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move as the replay needs it: at `moment`, but as early as `earliest` without changing anything."""

    moment: int
    earliest: int
    item: int
    fetch: bool
    traffic: int


@dataclass
class Residency:
    moves: list[Move] = field(default_factory=list)
    occupied: list[int] = field(default_factory=list)
    to_device: int = 0
    to_host: int = 0
    gathered: int = 0
    """Bytes of items that were made from their sources."""
    short: int = 0
    """Bytes by which the worst moment's pinned chunks pass the room; 0 where everything fits."""
    short_moment: int = -1
    steady: bool = False
    """The iteration ends as it began, so that its moves can be repeated for ever."""

    @property
    def traffic(self) -> int:
        return self.to_device + self.to_host + self.gathered

    @property
    def evicted(self) -> set[int]:
        """Items that leave for want of room at some moment."""
        return {move.item for move in self.moves if not move.fetch}


@dataclass(slots=True)
class _Item:
    resident: bool = False
    dirty: bool = False
    stale: bool = False
    pins: int = 0
    last: int = -1
    following: int = -1
    """When it is used next: right until then."""
    left: int = 0
    """When it last left the device, or when its newer copy appears: no fetch before."""


def replay(timeline: Timeline, policy: str, cycles: int = 6) -> Residency:
    """The moves of one steady iteration: the first that ends as it began, or the last of `cycles`. Its moments
    count from its own start; a fetch's earliest moment may lie before it."""
    return _Replay(timeline, policy, cycles).run()


class _Replay:
    def __init__(self, timeline: Timeline, policy: str, cycles: int) -> None:
        self.line = timeline
        self.policy = policy
        self.cycles = cycles
        self.length = len(timeline.rooms)
        self.items = [_Item() for _ in timeline.sizes]
        self.resident: dict[int, None] = {}
        """Items on the device, in the order in which they came."""
        self.occupied = 0
        self.result = Residency()
        self.starts: list[list[Use]] = [[] for _ in range(self.length)]
        self.ends: list[list[Use]] = [[] for _ in range(self.length)]
        self.firsts: list[list[int]] = [[] for _ in timeline.sizes]
        for use in sorted(timeline.uses, key=lambda u: (u.first, u.item)):
            self.starts[use.first].append(use)
            self.ends[use.last].append(use)
            self.firsts[use.item].append(use.first)
        for item, source in timeline.sources.items():
            self.firsts[source] = sorted((*self.firsts[source], *self.firsts[item]))
        self.lent: list[int] = []
        """Sources that items of this moment are made from."""

    def run(self) -> Residency:
        carried: list[Move] = []
        for cycle in range(self.cycles):
            before = self._standing()
            moves, occupied = carried, []
            start = cycle * self.length
            for moment in range(self.length):
                self._step(start + moment, moment, moves)
                occupied.append(self.occupied)
                self._finish(start + moment, moment, moves)
            # A spill after the last moment belongs to the next iteration's first.
            carried = [move for move in moves if move.moment >= start + self.length]
            self.result.steady = cycle > 0 and self._standing() == before
            if self.result.steady or cycle == self.cycles - 1:
                self._cut(moves, start, occupied)
                break
        return self.result

    def _standing(self) -> list[tuple[bool, bool, bool]]:
        return [(item.resident, item.dirty, item.stale) for item in self.items]

    def _step(self, now: int, moment: int, moves: list[Move]) -> None:
        if not self.starts[moment]:
            self._make_room(now, moment, 0, moves)
            return
        arriving: dict[int, Use] = {}
        for use in self.starts[moment]:
            item = self.items[use.item]
            item.pins += 1
            if item.resident and item.stale and not use.creates:
                # The copy on the device is out of date: it goes, and comes back fresh.
                self._leave(use.item, now, moves)
            if not item.resident:
                arriving.setdefault(use.item, use)
        for index in list(arriving):
            self._lend(index, now, arriving, moves)
        self._make_room(now, moment, sum(self.line.sizes[i] for i in arriving), moves)
        for index, use in arriving.items():
            self._arrive(index, use, now, moves)
        for index in self.lent:
            self.items[index].pins -= 1
            self.items[index].last = now
        self.lent.clear()
        for use in self.starts[moment]:
            item = self.items[use.item]
            item.last = now
            item.stale = False
            item.dirty = item.dirty or use.writes

    def _lend(self, index: int, now: int, arriving: dict[int, Use], moves: list[Move]) -> None:
        """What a gathered item is made from must be there, and current."""
        source = self.line.sources.get(index)
        if source is None or arriving[index].creates:
            return
        item = self.items[source]
        if item.resident and item.stale:
            self._leave(source, now, moves)
        if not item.resident and source not in arriving:
            arriving[source] = Use(source, now, now)
        item.pins += 1
        self.lent.append(source)

    def _arrive(self, index: int, use: Use, now: int, moves: list[Move]) -> None:
        item = self.items[index]
        size = self.line.sizes[index]
        item.resident = True
        self.resident[index] = None
        self.occupied += size
        item.dirty = (
            use.creates
        )  # what is fetched keeps its copy elsewhere: it is clean, and leaves without traffic
        item.stale = False
        if not use.creates:
            moves.append(Move(now, item.left, index, True, size))

    def _make_room(self, now: int, moment: int, needed: int, moves: list[Move]) -> None:
        short = self.occupied + needed - self.line.rooms[moment]
        if short <= 0:
            return
        items, sizes, staying = self.items, self.line.sizes, self.line.staying
        candidates = [
            Candidate(
                i,
                sizes[i],
                NEVER if item.stale else self._next(i, item, now, moment) - now,
                item.last,
                item.dirty and not item.stale,
            )
            for i in self.resident
            if not (item := items[i]).pins and i not in staying
        ]
        for candidate in choose(self.policy, candidates, short):
            self._leave(candidate.key, now, moves)
        short = self.occupied + needed - self.line.rooms[moment]
        if short > self.result.short:
            self.result.short, self.result.short_moment = short, moment

    def _next(self, index: int, item: _Item, now: int, moment: int) -> int:
        """When it is used next, from this moment on."""
        if item.following < now:
            firsts = self.firsts[index]
            if not firsts:
                return now + NEVER
            place = bisect_left(firsts, moment)
            item.following = (
                now - moment + (firsts[place] if place < len(firsts) else firsts[0] + self.length)
            )
        return item.following

    def _leave(self, index: int, now: int, moves: list[Move]) -> None:
        item = self.items[index]
        size = self.line.sizes[index]
        self._gone(index)
        writes = item.dirty and not item.stale
        moves.append(Move(now, min(item.last + 1, now), index, False, size if writes else 0))
        item.left = max(item.left, item.last + 1)

    def _gone(self, index: int) -> None:
        self.items[index].resident = False
        del self.resident[index]
        self.occupied -= self.line.sizes[index]

    def _finish(self, now: int, moment: int, moves: list[Move]) -> None:
        for use in self.ends[moment]:
            item = self.items[use.item]
            item.pins -= 1
            item.last = now
            if use.after == KEEP:
                continue
            source = self.line.sources.get(use.item)
            if use.after == SPILL and item.resident:
                moves.append(Move(now + 1, now + 1, use.item, False, self.line.sizes[use.item]))
            if item.resident and (use.after in (SPILL, FREE) or source is not None):
                self._gone(use.item)
            fresh = now - moment + use.fresh if use.fresh else now + 1
            item.left = fresh
            item.stale = use.after == STALE and source is None
            if use.after == STALE and source is not None:
                self.items[source].stale = True
                self.items[source].left = fresh

    def _cut(self, moves: list[Move], start: int, occupied: list[int]) -> None:
        """The result: one iteration's moves, counted from its start. What the end carries over stands for what
        the iteration before carried into this one."""
        result = self.result
        for move in moves:
            if not start <= move.moment < start + self.length:
                continue
            result.moves.append(
                Move(move.moment - start, move.earliest - start, move.item, move.fetch, move.traffic)
            )
            if move.fetch and move.item in self.line.sources:
                result.gathered += move.traffic
            elif move.fetch:
                result.to_device += move.traffic
            else:
                result.to_host += move.traffic
        result.occupied = occupied


def next_use(firsts: Sequence[int], moment: int, length: int) -> int:
    """Moments from `moment` to the next first use after it, around the iteration's end; NEVER if unused."""
    if not firsts:
        return NEVER
    place = bisect_right(firsts, moment)
    return (firsts[place] if place < len(firsts) else firsts[0] + length) - moment
