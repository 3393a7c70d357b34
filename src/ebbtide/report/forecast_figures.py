"""A forecast as the page shows a run: one simulated step, with its lanes and its tide. Nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.forecasting.simulation.outlook import Outlook
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import PHASES
from ebbtide.report.causes import CAUSES, LANES, UNEXPLAINED, WORDS
from ebbtide.report.figures import KINDS, NAMES, busy_seconds, packed, packed_levels
from ebbtide.units import format_size

THREAD, UPDATES, COMPUTING, WAITING = "thread", "updates", "computing", "waiting"
SHOWN_AS = {"compute": THREAD, "host": UPDATES}
"""Lanes of a simulation, as the page calls them."""
CAUSE_OF = {"compute": COMPUTING, "device update": UPDATES, "update": "update_wait", "host": "update_wait"}
"""Causes of a simulation, as the page calls them."""


def forecast_figures(answer: Mapping[str, Any], found: Outlook) -> dict[str, Any]:
    """`answer`: the forecast as `ebbtide plan --json` gives it."""
    recorded = [] if found.plan is None or not found.step_seconds else [_step(found, found.plan)]
    facts = {
        key: answer[key] for key in ("model", "machine", "gpus", "strategy", "batch", "seq") if key in answer
    }
    problems = ["this page shows a forecast: planned and simulated, nothing was run", *answer["notes"]]
    return {
        "title": f"{answer['model']} on {answer['machine']}, {answer['gpus']} devices: a forecast",
        "facts": facts,
        "problems": problems,
        "simulated": True,
        "forecast": [],
        "recorded": recorded,
        "curves": {},
        "curve_names": {},
        "links": {},
        "events": [],
        "settings": [],
        "machine": {},
        "result": _result(answer),
        "task": {},
        "model": {name: [] for name in NAMES},
        "causes": {key: [cause.name, cause.meaning, cause.waits] for key, cause in CAUSES.items()},
        "lanes": LANES,
        "words": WORDS,
        "kinds": KINDS,
        "verdict": {
            "sentence": answer["verdict"],
            "numbers": _numbers(answer),
            "lifts": [[lift["change"], lift["faster"]] for lift in answer["lifts"]],
        },
    }


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    keys = (
        "fits",
        "params",
        "chunk_size",
        "utilisation",
        "margin_chunks",
        "moved_bytes",
        "must_seconds",
        "busy_seconds",
    )
    return {key: answer[key] for key in keys}


def _numbers(answer: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    found = [("parameters", f"{answer['params'] / 1e9:,.3g} B", "of the whole model")]
    if answer["step_seconds"]:
        found += [
            ("a step", f"{answer['step_seconds']:.3g} s", "simulated, steady"),
            (
                "bound",
                f"{answer['bound_seconds']:.3g} s",
                "the least that any plan would take on this machine",
            ),
            ("of the bound", f"{100 * answer['achieved_over_bound']:.1f} %", "the bound over the step"),
            ("tokens a second", f"{answer['tokens_per_second']:,.0f}", "of all devices"),
            ("TFLOPS a device", f"{answer['tflops_per_device']:.3g}", "of the model's operations"),
        ]
    for tier, count in answer["peak_bytes"].items():
        if count:
            found.append(
                (f"on {tier}", format_size(count), f"of a device's share of the {tier}, at the most")
            )
    return found


def _step(found: Outlook, plan: Plan) -> dict[str, Any]:
    seconds = float(found.step_seconds or 0.0)
    lanes: dict[str, list[list[Any]]] = {}
    for lane, strip in found.timeline.items():
        shown = SHOWN_AS.get(lane, lane)
        lanes[shown] = [[begin, end, -1, CAUSE_OF.get(cause, cause), 0, 1] for begin, end, cause in strip]
    thread = lanes.get(THREAD, [])
    lanes[THREAD] = sorted([*thread, *_gaps(thread, seconds)], key=lambda row: row[0])
    starts = sorted(found.starts.items(), key=lambda one: one[1])
    return {
        "label": "simulated",
        "step": 0,
        "rank": 0,
        "seconds": seconds,
        "own_seconds": seconds,
        "causes": _causes(found, seconds),
        "bytes": dict(found.moved_bytes),
        "busy": {lane: _busy(found, lane, rows) for lane, rows in lanes.items()},
        "counts": {},
        "lanes": {lane: packed(rows) for lane, rows in lanes.items() if rows},
        "moments": [[begin, *_event(plan, place), place] for place, begin in starts],
        "levels": packed_levels([*_device_levels(plan, starts), *_others(found)]),
        "budget": {},
        "peak": {tier: sum(tags.values()) for tier, tags in found.bytes.items()},
        "plan": None,
        "lost": 0,
    }


def _busy(found: Outlook, lane: str, rows: list[list[Any]]) -> float:
    """Of a link, what its tasks take: those that follow each other closely are drawn as one."""
    known = found.busy_seconds.get("update" if lane == UPDATES else lane)
    return busy_seconds(lane, rows) if known is None else known


def _gaps(thread: list[list[Any]], seconds: float) -> list[list[Any]]:
    """Between what is computed the device waits."""
    found, last = [], 0.0
    for begin, end, *_ in sorted(thread, key=lambda row: row[0]):
        if begin > last:
            found.append([last, begin, -1, WAITING, 0, 1])
        last = max(last, end)
    if seconds > last:
        found.append([last, seconds, -1, WAITING, 0, 1])
    return found


def _causes(found: Outlook, seconds: float) -> dict[str, float]:
    causes: dict[str, float] = {}
    for cause in ("compute", "device update"):
        if found.busy_seconds.get(cause):
            causes[CAUSE_OF[cause]] = found.busy_seconds[cause]
    for stall in found.stalls:
        name = (
            WAITING if stall.cause in ("compute", "device update") else CAUSE_OF.get(stall.cause, stall.cause)
        )
        causes[name] = causes.get(name, 0.0) + stall.seconds
    return {**causes, UNEXPLAINED: seconds - sum(causes.values())}


def _event(plan: Plan, place: int) -> tuple[str, int]:
    """What a moment begins with; the moments of updates come after those of the passes."""
    passes = len(plan.record.moments) * plan.accumulate
    if place >= passes:
        return "update", place - passes
    event = plan.record.moments[place % len(plan.record.moments)].event
    return PHASES[event % 4], event // 4


def _device_levels(plan: Plan, starts: list[tuple[int, float]]) -> list[list[Any]]:
    occupied = plan.residency.occupied
    return [
        [begin, "device", {"state": plan.static_bytes, "chunks": occupied[place]}, plan.levels[place]]
        for place, begin in starts
        if place < len(occupied)
    ]


def _others(found: Outlook) -> list[list[Any]]:
    others = [(tier, tags) for tier, tags in found.bytes.items() if tier != "device"]
    return [[0.0, tier, dict(tags), 0] for tier, tags in others if any(tags.values())]
