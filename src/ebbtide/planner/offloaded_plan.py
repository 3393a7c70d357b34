"""The plan for an iteration whose activations may leave the device: how much of them leaves, and how far."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.errors import BudgetError
from ebbtide.planner.activation_trips import OFF, SPENT, ActivationTrips, AwayRoom, send_away
from ebbtide.planner.placement import make_plan
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record
from ebbtide.planner.search import Cost
from ebbtide.planner.shape import ModelShape, Settings
from ebbtide.units import format_size

SHARES = ((1.0, SPENT), (1.0, 0.0), (0.75, 0.0), (0.5, 0.0), (0.25, 0.0), (0.0, 0.0))
"""Of the bytes that could leave, and what copies may take back of the gain; the preferred first."""
TRIES = 4
"""At how much of the host model data leaves to activations."""


def plan_afloat(
    shape: ModelShape, record: Record, settings: Settings, which: str, cost: Cost | None = None
) -> Plan:
    """The first that the host has room for. Those that need SSD for activations compete with it, and with each other,
    by the bytes that they move."""
    if which == OFF:
        return make_plan(shape, record, settings, cost)
    search = _Search(shape, record, settings, which, cost)
    best: Plan | None = None
    for share, spent in SHARES:
        plan = search.attempt(share, spent)
        if plan is None:
            continue
        if best is None or plan.traffic < best.traffic:
            best = plan
        if plan.away is None or not plan.away.on_ssd:
            break
    if best is None:
        refusal = search.refusal
        assert refusal is not None  # nothing leaving is the last choice, and needs no room
        try:
            raise refusal
        finally:
            del refusal, search  # see `attempt`: this frame is one of them
    return best


class _Search:
    def __init__(
        self, shape: ModelShape, record: Record, settings: Settings, which: str, cost: Cost | None
    ) -> None:
        self.shape, self.record, self.settings, self.which, self.cost = shape, record, settings, which, cost
        self.refusal: BudgetError | None = None
        """The one that was short of least."""

    def attempt(self, share: float, spent: float) -> Plan | None:
        """With so much away. Where model data lack room on the host, more of what is away goes to SSD."""
        settings = self.settings
        room = AwayRoom(settings.host, settings.ssd, settings.ssd_beside_device)
        short: BudgetError | None = None
        for _ in range(TRIES):
            left, away = send_away(self.record, self.which, share, spent, room)
            rest = self._rest(away)
            if rest is None:
                short = None if away.stored_bytes <= settings.ssd else _full_ssd(away, settings)
                break
            try:
                return replace(make_plan(self.shape, left, rest, self._cost_with(away)), away=away)
            except BudgetError as error:
                # Its frames know the search: a circle that would hold all that its callers hold.
                short = error.with_traceback(None)
            if short.tier != "host" or not settings.ssd or not away.host_bytes:
                break
            room = replace(room, host=max(0, away.host_bytes + away.staging - short.short))
        if short is not None and (self.refusal is None or short.short < self.refusal.short):
            self.refusal = short
        return None

    def _cost_with(self, away: ActivationTrips) -> Cost | None:
        cost = self.cost
        return None if cost is None else lambda plan: cost(replace(plan, away=away))

    def _rest(self, away: ActivationTrips) -> Settings | None:
        """What activations leave to model data; None where they do not fit. A tier that is full is a tier still."""
        settings = self.settings
        host = settings.host - away.host_bytes - away.staging
        ssd = settings.ssd - away.stored_bytes
        if host < 0 or ssd < 0:
            return None
        return replace(settings, host=max(host, min(settings.host, 1)), ssd=max(ssd, min(settings.ssd, 1)))


def _full_ssd(away: ActivationTrips, settings: Settings) -> BudgetError:
    count, budget = away.stored_bytes, settings.ssd
    return BudgetError(
        f"ssd: activations that leave the device take {format_size(count)}, the budget is {format_size(budget)}: "
        f"short by {format_size(count - budget)}",
        tier="ssd",
        short=settings.asked("ssd", count - budget),
        advice=f"raise ssd.memory to {settings.raised('ssd', count - budget)} bytes, or give the device or the host "
        "more memory",
    )
