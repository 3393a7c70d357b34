"""Homes: which optimizer state lives on the device, and what that makes of an iteration's moves.

Parameters and gradients come and go; optimizer state stays where it is updated. What the device has left
after the tide's highest water is the margin; the first chunks of the model get it, because their gradients
come last in backward, with nothing left to hide a move behind, and their parameters are needed first in the
next forward pass. How many is chosen by replaying a few candidates and taking the least traffic, so that
more memory never makes a plan worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ebbtide.errors import BudgetError
from ebbtide.planner.host_side import fill_host
from ebbtide.planner.plans import Draft, Plan, draft, fixed_bytes
from ebbtide.planner.record import FORWARD, Record
from ebbtide.planner.search import Cost, PlanSearch
from ebbtide.planner.shape import TIERS, ModelShape, Settings
from ebbtide.planner.uses import SCALARS, least_room, levels_of, uses_of
from ebbtide.units import format_size

ATTEMPTS = 100
"""At budgets that are enough. Each comes nearer, and a few do; a refusal that takes for ever would be worse than one
that names too little."""


def make_plan(shape: ModelShape, record: Record, settings: Settings, cost: Cost | None = None) -> Plan:
    """The plan with the least traffic among candidates of how many chunks' state the device holds; with a `cost`, such
    as the seconds that a step takes on a machine, the cheapest."""
    settings = _for_gradients(shape, record, settings)
    if cost is not None and settings.placement == "auto":
        dear = PlanSearch(shape, record, settings, cost)
        if dear.small:
            dear.every()
        else:
            dear.some()
        if dear.best is not None:
            return dear.best
        if not dear.small and not settings.ssd_beside_device:
            # Without a cost the same would be tried.
            raise _refusal(shape, record, settings, dear.nearest)
    search = PlanSearch(shape, record, settings)
    if settings.placement == "auto":
        search.some()
    else:
        search.none()
    if search.best is None:
        raise _refusal(shape, record, settings, search.nearest)
    return search.best


def has_plan(shape: ModelShape, record: Record, settings: Settings) -> bool:
    """Whether `make_plan` finds one; of those that do, the first that comes to mind."""
    if hopeless(shape, record, settings):
        return False
    search = PlanSearch(shape, record, _for_gradients(shape, record, settings))
    search.none()
    if search.best is None and settings.placement == "auto":
        search.some()
    return search.best is not None


def hopeless(shape: ModelShape, record: Record, settings: Settings) -> bool:
    """Whether some moment uses more than the device has, without any state there. Where state lives on SSD its buffers
    may be more than state, and nothing is said."""
    if settings.placement != "auto" or settings.ssd_beside_device:
        return False
    settings = _for_gradients(shape, record, settings)
    fixed = fixed_bytes(shape, settings, frozenset(), fill_host(shape, frozenset(), settings))
    uses = uses_of(shape, record, settings, frozenset())
    return fixed + least_room(levels_of(shape, record, settings), shape.sizes, uses) > settings.device


def _for_gradients(shape: ModelShape, record: Record, settings: Settings) -> Settings:
    """Those that come a second time may not have their parameters' space, for somebody has computed with these
    meanwhile; nor those whose parameters are used again after they came, when a region is computed again."""
    if not settings.in_parameter_space:
        return settings
    came = {arrival.parameter: arrival.moment for arrival in record.arrivals}
    used_again = any(
        came.get(parameter, access.first) < access.first
        for access in record.accesses
        if access.phase == FORWARD and shape.run_parameters
        for parameter in shape.run_parameters[access.run]
    )
    if len(came) == len(record.arrivals) and not used_again:
        return settings
    # Nor do they go straight to the host, for which the engine has not been made.
    return replace(settings, in_parameter_space=False, one_memory=False)


def _refusal(shape: ModelShape, record: Record, settings: Settings, worst: Draft | None) -> BudgetError:
    """With budgets that are enough: who sets them is not refused again."""
    fitting = _nearest_fit(shape, record, settings, worst)
    enough = fitting.settings
    short = {tier: getattr(enough, tier) - getattr(settings, tier) for tier in TIERS}
    if _one_tier(settings):
        short["device"] += _unused(shape, record)
    # What was imagined may be off by a few bytes, which the next plan, of a real pass, would lack.
    spare = {"device": 0 if record.source == "live" else SCALARS}
    more = " and ".join(
        f"{t}.memory to {settings.raised(t, n + spare.get(t, 0))} bytes" for t, n in short.items() if n > 0
    )
    if not short["device"]:
        return _host_refusal("host" if short["host"] else "ssd", short, more, settings)
    budget = settings.set_budget("device")
    kept = budget - settings.device
    beside = f", and {format_size(kept)} that other engines, averages or exchanges hold" if kept else ""
    return BudgetError(
        f"device: this iteration needs at least {format_size(budget + short['device'])} ({format_size(record.peak)} of "
        f"non-model data at the peak, with the chunks in use{beside}), the budget is {format_size(budget)}: short by "
        f"{format_size(short['device'])}",
        tier="device",
        short=short["device"],
        advice=f"raise {more}, lower the batch size, the sequence length or chunk_size, or checkpoint activations",
    )


def enough(shape: ModelShape, record: Record, settings: Settings) -> int:
    """Bytes of the device from which on there is a plan, as a refusal would name them."""
    return _nearest_fit(shape, record, _for_gradients(shape, record, settings), None).settings.device


def _host_refusal(tier: str, short: Mapping[str, int], more: str, settings: Settings) -> BudgetError:
    """The device could compute, but what it does not hold fits nowhere."""
    return BudgetError(
        f"{tier}: model data that the device has no room for does not fit {format_size(getattr(settings, tier))}: "
        f"short by {format_size(short[tier])}",
        tier=tier,
        short=settings.asked(tier, short[tier]),
        advice=f"raise {more}, or device.memory",
    )


def _one_tier(settings: Settings) -> bool:
    """All of it is on the device; what names a placement wants another tier."""
    return settings.alone and settings.placement == "auto"


def _nearest_fit(shape: ModelShape, record: Record, settings: Settings, worst: Draft | None) -> Draft:
    """A choice of homes, under budgets that are enough for it."""
    states = frozenset(i for i, count in enumerate(shape.state_bytes) if count)
    if _one_tier(settings):
        return _enough(shape, record, settings, states, {})
    if worst is not None and not worst.residency.short:
        return _enough(shape, record, settings, worst.device, worst.host.kept)
    if settings.alone:
        settings = replace(settings, host=1)  # there is to be one
    choices: list[tuple[frozenset[int], Mapping[int, int]]] = [(frozenset(), {})]
    if settings.ssd_beside_device and settings.placement == "auto":
        choices.append(
            (states, {})
        )  # of a small model it is less than the buffers that state streams through
    made = [_enough(shape, record, settings, *choice) for choice in choices]
    return min(made, key=lambda one: (one.settings.device, one.settings.host + one.settings.ssd))


def _enough(
    shape: ModelShape, record: Record, settings: Settings, device: frozenset[int], kept: Mapping[int, int]
) -> Draft:
    """These homes, and budgets raised until they fit."""
    fixed = fixed_bytes(shape, settings, device, fill_host(shape, device, settings, kept))
    least = fixed + max(levels_of(shape, record, settings), default=0)
    settings = replace(settings, device=max(settings.device, least))
    made: Draft | None = None
    for _ in range(ATTEMPTS):
        made = draft(shape, record, settings, device, kept)
        assert made is not None  # what lives on the device fits
        on_device, beside = made.short
        if on_device:
            settings = replace(settings, device=settings.device + on_device)
        elif beside and made.host.tier == "ssd":
            settings = replace(settings, ssd=settings.ssd + beside)
        elif beside:
            settings = replace(settings, host=settings.host + beside)
        else:
            break
    assert made is not None
    return made


def _unused(shape: ModelShape, record: Record) -> int:
    """Bytes of parameters that no moment uses: where there is no other tier, they are on the device all the same."""
    used = {chunk for access in record.accesses for chunk in shape.run_chunks[access.run]}
    return sum(count for i, count in enumerate(shape.parameter_bytes) if i not in used)
