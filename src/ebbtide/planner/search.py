"""The search for a plan: candidates of how much state the device holds, and of how much room what comes and goes is
given.

Without a machine the plan with the least traffic is taken. Where RAM is one tier, memory that activations and chunks
hand each other in every iteration counts, too: what activations leave as they ebb need not be filled. Least traffic
is not least time: state on the device is updated there, beside less work on the host; and with more room the moves come
in another order, which may wait longer. So where plans have a cost, such as the seconds of a step, what an iteration
would do with less memory is tried, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ebbtide.planner.host_side import fill, fill_host, filling_order
from ebbtide.planner.plans import Draft, Plan, draft, fixed_bytes
from ebbtide.planner.record import Record
from ebbtide.planner.shape import ModelShape, Settings
from ebbtide.planner.uses import least_room, levels_of, uses_of

Cost = Callable[[Plan], float]

CANDIDATES = 16
REFINEMENTS = 6
SMALL = 500
"""Moments times chunks: of what is small, all that the device may hold is tried with every room."""
RUNGS = 32
"""Of room, in a factor of two."""
FRESH = 1
"""What a byte is worth that activations and chunks hand each other, in bytes that are moved: where they have one pool,
that they change places, and no more RAM than that. The system would clear it, for four."""
COARSE = 8
"""Of the rungs below, each so manieth is tried where the model is not small."""


@dataclass(frozen=True)
class _HeldState:
    """What the device holds for good."""

    chunks: frozenset[int]
    kept: Mapping[int, int]
    fixed: int
    """Its bytes."""


class PlanSearch:
    """Tries candidates; remembers the best."""

    def __init__(
        self, shape: ModelShape, record: Record, settings: Settings, cost: Cost | None = None
    ) -> None:
        self.shape, self.record, self.settings, self.cost = shape, record, settings, cost
        self.levels = levels_of(shape, record, settings)
        self.small = len(self.levels) * shape.chunks <= SMALL
        self.best: Plan | None = None
        self.nearest: Draft | None = None
        """The draft that came closest to fitting, for the refusal."""
        self._grain = max(1, math.gcd(*shape.sizes))
        self._least: tuple[float, int] = (math.inf, 0)
        """The best plan's cost, or its traffic where plans have none; then what decides between equals."""
        self._tried: set[tuple[object, ...]] = set()

    def none(self) -> None:
        """The device holds no state."""
        self._try(self._held(0), self.settings.device)

    def every(self) -> None:
        """All numbers of chunks, in the model's order, each with all rooms. The candidates for one budget are among
        those for a larger one: more memory does not make a plan dearer."""
        total = 0
        for count in (0, *self.shape.state_bytes):
            total += count
            held = self._held(total)
            for budget in self._rungs(held):
                self._try(held, budget)

    def some(self) -> None:
        """Some shares, with all the room there is; where plans have a cost, the best with less."""
        best = self._shares(floor=0)
        if self.best is None:
            return  # nor does anything fit with less room
        if self.cost is not None:
            held = self._held(best)
            for budget in self._rungs(held)[::COARSE]:
                self._try(held, budget)
        elif self.settings.ssd_beside_device and self.best.traffic:
            self._shares(floor=max(self.levels, default=0))

    def _shares(self, floor: int) -> int:
        """Tries some shares with what is left above `floor` bytes; gives the last that was the best so far."""
        device, total = self.settings.device, sum(self.shape.state_bytes)
        best, step = 0, total // CANDIDATES
        # From the most down: what lives on the host must cross the link, so less is soon not worth a replay.
        for number in reversed(range(CANDIDATES + 1)):
            count = total * number // CANDIDATES
            if self._try(self._held(count), device, floor):
                best = count
            if self.cost is None and self.best is not None and not self.best.traffic:
                return best
        for _ in range(REFINEMENTS):
            step //= 2
            for count in (best + step, max(0, best - step)):
                if self._try(self._held(count), device, floor):
                    best = count
                    break
        return best

    def _held(self, count: int) -> _HeldState:
        """Up to so many bytes of state, and what comes with it."""
        shape, settings = self.shape, self.settings
        # State that streams is cut into pieces, so that some of a chunk's can stay.
        beside = settings.ssd_beside_device
        order = filling_order(range(shape.chunks), settings) if beside else range(shape.chunks)
        chunks, kept = fill(shape, order, count, beside)
        fixed = fixed_bytes(shape, settings, chunks, fill_host(shape, chunks, settings, kept))
        return _HeldState(chunks, kept, fixed)

    def _rungs(self, held: _HeldState) -> list[int]:
        """Budgets from that in which nothing ever has to leave down to that of what every moment uses, counted from
        there."""
        sizes = self.shape.sizes
        uses = uses_of(self.shape, self.record, self.settings, held.chunks)
        least = held.fixed + least_room(self.levels, sizes, uses)
        most = held.fixed + max(self.levels) + sum(sizes)
        top = min(most, self.settings.device)
        if not 0 < least <= top:
            return []
        rungs = [int(least * 2 ** (k / RUNGS)) for k in range(1 + int(RUNGS * math.log2(top / least)))]
        return [*([top] if top == most else []), *(min(top, budget) for budget in reversed(rungs))]

    def _try(self, held: _HeldState, budget: int, floor: int = 0) -> bool:
        """Whether the plan for a device of so many bytes is the best so far."""
        what = (held.chunks, *held.kept.values())
        rooms = tuple((budget - held.fixed - max(level, floor)) // self._grain for level in self.levels)
        if not self._new("rooms", what, rooms):
            return False
        settings = replace(self.settings, device=budget)
        best = False
        # What moves so that gradients have room to wait is counted, and so is what is waited for where they have none.
        streams = settings.in_backward and settings.ssd_beside_device and self.cost is None
        for roomy in (True, False) if streams else (False,):
            worth = int(self._least[0]) if self.best is not None and self.cost is None else None
            made = draft(self.shape, self.record, settings, held.chunks, held.kept, worth, floor, roomy)
            if made is None:
                continue
            if not any(made.short):
                best |= self._compare(made, what)
            elif not roomy and (self.nearest is None or made.short < self.nearest.short):
                self.nearest = made
        return best

    def _compare(self, made: Draft, what: tuple[object, ...]) -> bool:
        plan: Plan | None = None
        found: tuple[float, int] = (made.traffic + FRESH * made.exchanged + made.waited_for, -made.static)
        if self.cost is not None:
            plan = made.plan()
            if not self._new("moves", what, plan.triggers):
                return False
            found = (float(f"{self.cost(plan):.9g}"), plan.traffic)
        if found >= self._least:
            return False
        self.best, self._least = plan or made.plan(), found
        return True

    def _new(self, *key: object) -> bool:
        known = len(self._tried)
        self._tried.add(key)
        return len(self._tried) > known
