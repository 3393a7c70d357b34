"""`ebbtide.explain(engine)`: where the bytes are, what the plan does, and why, in words that a notebook can show."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.planner.plans import Plan
from ebbtide.planner.record import PHASES
from ebbtide.planner.shape import TIERS
from ebbtide.runtime.session import Session
from ebbtide.units import format_size

TIER_NAMES = {"device": "the device", "host": "the host", "ssd": "SSD"}


@dataclass(frozen=True)
class TierLine:
    """What a tier holds."""

    tier: str
    budget: int
    peak: int
    tags: tuple[tuple[str, int, int], ...]
    """(tag, bytes now, the most so far)."""


@dataclass(frozen=True)
class Explanation:
    tiers: tuple[TierLine, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for one in self.tiers:
            lines.append(f"{one.tier}: at most {format_size(one.peak)} of {format_size(one.budget)}")
            lines += [
                f"  {tag:<14} {format_size(now):>10} now, {format_size(most):>10} at the most"
                for tag, now, most in one.tags
            ]
        return "\n".join([*lines, *self.reasons])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [
            f"<tr><td>{html.escape(one.tier)}</td><td>{html.escape(tag)}</td><td>{format_size(now)}</td>"
            f"<td>{format_size(most)}</td></tr>"
            for one in self.tiers
            for tag, now, most in one.tags
        ]
        heads = "".join(f"<th>{head}</th>" for head in ("tier", "tag", "now", "at the most"))
        budgets = [
            f"<li>{html.escape(one.tier)}: at most {format_size(one.peak)} of {format_size(one.budget)}</li>"
            for one in self.tiers
        ]
        said = [f"<li>{html.escape(reason)}</li>" for reason in self.reasons]
        return f"<ul>{''.join(budgets)}{''.join(said)}</ul><table><tr>{heads}</tr>{''.join(rows)}</table>"


def explanation(session: Session) -> Explanation:
    ledger = session.ledger
    tiers = tuple(
        TierLine(
            tier,
            ledger.budgets[tier],
            ledger.peak[tier],
            tuple(
                (tag, ledger.tags[tier][tag], most) for tag, most in ledger.tag_peaks[tier].items() if most
            ),
        )
        for tier in TIERS
        if ledger.budgets[tier]
    )
    return Explanation(tiers, tuple(_reasons(session)))


def _reasons(session: Session) -> Iterator[str]:
    count = len(session.layout.chunks)
    sizes = max((session.data.parameter_chunk(index).nbytes for index in range(count)), default=0)
    yield (
        f"The model lies in {count} chunks of up to {format_size(sizes)}, {100 * session.layout.utilisation:.1f} % used."
    )
    plan, cursor = session.cursor.plan, session.cursor
    if session.planning.roomy:
        yield "device.memory is 'auto' and there is no other tier: everything stays on the device, nothing moves."
    elif plan is None:
        yield "There is no plan yet: the first pass makes one."
    else:
        yield from _of_plan(session, plan)
    if cursor.diverged:
        yield f"The last pass that left its plan did so at {cursor.diverged}; such a pass goes on by demand."
    if session.imagining.note:
        yield f"Passes are not imagined: {session.imagining.note}."


def _of_plan(session: Session, plan: Plan) -> Iterator[str]:
    homes = {home: plan.homes.count(home) for home in TIERS if home in plan.homes}
    where = ", ".join(f"{number} on {TIER_NAMES[home]}" for home, number in homes.items())
    yield f"Optimizer state, by chunk: {where}."
    yield from _fullest(session, plan)
    if homes.get("ssd"):
        room = format_size(session.traces.settings.host or session.traces.settings.device)
        yield (
            f"To SSD goes the state of {homes['ssd']} chunks ({format_size(plan.host.ssd_bytes)}): beside all else "
            f"there was no room for it in {room} of RAM."
        )
    least = session.traces.least_traffic(plan.record)
    evicted = sum(kind in ("param", "whole") for kind, _ in plan.evicted)
    leaving = f"; {evicted} parameter chunks leave the device for others' sake" if evicted else ""
    moved = format_size(plan.traffic)
    yield f"A step moves {moved} by the plan; no plan could move less than {format_size(least)}{leaving}."
    yield f"The least device.memory for this batch is {format_size(plan.least)}."


def _fullest(session: Session, plan: Plan) -> Iterator[str]:
    """What stays on the device, and how much room the fullest moment leaves."""
    passing = [level + held for level, held in zip(plan.levels, plan.residency.occupied, strict=True)]
    if not passing:
        return
    place = max(range(len(passing)), key=passing.__getitem__)
    budget = session.traces.settings.device
    margin = budget - plan.static_bytes - passing[place]
    beside, chunks = format_size(plan.levels[place]), format_size(plan.residency.occupied[place])
    yield (
        f"The fullest moment is {place}, {moment_name(session, plan, place)}: {beside} of non-model data, {chunks} of "
        f"chunks and {format_size(plan.static_bytes)} of state that stays; {format_size(max(0, margin))} of "
        f"{format_size(budget)} are left."
    )


def moment_name(session: Session, plan: Plan, place: int) -> str:
    record, data = plan.record, session.data
    passes = len(record.moments) * plan.accumulate
    if place >= passes:
        return f"the update of chunk {place - passes}"
    event = record.moments[place % len(record.moments)].event
    phase, subject = event % 4, event // 4
    if PHASES[phase] == "forward":
        name = next((unit.name for unit in session.parts.units if unit.index == subject), "")
    else:
        name = (data.run_names if PHASES[phase] == "backward" else data.names)[subject]
    return f"{PHASES[phase]} of {name or 'the model'}"
