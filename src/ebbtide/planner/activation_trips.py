"""Which activations leave the device after forward, and when each goes and comes back.

A storage can be gone once nothing but backward wants it, until the first moment that wants it back. Copies take
time: each has the time in which the computation, at the speed of any device, hides it, as long as what is kept
longer for that does not raise the water by more than a share of what it has fallen. Where memory is short of
that, nothing is kept longer.

What the host has no room for goes to SSD: what is away longest, for it has the most time. A plan that needs SSD for that
is held against those that send less away, so that RAM which is free is used first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ebbtide.planner.record import Moment, Record, Saved
from ebbtide.planner.sizes import BLOCK, passage_bytes
from ebbtide.units import round_up

OFF, CHECKPOINTS, ALL = "off", "checkpoints", "all"
NEAR = 2
"""Moments that a copy may take beside the computation, in each direction."""
SPENT = 1 / 8
"""Share of the bytes gained at the peak that copies may take back for going beside the computation."""
BYTES_HIDE, FLOPS_HIDE = 64, 64 * 200
"""Bytes of device memory, and operations, that a device gets through while one byte crosses its link."""
LINK = 20e9
"""Bytes a second over a link, where a record has times only."""
SLOWER = 8
"""A disk than a link."""
BYTES_PASS, FLOPS_PASS = 20, 100
"""Bytes of memory, and operations, that a CPU gets through while one byte comes from a disk or goes there."""
DISK = 1e9
"""Bytes a second of a disk beside a CPU, where a record has times only."""
HOST, SSD = "host", "ssd"


@dataclass(frozen=True, slots=True)
class Trip:
    """A storage is away from the start of moment `gone` to the start of moment `come`."""

    number: int
    bytes: int
    gone: int
    come: int
    tier: str = HOST


@dataclass(frozen=True)
class AwayRoom:
    """What activations may take."""

    host: int
    ssd: int = 0
    beside: bool = False
    """The device is RAM and SSD is next to it: there is neither a link nor a host."""


@dataclass(frozen=True)
class ActivationTrips:
    sizes: tuple[int, ...]
    """By number, what the record saw saved."""
    trips: Mapping[int, Trip] = field(default_factory=dict)
    beside: bool = False
    """See `Room`."""

    @property
    def bytes(self) -> int:
        """Away at the end of forward."""
        return sum(trip.bytes for trip in self.trips.values())

    @property
    def host_bytes(self) -> int:
        """Of those, on the host."""
        return sum(trip.bytes for trip in self.trips.values() if trip.tier == HOST)

    @property
    def on_ssd(self) -> tuple[Trip, ...]:
        return tuple(trip for trip in self.trips.values() if trip.tier == SSD)

    @property
    def ssd_bytes(self) -> int:
        """Written and read in each pass."""
        return sum(trip.bytes for trip in self.on_ssd)

    @property
    def stored_bytes(self) -> int:
        """On SSD, in blocks."""
        return sum(round_up(trip.bytes, BLOCK) for trip in self.on_ssd)

    @property
    def staging(self) -> int:
        """Bytes of buffers on the host through which trips to SSD pass."""
        largest = max((trip.bytes for trip in self.on_ssd), default=0)
        return 0 if self.beside else passage_bytes(largest)

    @property
    def traffic(self) -> int:
        """Bytes over all links in a pass."""
        return 2 * (self.ssd_bytes + (0 if self.beside else self.bytes))


def send_away(
    record: Record, which: str, share: float = 1.0, spent: float = SPENT, room: AwayRoom | None = None
) -> tuple[Record, ActivationTrips]:
    """What is left of the record, and what leaves: `share` of the bytes that could. Without `room`, for the host."""
    peaks = [moment.peak for moment in record.moments]
    trips = _chosen(record, which, share)
    beside = room is not None and room.beside
    if room is not None:
        trips = _spread(trips, room)
    for trip in trips:
        _raise(peaks, trip.gone, trip.come, -trip.bytes)
    lowest = max(peaks, default=0)
    ceiling = lowest + int(spent * (record.peak - lowest))
    tides = _Tides(record.moments, peaks, ceiling, beside)
    trips = tides.come_earlier(tides.go_later(trips, record.saved))
    alive = [moment.alive for moment in record.moments]
    for trip in trips:
        _raise(alive, trip.gone, trip.come, -trip.bytes)
    moments = tuple(
        replace(m, peak=peak, alive=left) for m, peak, left in zip(record.moments, peaks, alive, strict=True)
    )
    sizes = tuple(saved.bytes for saved in record.saved)
    away = ActivationTrips(
        sizes, {trip.number: trip for trip in sorted(trips, key=lambda t: t.number)}, beside
    )
    return replace(record, moments=moments), away


def _spread(trips: list[Trip], room: AwayRoom) -> list[Trip]:
    """What the host has no room for goes to SSD, where there is one: what is away longest."""
    left = sum(trip.bytes for trip in trips)
    if not room.ssd or left <= room.host:
        return trips
    made = list(trips)
    largest = 0
    for place in sorted(range(len(trips)), key=lambda i: trips[i].gone - trips[i].come):
        if left + passage_bytes(largest) <= room.host:
            break
        made[place] = replace(trips[place], tier=SSD)
        left -= trips[place].bytes
        largest = max(largest, trips[place].bytes) if not room.beside else 0
    return made


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

    def __init__(self, moments: tuple[Moment, ...], peaks: list[int], ceiling: int, beside: bool) -> None:
        self.peaks, self.ceiling = peaks, ceiling
        seen = any(moment.work for moment in moments)
        pace = (BYTES_PASS, FLOPS_PASS, DISK) if beside else (BYTES_HIDE, FLOPS_HIDE, LINK)
        first = [0.0, *accumulate(_hides(moment, seen, *pace) for moment in moments)]
        slower = first if beside else [count / SLOWER for count in first]
        self.hidden = {HOST: first, SSD: slower}
        """Bytes that go to a tier by the start of each moment."""
        self.beside = beside

    def _ways(self, tier: str) -> tuple[str, ...]:
        """What a trip takes time of: to SSD it passes over the link, too."""
        return (tier,) if tier == HOST or self.beside else (HOST, SSD)

    def go_later(self, trips: list[Trip], saved: tuple[Saved, ...]) -> list[Trip]:
        """Each stays until its copy is done, one after the other."""
        done = dict.fromkeys(self.hidden, 0.0)
        made = []
        for trip in trips:
            wanted = trip.gone
            for way in self._ways(trip.tier):
                hidden = self.hidden[way]
                done[way] = max(done[way], hidden[saved[trip.number].first + 1]) + trip.bytes
                wanted = max(wanted, min(bisect_left(hidden, done[way]), trip.come))
            gone = trip.gone
            while gone < wanted and self._fits(gone, trip.bytes):
                gone += 1
            if gone < trip.come:
                made.append(replace(trip, gone=gone))
        return made

    def come_earlier(self, trips: list[Trip]) -> list[Trip]:
        """Each starts on its way back in time, one after the other."""
        start = dict.fromkeys(self.hidden, float("inf"))
        made = []
        for trip in sorted(trips, key=lambda trip: (-trip.come, trip.number)):
            wanted = trip.come
            for way in self._ways(trip.tier):
                hidden = self.hidden[way]
                start[way] = min(start[way], hidden[trip.come]) - trip.bytes
                wanted = min(wanted, max(bisect_right(hidden, start[way]) - 1, trip.gone))
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


def _hides(moment: Moment, seen: bool, memory: float, operations: float, rate: float) -> float:
    """Bytes that cross a link while the moment is computed: by its operators, where they were seen."""
    if not seen:
        return moment.host_seconds * rate
    return sum(max(work.bytes / memory, work.flops / operations) for work in moment.work)
