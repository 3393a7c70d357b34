"""A plan in two steps: a draft says what moves a choice of homes needs, the plan says when each of them starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add, sub

from ebbtide.planner.activation_trips import ActivationTrips
from ebbtide.planner.host_side import HostSide, Paged, beside_updates, fill_host, kept_bytes, largest_on_host
from ebbtide.planner.record import Record
from ebbtide.planner.retention import Residency, Timeline, Use, replay
from ebbtide.planner.schedule import Trigger, advance, on_demand
from ebbtide.planner.shape import GRAD, PARAM, WHOLE_GRAD, ModelShape, Settings, may_leave
from ebbtide.planner.sizes import stored_bytes
from ebbtide.planner.uses import (
    gradient_passes,
    gradients_waiting,
    host_direct_bytes,
    last_arrivals,
    least_room,
    levels_of,
    unfinished,
    uses_of,
)


@dataclass(frozen=True)
class Plan:
    record: Record
    homes: tuple[str, ...]
    """By chunk: where its optimizer state lives."""
    levels: tuple[int, ...]
    """Non-model bytes by moment, updates included, or what is left to them at least."""
    triggers: tuple[tuple[Trigger, ...], ...]
    items: tuple[tuple[str, int], ...]
    firsts: dict[tuple[str, int], tuple[int, ...]]
    uses: tuple[Use, ...]
    residency: Residency
    host: HostSide
    in_parameter_space: bool
    static_bytes: int
    accumulate: int = 1
    least: int = 0
    """The smallest device budget this iteration could run in."""
    in_use: int = 0
    """Levels and the chunks in use, at their highest."""
    away: ActivationTrips | None = None
    """Activations that leave between forward and backward; the record is without them."""

    @property
    def traffic(self) -> int:
        """Bytes over all links in one iteration; what SSD streams is read and written, activations go and come."""
        activations = self.away.traffic * self.accumulate if self.away is not None else 0
        return self.residency.traffic + 2 * self.host.ssd_bytes + activations

    @cached_property
    def evicted(self) -> frozenset[tuple[str, int]]:
        """What leaves the device for want of room at some moment."""
        return frozenset(self.items[item] for item in self.residency.evicted)

    @cached_property
    def highest(self) -> int:
        """Bytes of the device, at the moment that takes the most."""
        return self.static_bytes + max(self._passing, default=0)

    @cached_property
    def _passing(self) -> tuple[int, ...]:
        """By moment: non-model data and the chunks that come and go."""
        occupied = self.residency.occupied
        return tuple(level + held for level, held in zip(self.levels, occupied, strict=True))

    @cached_property
    def growth(self) -> tuple[int, ...]:
        """By moment: by how much non-model data and chunks together come to exceed the chunks that are there then."""
        highest = reversed([*itertools.accumulate(reversed(self._passing), max)])
        return tuple(most - held for most, held in zip(highest, self.residency.occupied, strict=True))

    def update_order(self, in_backward: bool, parameter_chunk: Sequence[int]) -> list[int]:
        """Chunks whose state streams from SSD, in the order of their updates."""
        last = last_arrivals(self.record, parameter_chunk)
        found = [chunk for chunk in last if self.homes[chunk] == "ssd"]
        return sorted(found, key=(lambda chunk: (last[chunk], chunk)) if in_backward else None)


@dataclass(frozen=True)
class Draft:
    """Homes, and the moves of a steady iteration under them."""

    shape: ModelShape
    record: Record
    settings: Settings
    device: frozenset[int]
    """Chunks whose optimizer state lives there."""
    host: HostSide
    static: int
    levels: tuple[int, ...]
    """Non-model bytes by moment, or what is left to them at least."""
    rooms: tuple[int, ...]
    uses: tuple[Use, ...]
    residency: Residency
    lacking: int = 0
    """Bytes of gradients that wait for the disk in backward and have no room."""

    @property
    def short(self) -> tuple[int, int]:
        """Bytes by which the device and the host (with SSD) are too small."""
        return self.residency.short, self.host.short

    @property
    def traffic(self) -> int:
        return self.residency.traffic + streamed_traffic(self.host, self.settings)

    @property
    def waited_for(self) -> float:
        """Bytes of state that the computation waits for at the end of backward, so that gradients find room: the disk
        has nothing to do later, while forward goes on."""
        gradients = sum(self.shape.gradient_bytes[i] for i in self.host.ssd)
        return 2 * self.host.ssd_bytes * self.lacking / gradients if self.lacking else 0.0

    @property
    def exchanged(self) -> int:
        """Where both are RAM: bytes that non-model data leaves to chunks as it ebbs, and gets back, in every iteration.
        They pass through the system, which clears each page."""
        if not self.settings.ssd_beside_device:
            return 0
        return max(0, max(self.residency.occupied, default=0) - min(self.rooms, default=0))

    def plan(self) -> Plan:
        shape, settings, residency = self.shape, self.settings, self.residency
        sizes, items = shape.sizes, shape.items
        if settings.prefetch:
            moves = advance(residency, self.rooms, sizes, shape.sources)
        else:
            moves = on_demand(residency, shape.sources)
        triggers: list[list[Trigger]] = [[] for _ in self.rooms]
        coming = self._coming()
        for trigger in moves:
            triggers[coming[trigger.moment]].append(trigger)
        firsts: dict[tuple[str, int], list[int]] = {key: [] for key in items}
        for use in self.uses:
            firsts[items[use.item]].append(use.first)
        return Plan(
            self.record,
            tuple(self._home(i) for i in range(shape.chunks)),
            self.levels,
            tuple(tuple(group) for group in triggers),
            items,
            {key: tuple(sorted(set(moments))) for key, moments in firsts.items()},
            self.uses,
            residency,
            self.host,
            settings.in_parameter_space,
            self.static,
            settings.accumulate,
            least=least_room(levels_of(shape, self.record, settings), sizes, self.uses),
            in_use=least_room(self.levels, sizes, self.uses),
        )

    def _coming(self) -> list[int]:
        """By moment, the first from it on that comes: nothing is updated in the moments of chunks without gradients."""
        total = len(self.record.moments) * self.settings.accumulate
        updated = {self.shape.parameter_chunk[arrival.parameter] for arrival in self.record.arrivals}
        if self.settings.in_backward:
            updated = set()
        coming = [0] * len(self.rooms)
        following = 0
        for moment in reversed(range(len(self.rooms))):
            if moment < total or moment - total in updated:
                following = moment
            coming[moment] = following
        return coming

    def _home(self, chunk: int) -> str:
        return "device" if chunk in self.device else "ssd" if chunk in self.host.ssd else "host"


def streamed_traffic(host: HostSide, settings: Settings) -> int:
    """What state that streams from SSD and back is worth, beside bytes that are moved in a pass. Passes do not wait for
    lock-free updates, which may take several of them, reading and writing at once."""
    return host.ssd_bytes // settings.max_staleness if settings.lock_free else 2 * host.ssd_bytes


def fixed_bytes(shape: ModelShape, settings: Settings, device: frozenset[int], host: HostSide) -> int:
    """What is on the device for good: state, and beside SSD the buffers of updates; parameters where they are static,
    with room for a slice, to gather or to update them."""
    static = sum(shape.state_bytes[i] for i in device)
    if settings.ssd_beside_device:
        static += beside_updates(shape, host.ssd, settings, host.ssd) + kept_bytes(shape, host.kept)
    if settings.placement == "static":
        static += sum(shape.sizes[shape.used(i)] for i in range(shape.chunks))
        static += max((shape.parameter_bytes[i] for i in shape.shared), default=0)
    return static


def draft(
    shape: ModelShape,
    record: Record,
    settings: Settings,
    device: frozenset[int],
    kept: Mapping[int, int] | None = None,
    worth: int | None = None,
    floor: int = 0,
    roomy: bool = False,
) -> Draft | None:
    """None where the device cannot even hold what lives there, or where more than `worth` bytes would move. `kept`:
    pieces of state on SSD that stay on the device, where that is RAM. `floor`: bytes that are left to non-model data
    at all times. `roomy`: gradients that wait for the disk in backward have their room."""
    host = fill_host(shape, device, settings, kept)
    direct_bytes = host_direct_bytes(shape, record, settings, device)
    least = 0 if settings.ssd_beside_device else _at_least(shape, record, device, direct_bytes)
    if worth is not None and least + streamed_traffic(host, settings) > worth:
        return None
    static = fixed_bytes(shape, settings, device, host)
    pinned = settings.placement == "static"
    levels = tuple(max(level, floor) for level in levels_of(shape, record, settings))
    waiting = gradients_waiting(shape, record, settings, host.ssd)
    rooms = tuple(
        settings.device - static - level - (count if roomy else 0)
        for level, count in zip(levels, waiting, strict=True)
    )
    if min(rooms, default=0) < 0:
        return None
    uses = uses_of(shape, record, settings, device)
    if pinned:
        uses = [use for use in uses if shape.items[use.item][0] in (GRAD, WHOLE_GRAD)]
    leaving = may_leave(settings.alone)
    staying = frozenset(item for item, (kind, _) in enumerate(shape.items) if kind not in leaving)
    line = Timeline(rooms, shape.sizes, tuple(uses), shape.sources, staying)
    residency = replay(line, settings.eviction)
    host = _with_evicted(shape, record, settings, device, host, residency)
    residency.to_host += sum(direct_bytes.values())
    if pinned:
        trained = [i for i, count in enumerate(shape.state_bytes) if count]
        residency.to_device += sum(shape.parameter_bytes[i] for i in trained)
        residency.gathered += sum(shape.sizes[shape.used(i)] for i in trained if i in shape.shared)
    lacking = 0
    if not roomy:
        lacking = max(map(sub, map(add, residency.occupied, waiting), rooms), default=0)
    return Draft(
        shape, record, settings, device, host, static, levels, rooms, tuple(uses), residency, max(0, lacking)
    )


def _with_evicted(
    shape: ModelShape,
    record: Record,
    settings: Settings,
    device: frozenset[int],
    host: HostSide,
    residency: Residency,
) -> HostSide:
    """What leaves the device for want of room is on the host (or SSD) beside what lives there, and keeps its place."""
    if settings.ssd_beside_device:
        extra = sum(stored_bytes(shape.sizes[item], shape.piece) for item in residency.evicted)
        needed = sum(stored_bytes(shape.state_bytes[i], shape.piece) for i in host.ssd) + extra
        return replace(host, short=max(0, needed - settings.ssd))
    # What nobody updates leaves without a copy being made: the host has had one all along.
    frozen = {
        i for i, (kind, chunk) in enumerate(shape.items) if kind == PARAM and not shape.state_bytes[chunk]
    }
    evicted = {m.item for m in residency.moves if not m.fetch and (m.traffic or m.item in frozen)}
    waiting = 0
    if settings.in_backward and not settings.in_parameter_space:
        # Of the two that wait for their updates, one may be among these.
        events = _waits(shape, record, device, settings.host_direct)
        events += [] if settings.host_direct else _returning(shape, residency)
        beside = largest_on_host(shape, range(shape.chunks), shape.gradient_bytes)
        waiting = max(0, _incomplete(shape, events) - beside)
    extra = _evicted_bytes(shape, evicted, device, host.keep) + waiting
    for _ in range(2):
        if not settings.ssd or host.host_bytes + extra <= settings.host:
            break
        # State makes room for it, or the copies of all parameters do: then those that leave want places of their own.
        host = fill_host(shape, device, replace(settings, host=max(1, settings.host - extra)))
        extra = _evicted_bytes(shape, evicted, device, host.keep) + waiting
    needed = host.host_bytes + extra
    if not extra:
        return host
    if needed - settings.host > host.short:
        return replace(host, host_bytes=needed, short=needed - settings.host, tier="host")
    return replace(host, host_bytes=needed)


def _evicted_bytes(shape: ModelShape, evicted: Iterable[int], device: frozenset[int], keep: bool) -> int:
    """Bytes of host that these items take beside what lives there, and the copies of all parameters if it keeps them."""
    copies = {kind: Paged(shape, shape.parameter_bytes) for kind in (PARAM, GRAD)}
    found = 0
    for item in evicted:
        kind, chunk = shape.items[item]
        lives_there = bool(shape.state_bytes[chunk]) and chunk not in device
        if not (lives_there or (keep and kind == PARAM)):
            found += copies[kind].put(chunk) if kind in copies else shape.sizes[item]
    return found


_Events = list[tuple[int, bool, int]]
"""(moment, whether they are no longer kept for others, chunk) of gradients on the host."""


def _incomplete(shape: ModelShape, events: _Events) -> int:
    """Bytes of gradients that are on the host before the last of their chunk has come, at their most."""
    copies = Paged(shape, shape.gradient_bytes)
    held = most = 0
    for _, over, chunk in sorted(events):
        held += -copies.take(chunk) if over else copies.put(chunk)
        most = max(most, held)
    return most


def _returning(shape: ModelShape, residency: Residency) -> _Events:
    """They leave the device, and come back for the last."""
    events: _Events = []
    returning: set[int] = set()
    for move in reversed(residency.moves):
        kind, chunk = shape.items[move.item]
        if kind == GRAD and move.fetch:
            returning.add(chunk)
            events.append((move.moment, True, chunk))
        elif kind == GRAD and chunk in returning:
            returning.discard(chunk)
            events.append((move.earliest, False, chunk))
    return events


def _waits(shape: ModelShape, record: Record, device: frozenset[int], host_direct: bool) -> _Events:
    """`host_direct`: from the first gradient on; where not all come that are expected, to the end of backward."""
    events: _Events = []
    waiting = unfinished(shape, record)
    for chunk, passes in gradient_passes(record, shape.parameter_chunk).items():
        if chunk in device or not shape.gradient_bytes[chunk]:
            continue
        if host_direct or chunk in waiting:
            last = passes[-1][-1]
            begin, end = (
                passes[0][0] if host_direct else last,
                len(record.moments) if chunk in waiting else last,
            )
            events += [(begin, False, chunk), (end, True, chunk)]
    return events


def _at_least(
    shape: ModelShape, record: Record, device: frozenset[int], direct_bytes: Mapping[int, int]
) -> int:
    """Bytes that must move whatever the room: gradients down and parameters up of what the host updates, and a
    gather of what ranks share. `direct_bytes`: bytes of gradients that go there as they arrive, by chunk."""
    used = {shape.parameter_chunk[arrival.parameter] for arrival in record.arrivals}
    trained = [i for i in used if shape.state_bytes[i]]
    away = [i for i in trained if i not in device]
    crossing = sum(shape.parameter_bytes[i] + direct_bytes.get(i, shape.gradient_bytes[i]) for i in away)
    return crossing + sum(shape.sizes[shape.used(i)] for i in trained if i in shape.shared)
