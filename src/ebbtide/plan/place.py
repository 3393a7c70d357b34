"""Homes: which optimizer state lives on the device, and what that makes of an iteration's moves.

Parameters and gradients come and go; optimizer state stays where it is updated. What the device has left
after the tide's highest water is the margin; the first chunks of the model get it, because their gradients
come last in backward, with nothing left to hide a move behind, and their parameters are needed first in the
next forward pass. How many is chosen by replaying a few candidates and taking the least traffic, so that
more memory never makes a plan worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ebbtide.errors import BudgetError
from ebbtide.plan.draft import Draft, Plan, draft
from ebbtide.plan.hostside import HostSide, beside_updates, fill
from ebbtide.plan.shape import GRAD, WHOLE_GRAD, ModelShape, Settings
from ebbtide.plan.uses import least_room, levels_of, uses_of
from ebbtide.record import Record
from ebbtide.units import format_size

Cost = Callable[[Plan], float]


def make_plan(shape: ModelShape, record: Record, settings: Settings, cost: Cost | None = None) -> Plan:
    """The plan with the least traffic among candidates of how many chunks' state the device holds.

    With a `cost`, such as the seconds that a step takes on a machine, the cheapest of the plans for this and smaller
    budgets: they come from one ladder whatever the budget, so that more memory never makes a plan dearer.
    """
    if cost is None or settings.placement != "auto":
        return _least_traffic(shape, record, settings)
    best: tuple[float, int, Plan] | None = None
    for budget in _ladder(shape, record, settings):
        try:
            plan = _least_traffic(shape, record, replace(settings, device=budget))
        except BudgetError:
            continue  # with less memory than was given; whether that is enough is said below
        found = (float(f"{cost(plan):.9g}"), plan.traffic, plan)
        if best is None or found[:2] < best[:2]:
            best = found
    return best[2] if best is not None else _least_traffic(shape, record, settings)


RUNGS = 32
"""Of the ladder of budgets, in a factor of two."""
NEAR = {True: 8, False: 2}
"""Rungs below a budget that are tried, where a plan is quickly made and where it is not."""
EVERY = {True: 4, False: 16}
"""Of the rungs further down, each so manieth, counted from the bottom: those of a smaller budget are tried, too."""
QUICK = 20_000
"""Moments times chunks."""


def _ladder(shape: ModelShape, record: Record, settings: Settings) -> list[int]:
    levels = levels_of(shape, record, settings)
    least = least_room(levels, shape.sizes, uses_of(shape, record, settings, frozenset()))
    if settings.ssd_beside_device:
        least += beside_updates(shape, range(shape.chunks), settings, range(shape.chunks))
    if least <= 0 or settings.device < least:
        return []
    most = max(levels) + sum(shape.sizes) + sum(shape.state_bytes)
    top = math.floor(RUNGS * math.log2(min(settings.device, most) / least) + 1e-9)
    quick = len(levels) * shape.chunks <= QUICK
    rungs = [k for k in range(top, -1, -1) if top - k < NEAR[quick] or k % EVERY[quick] == 0]
    return (
        [int(least * 2 ** (k / RUNGS)) for k in rungs]
        if settings.device < most
        else [most, *(int(least * 2 ** (k / RUNGS)) for k in rungs)]
    )


def _least_traffic(shape: ModelShape, record: Record, settings: Settings) -> Plan:
    search = _Search(shape, record, settings)
    total = sum(shape.state_bytes)
    if settings.placement != "auto":
        search.try_bytes(0)
    else:
        search.try_bytes(total)
        if not (search.best and search.best.traffic == 0):
            # From the most down: what lives on the host must cross the link, so less is soon not worth a replay.
            for step in reversed(range(CANDIDATES)):
                search.try_bytes(total * step // CANDIDATES)
            search.refine(total // CANDIDATES)
    if search.best is None:
        raise _refusal(shape, record, settings, search.nearest)
    return search.best.plan()


CANDIDATES = 16
REFINEMENTS = 6


class _Search:
    """Tries how many bytes of optimizer state the device is to hold; remembers the plan with the least traffic."""

    def __init__(self, shape: ModelShape, record: Record, settings: Settings) -> None:
        self.shape, self.record, self.settings = shape, record, settings
        self.best: Draft | None = None
        self.best_bytes = 0
        self.nearest: Draft | None = None
        """The draft that came closest to fitting, for the refusal."""
        self._tried: set[tuple[frozenset[int], int]] = set()

    def try_bytes(self, count: int) -> bool:
        """Whether a plan whose state chunks take up to `count` bytes is the best so far."""
        # State that streams is cut into pieces, so that some of a chunk's can stay.
        shape, split = self.shape, self.settings.ssd_beside_device
        homes, kept = fill(shape, range(shape.chunks), count, split)
        tried = (homes, sum(kept.values()))
        if tried in self._tried:
            return False
        self._tried.add(tried)
        best = self.best
        made = draft(shape, self.record, self.settings, homes, kept, None if best is None else best.traffic)
        if made is None:
            return False
        if any(made.short):
            if self.nearest is None or made.short < self.nearest.short:
                self.nearest = made
            return False
        if best is not None and (made.traffic, -made.static) >= (best.traffic, -best.static):
            return False
        self.best, self.best_bytes = made, count
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


def _refusal(shape: ModelShape, record: Record, settings: Settings, worst: Draft | None) -> BudgetError:
    levels = levels_of(shape, record, settings)
    alone = settings.alone
    if worst is not None and not worst.residency.short and not alone:
        return _host_refusal(worst.host, settings)
    uses = uses_of(shape, record, settings, frozenset())
    least = least_room(levels, shape.sizes, uses)
    if settings.placement == "static":
        held = sum(shape.sizes[shape.used(i)] for i in range(shape.chunks))
        gradients = [use for use in uses if shape.items[use.item][0] in (GRAD, WHOLE_GRAD)]
        least = held + least_room(levels, shape.sizes, gradients)
    if settings.ssd_beside_device:
        least += beside_updates(shape, range(shape.chunks), settings, range(shape.chunks))
    if worst is not None:
        least = max(least, settings.device + worst.residency.short)
    if alone and settings.device >= least:  # there is no other tier: all of it must be here at once
        states = frozenset(i for i, count in enumerate(shape.state_bytes) if count)
        held = sum(shape.parameter_bytes) + sum(shape.state_bytes)
        least = max(held + max(levels), settings.device + 1)
        everything = uses_of(shape, record, settings, states)
        gradients = [use for use in everything if shape.items[use.item][0] == GRAD]
        least = max(least, held + least_room(levels, shape.sizes, gradients))
    return BudgetError(
        f"device: this iteration needs at least {format_size(least)} ({format_size(record.peak)} of non-model data "
        f"at the peak, with the chunks in use), the budget is {format_size(settings.device)}: short by "
        f"{format_size(least - settings.device)}",
        tier="device",
        short=least - settings.device,
        advice=f"raise device.memory to {least} bytes, lower the batch size, the sequence length or chunk_size, "
        "or checkpoint activations",
    )


def _host_refusal(host: HostSide, settings: Settings) -> BudgetError:
    """The device could compute, but what it does not hold fits nowhere."""
    budget = settings.ssd if host.tier == "ssd" else settings.host
    return BudgetError(
        f"{host.tier}: model data that the device has no room for does not fit {format_size(budget)}: short by "
        f"{format_size(host.short)}",
        tier=host.tier,
        short=host.short,
        advice=f"raise {host.tier}.memory to {budget + host.short} bytes, or device.memory by {host.short} bytes",
    )
