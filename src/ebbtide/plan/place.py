"""Homes: which optimizer state lives on the device, and what that makes of an iteration's moves.

Parameters and gradients come and go; optimizer state stays where it is updated. What the device has left
after the tide's highest water is the margin; the first chunks of the model get it, because their gradients
come last in backward, with nothing left to hide a move behind, and their parameters are needed first in the
next forward pass. How many is chosen by replaying a few candidates and taking the least traffic, so that
more memory never makes a plan worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ebbtide.errors import BudgetError
from ebbtide.plan.residency import FREE, KEEP, SPILL, STALE, Residency, Timeline, Use, replay
from ebbtide.plan.schedule import Trigger, advance, on_demand
from ebbtide.record import Record
from ebbtide.units import format_size

SCALARS = 4096
"""Bytes that every moment is given for what loops keep from iteration to iteration: losses, norms."""


@dataclass(frozen=True)
class ModelShape:
    """What the planner must know of a model: which runs and parameters lie in which chunks, and bytes."""

    run_chunks: tuple[tuple[int, ...], ...]
    parameter_chunk: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    """By chunk."""
    gradient_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    """Master and moments by chunk; 0 where nothing in the chunk is trained."""


@dataclass(frozen=True)
class Settings:
    device: int
    host: int
    placement: str = "auto"
    eviction: str = "farthest-next-use"
    prefetch: bool = True
    accumulate: int = 1
    in_backward: bool = False
    take_over: bool = False
    """Gradients take the parameter's space (separate master) where one accumulation was seen."""


@dataclass(frozen=True)
class Plan:
    record: Record
    homes: tuple[str, ...]
    """By chunk: where its optimizer state lives."""
    levels: tuple[int, ...]
    """Non-model bytes by moment, updates included."""
    triggers: tuple[tuple[Trigger, ...], ...]
    items: tuple[tuple[str, int], ...]
    firsts: dict[tuple[str, int], tuple[int, ...]]
    residency: Residency
    keep_host: bool
    take_over: bool
    static_bytes: int
    accumulate: int = 1
    least: int = 0
    """The smallest device budget this iteration could run in."""
    lookup: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def traffic(self) -> int:
        return self.residency.traffic


