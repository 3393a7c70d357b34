"""Activations that leave the device after forward and come back for backward, derived from a record.

What a forward moment leaves for backward is what stays alive from its end to the end of the forward pass. It is
needed again in the first backward moment after which no more than what lay below it is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.record import FORWARD, Record

NEAR = 2
"""Moments that a copy may take beside the computation, in each direction."""


@dataclass(frozen=True)
class Offload:
    record: Record
    """With what is left on the device."""
    moved: dict[int, tuple[tuple[int, int], ...]]
    """By moment, what leaves after it: bytes, and the moment that needs them again."""
    host_bytes: int


def offload(record: Record) -> Offload:
    """All that can be away for a while is."""
    moments = record.moments
    end = next((j for j, m in enumerate(moments) if m.phase != FORWARD), len(moments))
    floors = _floors([moment.alive for moment in moments[:end]])
    moved: dict[int, tuple[tuple[int, int], ...]] = {}
    away = [0] * (len(moments) + 1)
    before = min(record.between, floors[0]) if floors else 0
    total = 0
    wanted = _wanted([moment.alive for moment in moments], end, sorted({*floors, before}))
    for j, floor in enumerate(floors):
        left, lowest = floor - before, before
        before = max(before, floor)
        back = wanted.get(lowest, end)
        if left <= 0 or back - j <= 2 * NEAR + 1:
            continue
        moved[j] = (*moved.get(j, ()), (left, back))
        away[j + 1 + NEAR] += left
        away[back - NEAR] -= left
        total += left
    gone = 0
    lighter = []
    for moment, change in zip(moments, away, strict=False):
        gone += change
        lighter.append(replace(moment, peak=moment.peak - gone, alive=moment.alive - gone))
    return Offload(replace(record, moments=tuple(lighter)), moved, total)


def _floors(alive: list[int]) -> list[int]:
    """By moment, the least that is alive from its end to the end of the list."""
    floors = list(alive)
    for j in range(len(floors) - 2, -1, -1):
        floors[j] = min(floors[j], floors[j + 1])
    return floors


def _wanted(alive: list[int], end: int, levels: list[int]) -> dict[int, int]:
    """For each level, the first backward moment whose end finds no more than that alive: what lay above it was used
    there at the latest."""
    found: dict[int, int] = {}
    left = list(levels)
    for j in range(end, len(alive)):
        while left and alive[j] <= left[-1]:
            found[left.pop()] = j
    return dict.fromkeys(left, len(alive) - 1) | found
