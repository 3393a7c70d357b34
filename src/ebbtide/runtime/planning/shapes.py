"""What is known of one shape of input, from those of others: pure.

Batches of one kind differ in some sizes (padded texts), or in numbers that are counted up (a step). A shape that is
nowhere larger than a known one needs no trace: it takes no more at any moment. What it takes at most lies on the line
between two known shapes that enclose it, for bytes grow with sizes by sums of products of them: such functions lie below
their chords.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from ebbtide.record import Record, Saved

DERIVED = "derived"
"""The source of a record that was made from those of other shapes."""
GROWTH = 2
"""So much larger, at most, than a batch that outgrows what is known is the one that is imagined: more are to come."""
STEPS = 32
"""Shapes between two known ones are rounded up to so many, that few plans serve all of them."""

_TENSOR = re.compile(r"\(([\d, ]*)\)(torch\.\w+)")
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Kind:
    """A signature, with what may vary apart."""

    structure: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    """By tensor."""
    numbers: tuple[int, ...]

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
    numbers: list[int] = []
    for part in signature.split("|"):
        if tensor := _TENSOR.fullmatch(part):
            found = tuple(int(size) for size in tensor[1].split(",") if size.strip())
            sizes.append(found)
            structure.append(f"{len(found)}{tensor[2]}")
        elif _NUMBER.fullmatch(part):
            numbers.append(int(part))
            structure.append("number")
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


def share_of(kind: Kind, low: Kind, high: Kind) -> int:
    """How far from the low one to the high one it lies, at most, in steps; `STEPS` where only the high one is as
    large."""
    shares = []
    for size, least, most in zip(kind.flat, low.flat, high.flat, strict=True):
        if size > least:
            shares.append(STEPS if most == least else ceil(STEPS * (size - least) / (most - least)))
    return min(max(shares, default=0), STEPS)


def between(low: Record, high: Record, steps: int) -> Record | None:
    """What a shape takes at most that lies so far from the low one to the high one. None where the two passes are not
    made of the same moments."""
    if not alike(low, high):
        return None

    def at(least: int, most: int) -> int:
        return least + max(0, ceil((most - least) * steps / STEPS))

    moments = tuple(
        replace(b, peak=at(a.peak, b.peak), alive=at(a.alive, b.alive))
        for a, b in zip(low.moments, high.moments, strict=True)
    )
    saved = tuple(replace(b, bytes=at(a.bytes, b.bytes)) for a, b in zip(low.saved, high.saved, strict=True))
    return replace(
        high,
        moments=moments,
        saved=saved,
        between=at(low.between, high.between),
        at_backward=at(low.at_backward, high.at_backward),
        source=DERIVED,
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


def within(one: Record, other: Record) -> bool:
    """Whether a pass is like another and takes no more at any moment."""
    return alike(one, other) and all(
        a.peak <= b.peak and a.alive <= b.alive for a, b in zip(one.moments, other.moments, strict=True)
    )
