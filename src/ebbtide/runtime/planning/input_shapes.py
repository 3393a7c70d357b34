"""What is known of one shape of input, from those of others: pure.

Batches of one kind differ in some sizes (padded texts), in numbers that are counted up (a step), or in texts (a file's
name). A shape that is nowhere larger than a known one needs no trace: it takes no more at any moment. No more is taken
for granted: what lies between two known shapes may be rounded up to the larger one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ebbtide.planner.record import Record, Saved

DERIVED = "derived"
"""The source of a record that was made from those of other shapes."""
GROWTH = 2
"""So much larger, at most, than a batch that outgrows what is known is the one that is imagined: more are to come."""
NEAR = 8
"""A known shape that has more than so many times the elements says too little: the small one is traced itself."""

SWITCHES = "."
"""What a signature ends with: the number before it is no argument."""

_TENSOR = re.compile(r"\(([\d, ]*)\)(torch\.\w+)")
_NUMBER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class Kind:
    """A signature, with what may vary apart."""

    structure: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    """By tensor."""
    numbers: tuple[str, ...]
    """Numbers and texts, as they are written."""

    def covers(self, other: Kind) -> bool:
        """Whether no size of another is larger."""
        return self.structure == other.structure and all(
            mine >= theirs for mine, theirs in zip(self.flat, other.flat, strict=True)
        )

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(size for sizes in self.sizes for size in sizes)

    @property
    def elements(self) -> int:
        return sum(map(prod, self.sizes))


@lru_cache(1024)
def kind_of(signature: str) -> Kind:
    structure: list[str] = []
    sizes: list[tuple[int, ...]] = []
    numbers: list[str] = []
    for part in signature.split("|"):
        if tensor := _TENSOR.fullmatch(part):
            found = tuple(int(size) for size in tensor[1].split(",") if size.strip())
            sizes.append(found)
            structure.append(f"{len(found)}{tensor[2]}")
        elif _NUMBER.fullmatch(part):
            numbers.append(part)
            structure.append("number")
        elif part.startswith(("'", '"')):
            numbers.append(part)
            structure.append("text")
        else:
            structure.append(part)
    return Kind(tuple(structure), tuple(sizes), tuple(numbers))


def resized(signature: str, sizes: tuple[tuple[int, ...], ...]) -> str:
    """The signature of the same input with other sizes."""
    left = iter(sizes)
    parts = signature.split("|")
    return "|".join(
        f"{next(left)}{found[2]}" if (found := _TENSOR.fullmatch(part)) else part for part in parts
    )


def grown(kind: Kind, known: Kind, times: float) -> tuple[tuple[int, ...], ...]:
    """Sizes that enclose both. Those that have grown leave room for more, up to `times` what is known, and at most twice
    what there is now."""
    return tuple(
        tuple(
            before if size <= before else max(size, min(GROWTH * size, int(times * before)))
            for size, before in zip(one, other, strict=True)
        )
        for one, other in zip(kind.sizes, known.sizes, strict=True)
    )


def alike(one: Record, other: Record) -> bool:
    """Whether two passes differ in bytes alone."""
    return (
        one.accesses == other.accesses
        and one.arrivals == other.arrivals
        and (one.forward, one.turns) == (other.forward, other.turns)
        and [m.event for m in one.moments] == [m.event for m in other.moments]
        and [_times(s) for s in one.saved] == [_times(s) for s in other.saved]
    )


def _times(saved: Saved) -> tuple[int, int, int, bool]:
    return saved.first, saved.alone, saved.back, saved.checkpoint


def same(one: Record, other: Record) -> bool:
    """Whether two passes take the same at every moment."""
    return alike(one, other) and [(m.peak, m.alive) for m in one.moments] == [
        (m.peak, m.alive) for m in other.moments
    ]


def raised(record: Record, count: int) -> Record:
    """The same pass with so many bytes more at every moment."""
    moments = tuple(replace(m, peak=m.peak + count, alive=m.alive + count) for m in record.moments)
    return replace(record, moments=moments)


def beyond(live: Record, imagined: Record) -> int:
    """What a pass took at most that was not imagined."""
    if not alike(live, imagined):
        return 0
    return max((a.peak - b.peak for a, b in zip(live.moments, imagined.moments, strict=True)), default=0)
