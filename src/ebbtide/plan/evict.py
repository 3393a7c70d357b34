"""Which chunk leaves when room is needed. One choice, used by planner and runtime alike.

Farthest next use is optimal for equal, clean chunks (Belady). Note [weighing]: with write-back and unequal
sizes it is not, so a candidate is scored by how long it frees the bytes that are still short for what it costs: the
bytes of the refetch and, if dirty, of the write-back. For equal, clean chunks this is the distance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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


POLICIES: dict[str, Callable[[Candidate, int], Score]] = {
    "farthest-next-use": _farthest,
    "lru": _lru,
    "list-order": _list_order,
}


def choose(policy: str, candidates: Iterable[Candidate], needed: int) -> Sequence[Candidate]:
    """The candidates to evict, first to last, until `needed` bytes are free; all of them where that is not
    enough. What the last one makes superfluous stays."""
    score = POLICIES[policy]
    left = list(candidates)
    sizes = {candidate.nbytes for candidate in left}
    largest = max(sizes, default=0) if len(sizes) > 1 else 0
    # While more is short than any candidate has, or where all have the same, how much is short does not change who is
    # first: one order serves for all.
    left.sort(key=lambda candidate: score(candidate, max(sizes)))
    chosen: list[Candidate] = []
    freed = 0
    while left and freed < needed:
        if needed - freed >= largest:
            best = left.pop()
        else:
            best = max(left, key=lambda candidate: score(candidate, needed - freed))
            left.remove(best)
        chosen.append(best)
        freed += best.nbytes
    for candidate in chosen[:-1]:
        if freed - candidate.nbytes >= needed:
            freed -= candidate.nbytes
            chosen.remove(candidate)
    return chosen
