"""Which activations leave the device after forward, and when each goes and comes back.

A storage can be gone once nothing but backward wants it, until the first moment that wants it back. Copies take
time: each has the time in which the computation, at the speed of any device, hides it, as long as what is kept
longer for that does not raise the water by more than a share of what it has fallen. Where memory is short of
that, nothing is kept longer; where the host is short, less leaves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ebbtide.plan.offload import NEAR
from ebbtide.record import Moment, Record, Saved

OFF, CHECKPOINTS, ALL = "off", "checkpoints", "all"
SPENT = 1 / 8
"""Share of the bytes gained at the peak that copies may take back for going beside the computation."""
BYTES_HIDE, FLOPS_HIDE = 64, 64 * 200
"""Bytes of device memory, and operations, that a device gets through while one byte crosses its link."""
LINK = 20e9
"""Bytes a second over a link, where a record has times only."""


@dataclass(frozen=True, slots=True)
class Trip:
    """A storage is away from the start of moment `gone` to the start of moment `come`."""

    number: int
    bytes: int
    gone: int
    come: int


@dataclass(frozen=True)
class Away:
    sizes: tuple[int, ...]
    """By number, what the record saw saved."""
    trips: Mapping[int, Trip] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """On the host at the end of forward, and over the link in each direction."""
        return sum(trip.bytes for trip in self.trips.values())


def choices(record: Record, which: str, host: int) -> Iterator[tuple[Record, Away]]:
    """Ways to send activations away, the preferred first: what is left of the record, and what leaves. `host`:
    bytes that they may take there."""
    for share, spent in ((1.0, SPENT), (1.0, 0.0), (0.75, 0.0), (0.5, 0.0), (0.25, 0.0), (0.0, 0.0)):
        left, away = send_away(record, which, share, spent)
        if away.bytes <= host:
            yield left, away


def send_away(record: Record, which: str, share: float = 1.0, spent: float = SPENT) -> tuple[Record, Away]:
    """What is left of the record, and what leaves: `share` of the bytes that could."""
    peaks = [moment.peak for moment in record.moments]
    trips = _chosen(record, which, share)
    for trip in trips:
        _raise(peaks, trip.gone, trip.come, -trip.bytes)
    lowest = max(peaks, default=0)
    tides = _Tides(record.moments, peaks, lowest + int(spent * (record.peak - lowest)))
    trips = tides.come_earlier(tides.go_later(trips, record.saved))
    alive = [moment.alive for moment in record.moments]
    for trip in trips:
        _raise(alive, trip.gone, trip.come, -trip.bytes)
    moments = tuple(
        replace(m, peak=peak, alive=left) for m, peak, left in zip(record.moments, peaks, alive, strict=True)
    )
    sizes = tuple(saved.bytes for saved in record.saved)
    return replace(record, moments=moments), Away(sizes, {trip.number: trip for trip in trips})


def _raise(levels: list[int], first: int, end: int, count: int) -> None:
    for moment in range(first, end):
        levels[moment] += count


def _chosen(record: Record, which: str, share: float) -> list[Trip]:
    """Those that are away longest come first: what was saved first is wanted last."""
    able: list[Trip] = []
    for number, saved in enumerate(record.saved):
        back = saved.back if saved.back >= 0 else len(record.moments)
        gone = max(saved.alone, saved.first + 1)
        wanted = which == ALL or (which == CHECKPOINTS and saved.checkpoint)
        if wanted and saved.alone >= 0 and back - gone > 2 * NEAR:
            able.append(Trip(number, saved.bytes, gone, back))
    left = share * sum(trip.bytes for trip in able)
    chosen: list[Trip] = []
    for trip in able:
        if trip.bytes <= left:
            left -= trip.bytes
            chosen.append(trip)
    return chosen


class _Tides:
    """Peaks by moment under trips, and how far a trip may be shortened without passing `ceiling`: what need not be away
    at all stays."""

    def __init__(self, moments: tuple[Moment, ...], peaks: list[int], ceiling: int) -> None:
        self.peaks, self.ceiling = peaks, ceiling
        seen = any(moment.work for moment in moments)
        self.hidden = [0.0, *accumulate(_hides(moment, seen) for moment in moments)]
        """Bytes that cross a link by the start of each moment."""

    def go_later(self, trips: list[Trip], saved: tuple[Saved, ...]) -> list[Trip]:
        """Each stays until its copy is done, one after the other."""
        done = 0.0
        made = []
        for trip in trips:
            done = max(done, self.hidden[saved[trip.number].first + 1]) + trip.bytes
            wanted = min(bisect_left(self.hidden, done), trip.come)
            gone = trip.gone
            while gone < wanted and self._fits(gone, trip.bytes):
                gone += 1
            if gone < trip.come:
                made.append(replace(trip, gone=gone))
        return made

    def come_earlier(self, trips: list[Trip]) -> list[Trip]:
        """Each starts on its way back in time, one after the other."""
        start = float("inf")
        made = []
        for trip in sorted(trips, key=lambda trip: (-trip.come, trip.number)):
            start = min(start, self.hidden[trip.come]) - trip.bytes
            wanted = max(bisect_right(self.hidden, start) - 1, trip.gone)
            come = trip.come
            while come > wanted and self._fits(come - 1, trip.bytes):
                come -= 1
            if come > trip.gone:
                made.append(replace(trip, come=come))
        return made

    def _fits(self, moment: int, count: int) -> bool:
        if self.peaks[moment] + count > self.ceiling:
            return False
        self.peaks[moment] += count
        return True


def _hides(moment: Moment, seen: bool) -> float:
    """Bytes that cross a link while the moment is computed: by its operators, where they were seen."""
    if not seen:
        return moment.host_seconds * LINK
    return sum(max(work.bytes / BYTES_HIDE, work.flops / FLOPS_HIDE) for work in moment.work)
