"""Which chunk leaves when room is needed. One choice, used by planner and runtime alike.

Farthest next use is optimal for equal, clean chunks (Belady). Note [weighing]: with write-back and unequal
sizes it is not, so a candidate is scored by how long it frees its bytes for what it costs to bring it
back: distance * bytes / cost, where cost is the bytes of the refetch and, if dirty, of the write-back.
For equal, clean chunks this is the distance alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Candidate:
    key: int
    """The place in the chunk list, too."""
    nbytes: int
    next_use: int
    """Moments until the next use on this device; NEVER where there is none."""
    last_use: int
    dirty: bool


def _farthest(candidate: Candidate) -> tuple[float, int]:
    if candidate.next_use >= NEVER:
        return (float("inf") if not candidate.dirty else float(NEVER), candidate.key)
    return (candidate.next_use / (2.0 if candidate.dirty else 1.0), candidate.key)


def _lru(candidate: Candidate) -> tuple[float, int]:
    return (-candidate.last_use, -candidate.key)


def _list_order(candidate: Candidate) -> tuple[float, int]:
    return (0.0, -candidate.key)


POLICIES: dict[str, Callable[[Candidate], tuple[float, int]]] = {
    "farthest-next-use": _farthest,
    "lru": _lru,
    "list-order": _list_order,
}


def choose(policy: str, candidates: Iterable[Candidate], needed: int) -> Sequence[Candidate]:
    """The candidates to evict, first to last, until `needed` bytes are free; all of them where that is not
    enough. What the last one makes superfluous stays."""
    chosen: list[Candidate] = []
    freed = 0
    for candidate in sorted(candidates, key=POLICIES[policy], reverse=True):
        if freed >= needed:
            break
        chosen.append(candidate)
        freed += candidate.nbytes
    for candidate in chosen[:-1]:
        if freed - candidate.nbytes >= needed:
            freed -= candidate.nbytes
            chosen.remove(candidate)
    return chosen
