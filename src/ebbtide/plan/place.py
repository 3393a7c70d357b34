"""Homes: which optimizer state lives on the device, and what that makes of an iteration's moves.

Parameters and gradients come and go; optimizer state stays where it is updated. What the device has left
after the tide's highest water is the margin; the first chunks of the model get it, because their gradients
come last in backward, with nothing left to hide a move behind, and their parameters are needed first in the
next forward pass. How many is chosen by replaying a few candidates and taking the least traffic, so that
more memory never makes a plan worse.
"""

from __future__ import annotations

from ebbtide.errors import BudgetError
from ebbtide.plan.draft import Draft, Plan
from ebbtide.plan.hostside import HostSide, beside_updates
from ebbtide.plan.search import Cost, Search
from ebbtide.plan.shape import GRAD, PARAM, WHOLE_GRAD, ModelShape, Settings
from ebbtide.plan.uses import least_room, levels_of, uses_of
from ebbtide.record import Record
from ebbtide.units import format_size


def make_plan(shape: ModelShape, record: Record, settings: Settings, cost: Cost | None = None) -> Plan:
    """The plan with the least traffic among candidates of how many chunks' state the device holds; with a `cost`, such
    as the seconds that a step takes on a machine, the cheapest."""
    if cost is not None and settings.placement == "auto":
        dear = Search(shape, record, settings, cost)
        if dear.small:
            dear.every()
        else:
            dear.some()
        if dear.best is not None:
            return dear.best
    search = Search(shape, record, settings)
    if settings.placement == "auto":
        search.some()
    else:
        search.none()
    if search.best is None:
        raise _refusal(shape, record, settings, search.nearest)
    return search.best


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
        passing = [use for use in everything if shape.items[use.item][0] != PARAM]
        least = max(least, held + least_room(levels, shape.sizes, passing))
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
