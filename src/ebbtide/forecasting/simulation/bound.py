"""The least that an iteration must move, in closed form: what plans are held against.

Note [least traffic]: optimizer state that is not on the device costs its gradients down and its parameters up.
What is updated on the device has its newest value there: in every moment its parameters, and the gradients
that wait for the update, are there or come back. Of the rest, so are the parameters that were used before
a moment and will be after it. Chunks are taken as divisible, and which of them share a moment as the most favourable,
so no plan can move less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ebbtide.forecasting.simulation.rates import COMPUTE, DISK, DRAM, HOST, TO_DEVICE, TO_HOST, WIRE, Rates
from ebbtide.planner.record import Record
from ebbtide.planner.shape import ModelShape, Settings

STEPS = 1000
"""Shares of the optimizer state on the device that are told apart."""


def least_traffic(shape: ModelShape, record: Record, settings: Settings) -> int:
    """Bytes over both links of the host in one update, at least."""
    trained = updated(shape, record)
    total = sum(shape.state_bytes[i] for i in trained)
    if not total or not record.moments:
        return 0
    if settings.ssd_beside_device:
        return 2 * least_streamed(shape, record, settings)
    away = sum(shape.parameter_bytes[i] for i in trained) + _gradients(shape, record, settings, trained)
    rooms = [settings.device - moment.peak for moment in record.moments]
    crossing = _crossing(shape, record)
    waiting = (
        [0] * len(rooms) if settings.in_backward or settings.in_parameter_space else _waiting(shape, record)
    )
    held_in_all = max(waiting)
    moments = list(zip(rooms, crossing, waiting, strict=True))

    def moved(step: int) -> float:
        share = step / STEPS
        state = share * total
        params, grads = share * sum(shape.parameter_bytes[i] for i in trained), (1 - share) * held_in_all
        again = 0.0
        for room, across, held in moments:
            needed = state + params + max(0.0, held - grads) + max(0.0, across - params)
            again = max(again, needed - room)
        return (1 - share) * away + settings.accumulate * again

    if settings.placement != "auto":
        return round(moved(0))
    # Sums and greatest values of straight lines are convex: the least is where they stop falling.
    return round(moved(bisect_left(range(STEPS), True, key=lambda step: moved(step) <= moved(step + 1))))


def _gradients(shape: ModelShape, record: Record, settings: Settings, trained: Sequence[int]) -> int:
    """Bytes of all gradients: chunk by chunk, with their padding, or those that arrive, where they go one by one."""
    if not settings.host_direct:
        return sum(shape.gradient_bytes[i] for i in trained)
    return sum(shape.expected[parameter] for parameter in {arrival.parameter for arrival in record.arrivals})


def least_streamed(shape: ModelShape, record: Record, settings: Settings) -> int:
    """Where all memory is RAM, with SSD beside it: bytes that do not fit at once in the fullest moment. In each
    iteration they must be read once and, for all of it changes, written once; what no update changes is left out."""
    if not settings.ssd:
        return 0
    waiting = [0] * len(record.moments) if settings.in_backward else _waiting(shape, record)
    fullest = max(
        (moment.peak + held for moment, held in zip(record.moments, waiting, strict=True)), default=0
    )
    trained = updated(shape, record)
    wanted = sum(shape.parameter_bytes[i] for i in trained) + sum(shape.state_bytes[i] for i in trained)
    return max(0, fullest + wanted - settings.device - settings.host)


def updated(shape: ModelShape, record: Record) -> list[int]:
    """Chunks that an iteration has gradients of: the others' optimizer state is not touched."""
    arrived = {shape.parameter_chunk[arrival.parameter] for arrival in record.arrivals}
    return [i for i in sorted(arrived) if shape.state_bytes[i]]


