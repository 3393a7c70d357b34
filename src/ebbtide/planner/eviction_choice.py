"""Which chunk leaves when room is needed. One choice, used by planner and runtime alike.

Farthest next use is optimal for equal, clean chunks (Belady). Note [weighing]: with write-back and unequal
sizes it is not, so a candidate is scored by how long it frees the bytes that are still short for what it costs: the
bytes of the refetch and, if dirty, of the write-back. For equal, clean chunks this is the distance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

NEVER = 1 << 60


class Candidate(NamedTuple):  # of which a plan makes millions
    key: int
    """The place in the chunk list, too."""
    nbytes: int
    next_use: int
    """Moments until the next use on this device; NEVER where there is none."""
    last_use: int
    dirty: bool


Score = tuple[float, int]


def _farthest(candidate: Candidate, short: int) -> Score:
    if candidate.next_use >= NEVER and not candidate.dirty:
        return (float("inf"), candidate.key)
    cost = candidate.nbytes * (2 if candidate.dirty else 1)
    return (candidate.next_use * min(candidate.nbytes, short) / cost, candidate.key)


def _lru(candidate: Candidate, short: int) -> Score:
    return (-candidate.last_use, -candidate.key)


def _list_order(candidate: Candidate, short: int) -> Score:
    return (0.0, -candidate.key)


@dataclass(frozen=True)
class _Policy:
    score: Callable[[Candidate, int], Score]
    """Of a candidate, where so many bytes are short: the highest leaves first."""
    order: Callable[[Candidate], Any]
    """Among candidates of one size, clean or dirty alike, scores go up with it, however much is short."""
    downward: bool = False
    """They go down."""


POLICIES: dict[str, _Policy] = {
    "farthest-next-use": _Policy(_farthest, attrgetter("next_use", "key")),
    "lru": _Policy(_lru, attrgetter("last_use", "key"), True),
    "list-order": _Policy(_list_order, attrgetter("key"), True),
}


def choose(policy: str, candidates: Iterable[Candidate], needed: int) -> Sequence[Candidate]:
    """The candidates to evict, first to last, until `needed` bytes are free; all of them where that is not
    enough. What the last one makes superfluous stays."""
    way = POLICIES[policy]
    alike: dict[tuple[int, bool], list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault((candidate.nbytes, candidate.dirty), []).append(candidate)
    for group in alike.values():
        group.sort(key=way.order, reverse=way.downward)
    largest = max((nbytes for nbytes, _ in alike), default=0)
    heads = {kind: way.score(group[-1], needed) for kind, group in alike.items()}
    chosen: list[Candidate] = []
    freed = 0
    while heads and freed < needed:
        best = max(heads, key=heads.__getitem__)
        group = alike[best]
        chosen.append(group.pop())
        freed += best[0]
        if not group:
            del heads[best]
        # While more is short than any candidate has, how much it is changes no score.
        changed = heads if needed - freed < largest else [best] if group else []
        for kind in changed:
            heads[kind] = way.score(alike[kind][-1], needed - freed)
    for candidate in chosen[:-1]:
        if freed - candidate.nbytes >= needed:
            freed -= candidate.nbytes
            chosen.remove(candidate)
    return chosen
