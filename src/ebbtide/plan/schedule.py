"""When moves are triggered: as early as memory allows, in the order in which they are needed.

First every eviction is advanced to the moment after the chunk's last use: the traffic is the same and the
room is there sooner. Then each fetch is advanced while the chunk still fits in every moment that it
would sit through. Moves over one link keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbtide.plan.residency import Move, Residency


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
    occupied = list(residency.occupied)
    triggers: list[Trigger] = []
    fetches: list[Move] = []
    for move in residency.moves:
        if move.fetch:
            fetches.append(move)
            continue
        earliest = max(move.earliest, move.moment - length + 1)
        for t in range(earliest, move.moment):
            occupied[t % length] -= sizes[move.item]
        triggers.append(Trigger(earliest % length, move.item, False))
    before = {True: -length, False: -length}
    came: dict[int, int] = {}
    for move in sorted(fetches, key=lambda m: (m.moment, m.item in sources)):
        gathered = move.item in sources
        floor = max(move.earliest, before[gathered], move.moment - length + 1)
        if gathered:
            floor = max(floor, came.get(sources[move.item], floor))
        t = move.moment
        while t > floor and occupied[(t - 1) % length] + sizes[move.item] <= rooms[(t - 1) % length]:
            t -= 1
            occupied[t % length] += sizes[move.item]
        before[gathered] = t
        came[move.item] = t
        triggers.append(Trigger(t % length, move.item, True))
    return _ordered(triggers, sources)
