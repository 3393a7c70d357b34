"""A step's events as plain rows: times in seconds from its beginning, names by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.memory.journal import MoveEvent, StepEvents, extent
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import PHASES

DIGITS = 7
"""Of a second: a tenth of a microsecond."""


def plain_step(events: StepEvents, plan: Plan | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """`facts`: of the step, as its line in the metrics has them."""

    def at(time: float) -> float:
        """What was under way when the step began is shown from there on."""
        return max(0.0, round(time - events.begin, DIGITS))

    def moved(move: MoveEvent) -> list[Any]:
        begin, end = extent(move) or (None, None)
        # It is counted once it has started, and may be over by then.
        issued = move.issued if begin is None else min(move.issued, begin)
        return [
            move.link,
            move.chunk,
            move.kind,
            move.nbytes,
            at(issued),
            None if begin is None else at(begin),
            None if end is None else at(end),
        ]

    return {
        **facts,
        "lost": events.lost,
        "moments": [
            [at(one.begin), PHASES[one.event % 4], one.event // 4, one.position] for one in events.moments
        ],
        "spans": [[one.cause, at(one.begin), at(one.end), one.depth, one.chunk] for one in events.spans],
        "moves": [moved(one) for one in events.moves],
        "updates": [[one.chunk, one.tier, at(one.begin), at(one.end), one.beside] for one in events.updates],
        "levels": [[at(one.begin), one.tier, dict(one.tags), one.non_model] for one in events.levels],
        "plan": None if plan is None else plain_plan(plan),
    }


def plain_plan(plan: Plan) -> dict[str, Any]:
    """What the plan expects of the step."""
    record = plan.record
    return {
        "source": record.source,
        "signature": record.signature,
        "homes": {home: plan.homes.count(home) for home in dict.fromkeys(plan.homes)},
        "traffic": plan.traffic,
        "highest": plan.highest,
        "least": plan.least,
        "fixed": record.fixed,
        "levels": list(plan.levels),
        "occupied": list(plan.residency.occupied),
        "static": plan.static_bytes,
        "moments": len(record.moments),
        "accumulate": plan.accumulate,
    }