def make_plan(shape: ModelShape, record: Record, settings: Settings) -> Plan:
    """The plan with the least traffic among candidates of how many chunks' state the device holds."""
    search = _Search(shape, record, settings)
    total = sum(shape.state_bytes)
    if settings.placement != "auto":
        search.try_bytes(0)
    else:
        search.try_bytes(total)
        if not (search.best and search.best.traffic == 0):
            for step in range(CANDIDATES):
                search.try_bytes(total * step // CANDIDATES)
            search.refine(total // CANDIDATES)
    if search.best is None:
        raise _refusal(shape, record, settings, search.nearest)
    return search.best


CANDIDATES = 16
REFINEMENTS = 6


class _Search:
    """Tries how many bytes of optimizer state the device is to hold; remembers the plan with the least traffic."""

    def __init__(self, shape: ModelShape, record: Record, settings: Settings) -> None:
        self.shape, self.record, self.settings = shape, record, settings
        self.best: Plan | None = None
        self.best_bytes = 0
        self.nearest: Plan | None = None
        """The plan that came closest to fitting, for the refusal."""
        self._tried: set[frozenset[int]] = set()

    def try_bytes(self, count: int) -> bool:
        """Whether a plan whose state chunks take up to `count` bytes is the best so far."""
        homes = self._fill(count)
        if homes in self._tried:
            return False
        self._tried.add(homes)
        plan = _plan_with(self.shape, self.record, self.settings, homes)
        if plan is None:
            return False
        if plan.residency.short:
            if self.nearest is None or plan.residency.short < self.nearest.residency.short:
                self.nearest = plan
            return False
        if self.best is not None and (plan.traffic, -plan.static_bytes) >= (
            self.best.traffic,
            -self.best.static_bytes,
        ):
            return False
        self.best, self.best_bytes = plan, count
        return True

    def refine(self, step: int) -> None:
        """Halving steps around the best."""
        for _ in range(REFINEMENTS):
            step //= 2
            if not step:
                return
            base = self.best_bytes
            if not self.try_bytes(base + step):
                self.try_bytes(max(0, base - step))

    def _fill(self, count: int) -> frozenset[int]:
        """The chunks that fit, in the model's order; what is too large is passed over."""
        chosen = []
        for index, size in enumerate(self.shape.state_bytes):
            if size and size <= count:
                count -= size
                chosen.append(index)
        return frozenset(chosen)


def host_bytes(shape: ModelShape, device_homes: frozenset[int], keep_host: bool) -> int:
    """What the host must hold: the state that lives there, with its gradients, and parameters."""
    state = sum(
        s + g
        for i, (s, g) in enumerate(zip(shape.state_bytes, shape.gradient_bytes, strict=True))
        if i not in device_homes and s
    )
    parameters = sum(
        p
        for i, p in enumerate(shape.parameter_bytes)
        if keep_host or (i not in device_homes and shape.state_bytes[i])
    )
    return state + parameters


def _plan_with(shape: ModelShape, record: Record, settings: Settings, device: frozenset[int]) -> Plan | None:
    keep_host = host_bytes(shape, device, True) <= settings.host
    static = sum(shape.state_bytes[i] for i in device)
    pinned = settings.placement == "static"
    if pinned:
        static += sum(shape.parameter_bytes)
    levels = _levels(shape, record, settings)
    rooms = tuple(settings.device - static - level for level in levels)
    if min(rooms, default=0) < 0:
        return None
    sizes = (*shape.parameter_bytes, *shape.gradient_bytes)
    uses = _uses(shape, record, settings, device)
    chunks = len(shape.parameter_bytes)
    if pinned:
        uses = [use for use in uses if use.item >= chunks]
    line = Timeline(rooms, sizes, tuple(uses), keep_host)
    residency = replay(line, settings.eviction)
    if pinned:
        residency.to_device += sum(
            p for p, s in zip(shape.parameter_bytes, shape.state_bytes, strict=True) if s
        )
    moves = advance(residency, rooms, sizes) if settings.prefetch else on_demand(residency)
    triggers: list[list[Trigger]] = [[] for _ in rooms]
    for trigger in moves:
        triggers[trigger.moment].append(trigger)
    items = tuple([("param", i) for i in range(chunks)] + [("grad", i) for i in range(chunks)])
    firsts: dict[tuple[str, int], list[int]] = {key: [] for key in items}
    for use in uses:
        firsts[items[use.item]].append(use.first)
    homes = tuple("device" if i in device else "host" for i in range(chunks))
    return Plan(
        record,
        homes,
        levels,
        tuple(tuple(group) for group in triggers),
        items,
        {key: tuple(sorted(set(moments))) for key, moments in firsts.items()},
        residency,
        keep_host,
        settings.take_over,
        static,
        settings.accumulate,
        _least(levels, sizes, uses),
        {key: place for place, key in enumerate(items)},
    )


def _levels(shape: ModelShape, record: Record, settings: Settings) -> tuple[int, ...]:
    once = [moment.peak for moment in record.moments]
    if once:
        once[-1] = max(once[-1], record.between)  # its level stays until the next pass begins
    updates = 1 if settings.in_backward else len(shape.state_bytes)
    return tuple(level + SCALARS for level in (*once * settings.accumulate, *[record.between] * updates))


def _least(levels: Sequence[int], sizes: Sequence[int], uses: Sequence[Use]) -> int:
    pinned = [0] * len(levels)
    for moment in range(len(levels)):
        pinned[moment] = 0
    held: list[set[int]] = [set() for _ in levels]
    for use in uses:
        for moment in range(use.first, use.last + 1):
            held[moment].add(use.item)
    for moment, items in enumerate(held):
        pinned[moment] = sum(sizes[i] for i in items)
    return max((level + count for level, count in zip(levels, pinned, strict=True)), default=0)


@dataclass
class _Builder:
    """The uses of one iteration, in the order of moments."""

    shape: ModelShape
    record: Record
    settings: Settings
    device: frozenset[int]
    uses: list[Use] = field(default_factory=list)

    def build(self) -> list[Use]:
        settings, record = self.settings, self.record
        length = len(record.moments)
        self.total = length * settings.accumulate
        chunks = len(self.shape.parameter_bytes)
        last_use = [-1] * chunks
        raw: list[Use] = []
        for micro in range(settings.accumulate):
            base = micro * length
            for access in record.accesses:
                for chunk in self.shape.run_chunks[access.run]:
                    raw.append(Use(chunk, base + access.first, base + access.last))
                    last_use[chunk] = max(last_use[chunk], base + access.last)
        arrivals = self._arrivals(length)
        for chunk, moments in arrivals.items():
            self._gradient_uses(chunk, moments, raw, last_use)
        self._mark_stale(raw, last_use, arrivals)
        self.uses = raw
        if not settings.in_backward:
            self._updates(arrivals)
        return self.uses

    def _arrivals(self, length: int) -> dict[int, list[int]]:
        arrivals: dict[int, list[int]] = {}
        for micro in range(self.settings.accumulate):
            for arrival in self.record.arrivals:
                chunk = self.shape.parameter_chunk[arrival.parameter]
                arrivals.setdefault(chunk, []).append(micro * length + arrival.moment)
        return arrivals

    def _gradient_uses(self, chunk: int, moments: list[int], raw: list[Use], last_use: list[int]) -> None:
        at_home = chunk in self.device
        item = chunk + len(self.shape.parameter_bytes)
        own_space = not self.settings.take_over
        if self.settings.in_backward and at_home:
            raw += [Use(chunk, j, j, writes=True) for j in moments]
            last_use[chunk] = max(last_use[chunk], moments[-1])
            return
        if not own_space:
            last_use[chunk] = max(last_use[chunk], moments[-1])
        target = item if own_space else chunk
        for place, j in enumerate(moments):
            last = place == len(moments) - 1
            after = SPILL if last and not at_home else KEEP
            fresh = self._fresh(chunk, j) if after == SPILL else 0
            raw.append(
                Use(target, j, j, creates=own_space and place == 0, writes=True, after=after, fresh=fresh)
            )

    def _fresh(self, chunk: int, moment: int) -> int:
        """The moment from which a host update's result can be fetched."""
        return moment + 1 if self.settings.in_backward else self.total + chunk + 1

    def _mark_stale(self, raw: list[Use], last_use: list[int], arrivals: dict[int, list[int]]) -> None:
        """After its last use a parameter chunk that the host updates is worth nothing on the device."""
        for place, use in enumerate(raw):
            chunk = use.item
            if (
                chunk < len(self.shape.parameter_bytes)
                and chunk in arrivals
                and chunk not in self.device
                and use.last == last_use[chunk]
                and use.after == KEEP
            ):
                fresh = self._fresh(chunk, max(use.last, arrivals[chunk][-1]))
                raw[place] = Use(chunk, use.first, use.last, use.creates, use.writes, STALE, fresh)

    def _updates(self, arrivals: dict[int, list[int]]) -> None:
        chunks = len(self.shape.parameter_bytes)
        for chunk in sorted(arrivals):
            if chunk not in self.device:
                continue
            j = self.total + chunk
            self.uses.append(Use(chunk, j, j, writes=True))
            if not self.settings.take_over:
                self.uses.append(Use(chunk + chunks, j, j, after=FREE))


def _uses(shape: ModelShape, record: Record, settings: Settings, device: frozenset[int]) -> list[Use]:
    return _Builder(shape, record, settings, device).build()


def _refusal(shape: ModelShape, record: Record, settings: Settings, worst: Plan | None) -> BudgetError:
    least = _least(
        _levels(shape, record, settings),
        (*shape.parameter_bytes, *shape.gradient_bytes),
        _uses(shape, record, settings, frozenset()),
    )
    if settings.placement == "static":
        least = record.peak + sum(shape.parameter_bytes) + max(shape.gradient_bytes, default=0)
    if worst is not None:
        least = max(least, settings.device + worst.residency.short)
    return BudgetError(
        f"device: this iteration needs at least {format_size(least)} ({format_size(record.peak)} of non-model data "
        f"at the peak, with the chunks in use), the budget is {format_size(settings.device)}: short by "
        f"{format_size(least - settings.device)}",
        tier="device",
        short=least - settings.device,
        advice=f"raise device.memory to {least} bytes, lower the batch size, the sequence length or chunk_size, "
        "or checkpoint activations",
    )