@dataclass(frozen=True)
class Must:
    """What an iteration must do, whatever the plan, by resource: seconds at the machine's rates."""

    seconds: Mapping[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def bound(self) -> float:
        return max(self.seconds.values(), default=0.0)


def resource_bound(
    shape: ModelShape,
    record: Record,
    settings: Settings,
    rates: Rates,
    update_bytes: Sequence[int],
    behind: int = 1,
) -> Must:
    """The least that the busiest resource has to do, for the share of the optimizer state on the device that makes it
    least. `behind`: passes that an update on the host may take."""
    facts = _Facts(shape, record, settings, rates, update_bytes, behind)
    room = settings.device - min((moment.peak for moment in record.moments), default=0)
    most = min(1.0, max(0.0, room / facts.state)) if facts.state else 1.0
    shares = [0.0] if settings.placement != "auto" else [most * step / SHARES for step in range(SHARES + 1)]
    return min((facts.at(share) for share in shares), key=lambda must: must.bound)


SHARES = 100


class _Facts:
    def __init__(
        self,
        shape: ModelShape,
        record: Record,
        settings: Settings,
        rates: Rates,
        update_bytes: Sequence[int],
        behind: int,
    ) -> None:
        self.behind = behind
        trained = updated(shape, record)
        self.settings, self.rates = settings, rates
        self.state = sum(shape.state_bytes[i] for i in trained)
        self.grads = sum(shape.gradient_bytes[i] for i in trained)
        self.params = sum(shape.parameter_bytes[i] for i in trained)
        self.updates = sum(update_bytes[i] for i in trained)
        self.compute = settings.accumulate * sum(rates.compute(moment) for moment in record.moments)
        rooms = [settings.device - moment.peak for moment in record.moments]
        self.tightest = _tightest(rooms, _crossing(shape, record))
        self.gathered = sum(shape.whole_bytes[i] for i in trained if i in shape.shared)

    def at(self, share: float) -> Must:
        rates, settings = self.rates, self.settings
        away = 1 - share
        held = share * (self.state + self.params)
        again = max(
            (max(0.0, held + max(0.0, across - share * self.params) - room)
             for room, across in self.tightest),
            default=0.0,
        )  # fmt: skip
        again = 0.0 if settings.placement == "static" else again * settings.accumulate
        beside = settings.ssd_beside_device
        up, down = (0.0, 0.0) if beside else (away * self.params + again, away * self.grads)
        waiting = 0 if settings.in_parameter_space or settings.in_backward else self.grads
        host = settings.host - away * (self.params + waiting)
        streamed = max(0.0, away * self.state - max(0.0, host)) if settings.ssd else 0.0
        if beside:
            streamed = away * self.state + again
        links = rates.machine.links
        wire = rates.gather(self.gathered, rates.ranks) if self.gathered else 0.0
        seconds = {
            COMPUTE: self.compute + share * rates.update_on_device(self.updates),
            HOST: away * rates.update_on_host(self.updates) / self.behind,
            TO_DEVICE: up / links.host_device,
            TO_HOST: down / links.host_device,
            WIRE: wire * (1 + settings.accumulate),
            DISK: rates.disk_both(streamed) / self.behind,
        }
        if rates.on_cpu:
            copies = (seconds[TO_DEVICE] + seconds[TO_HOST]) / rates.machine.host.cores
            seconds[COMPUTE] += seconds[HOST] + copies
        else:
            traffic = (away * self.updates + 2 * streamed) / self.behind + up + down
            seconds[DRAM] = traffic / rates.dram
        return Must({name: value for name, value in seconds.items() if value})


def _tightest(rooms: Sequence[int], crossing: Sequence[int]) -> list[tuple[int, int]]:
    """The moments' rooms with what crosses them, without those where more room has less to hold than some other."""
    found: list[tuple[int, int]] = []
    for room, across in sorted(zip(rooms, crossing, strict=True), key=lambda pair: (pair[0], -pair[1])):
        if not found or across > found[-1][1]:
            found.append((room, across))
    return found


def _waiting(shape: ModelShape, record: Record) -> list[int]:
    """By moment: bytes of gradients that have arrived and wait for the update, were all state on the device."""
    arrived: set[int] = set()
    by_moment: dict[int, set[int]] = {}
    for arrival in record.arrivals:
        by_moment.setdefault(arrival.moment, set()).add(shape.parameter_chunk[arrival.parameter])
    waiting = []
    for moment in range(len(record.moments)):
        arrived |= by_moment.get(moment, set())
        waiting.append(sum(shape.gradient_bytes[i] for i in arrived))
    return waiting


def _crossing(shape: ModelShape, record: Record) -> list[int]:
    """By moment: bytes of parameter chunks that were used before it and will be used at or after it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for access in record.accesses:
        for chunk in shape.run_chunks[access.run]:
            first[chunk] = min(first.get(chunk, access.first), access.first)
            last[chunk] = max(last.get(chunk, access.first), access.first)
    change = [0] * (len(record.moments) + 1)
    for chunk, begin in first.items():
        if begin < last[chunk]:
            change[begin + 1] += shape.parameter_bytes[chunk]
            change[last[chunk]] -= shape.parameter_bytes[chunk]
    across: list[int] = []
    alive = 0
    for delta in change[:-1]:
        alive += delta
        across.append(alive)
    return across
