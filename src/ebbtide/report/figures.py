"""What the page shows, as plain data: lanes, tides, curves and tables, from a run's files alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ebbtide.planner.shape import GRAD, PARAM, WHOLE, WHOLE_GRAD
from ebbtide.report.causes import ARITHMETIC, ASIDE, CAUSES, LANES, RESOURCES, UNEXPLAINED, WORDS
from ebbtide.report.run_files import RunFiles

POINTS = 2000
"""Of a curve; a longer one is shown by the extremes of its stretches."""
BARS = 60_000
"""Of all lanes of a step that the page draws; the sums are of all."""
NAMES = ("tensors", "units", "runs", "chunks", "outside", "unit_chunks", "run_chunks")
CURVES = {
    "loss": "loss",
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "tokens_per_second": "tokens a second",
    "step_seconds": "seconds a step",
    "rss": "resident memory of the process",
}
MICRO = 1e6
KINDS = {
    PARAM: "parameters",
    WHOLE: "parameters, gathered",
    GRAD: "gradients",
    WHOLE_GRAD: "gradients, gathered",
    "master": "optimizer state",
    "momentum": "optimizer state",
    "variance": "optimizer state",
    "state": "optimizer state",
    "chunks": "parameters and gradients",
    "activations": "activations",
    "non-model": "activations and what else is not model data",
}
"""Categories of the tide, by tag; another tag is a buffer, under its own name."""


def figures(run: RunFiles) -> dict[str, Any]:
    recorded = [recorded_step(one, step) for one in run.everyone for step in one.recorded]
    return {
        "title": title(run),
        "facts": _facts(run),
        "problems": list(run.problems),
        "simulated": False,
        "recorded": recorded,
        "curves": curves(run.steps),
        "curve_names": CURVES,
        "links": link_curves(run.steps),
        "events": [_event(one) for one in [*run.events, *_traces(run.steps)]],
        "forecast": forecast_rows(run),
        "settings": run.facts.get("settings", []),
        "machine": run.facts.get("machine", {}),
        "result": run.facts.get("result", {}),
        "task": run.facts.get("task", {}),
        "model": _names(run),
        "causes": {key: [cause.name, cause.meaning, cause.waits] for key, cause in CAUSES.items()},
        "lanes": LANES,
        "words": WORDS,
        "kinds": KINDS,
    }


def forecast_rows(run: RunFiles) -> list[list[Any]]:
    """What was foretold before the run, and what came: (name, kind of number, forecast, measured)."""
    found = run.facts.get("forecast")
    if not isinstance(found, Mapping) or not found.get("fits"):
        return []
    last = run.steps[-1] if run.steps else {}
    rows: list[list[Any]] = [
        ["seconds a step", "seconds", found.get("step_seconds"), median_seconds(run.steps)],
        ["the least that any plan would take", "seconds", found.get("bound_seconds"), None],
    ]
    for link, count in found.get("moved_bytes", {}).items():
        measured = last.get("bytes", {}).get(link)
        if count or measured:
            rows.append([f"bytes a step, {LANES.get(link, link)}", "bytes", count, measured])
    for tier, count in found.get("peak_bytes", {}).items():
        if count:
            rows.append([f"most bytes on {tier}", "bytes", count, last.get("peak", {}).get(tier)])
    return rows


def title(run: RunFiles) -> str:
    model = run.facts.get("model", {})
    name = run.facts.get("task", {}).get("model") or model.get("class") or "a run"
    count = model.get("parameters")
    return f"{name}, {count / 1e6:,.4g} million parameters" if count else str(name)


def _facts(run: RunFiles) -> dict[str, Any]:
    keep = ("ebbtide", "commit", "started", "ended", "ranks", "budgets")
    return {"folder": str(run.folder), **{key: run.facts[key] for key in keep if key in run.facts}}


def _names(run: RunFiles) -> dict[str, Any]:
    """Names by number, which the recorded steps refer to."""
    model = run.facts.get("model", {})
    return {key: model.get(key, []) for key in NAMES}


# -- a recorded step ----------------------------------------------------------------------------------


def recorded_step(run: RunFiles, step: Mapping[str, Any]) -> dict[str, Any]:
    seconds = float(step["seconds"])
    segments = flat(step["spans"])
    lanes: dict[str, list[list[Any]]] = {
        "thread": segments,
        "updates": [],
        **{lane: [] for lane in step["bytes"]},
    }
    for chunk, tier, begin, end, beside in step["updates"]:
        lanes["updates"].append([begin, end, chunk, tier, 0, beside])
    for link, chunk, kind, nbytes, issued, begin, end in step["moves"]:
        begin, known = (issued, 0) if begin is None else (begin, 1)
        end = min(begin if end is None else end, seconds) if known else begin
        lanes.setdefault(link, []).append([begin, end, -1 if chunk is None else chunk, kind, nbytes, known])
    busy = {lane: busy_seconds(lane, rows) for lane, rows in lanes.items()}
    busy["thread"] = sum(step["causes"].get(cause, 0.0) for cause in ARITHMETIC)
    counts = {lane: len(rows) for lane, rows in lanes.items() if lane != "thread"}
    moments = [list(row) for row in step["moments"]]
    over = sum(map(len, lanes.values())) - BARS
    return {
        "label": f"step {step['step']}" + (f", rank {run.rank}" if run.others or run.rank else ""),
        "step": step["step"],
        "rank": run.rank,
        "seconds": seconds,
        "own_seconds": own_seconds(step),
        "causes": explained(step["causes"], seconds),
        "bytes": step["bytes"],
        "busy": busy,
        "counts": counts,
        "lanes": {lane: packed(_widest(rows, over)) for lane, rows in lanes.items() if rows},
        "moments": moments,
        "levels": packed_levels(step["levels"]),
        "budget": step.get("budget", {}),
        "peak": step.get("peak", {}),
        "plan": step.get("plan"),
        "lost": step.get("lost", 0),
    }


def packed(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Bars by column, times in microseconds: a page has tens of thousands."""
    kinds = list(dict.fromkeys(row[3] for row in rows))
    number = {kind: place for place, kind in enumerate(kinds)}
    found: dict[str, Any] = {
        "kinds": kinds,
        "begin": [round(MICRO * row[0]) for row in rows],
        "span": [_short(MICRO * (row[1] - row[0])) for row in rows],
        "chunk": [row[2] for row in rows],
        "kind": [number[row[3]] for row in rows],
    }
    if any(row[4] for row in rows):
        found["bytes"] = [row[4] for row in rows]
    if not all(row[5] for row in rows):
        found["known"] = [int(row[5]) for row in rows]
    return found


def packed_levels(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """By tier: the tags, and for each change its time and the bytes of each tag, with non-model data at the end."""
    found: dict[str, Any] = {}
    for tier in dict.fromkeys(row[1] for row in rows):
        mine = [row for row in rows if row[1] == tier]
        tags = list(dict.fromkeys(tag for row in mine for tag in row[2]))
        changes = [[round(MICRO * row[0]), *(row[2].get(tag, 0) for tag in tags), row[3]] for row in mine]
        found[tier] = {"tags": tags, "rows": changes}
    return found


def _short(micro: float) -> float:
    """To a tenth of a microsecond where it is short."""
    return round(micro, 1) if micro < 10 else round(micro)


def explained(causes: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The causes with what they leave of the step."""
    known = {cause: float(causes[cause]) for cause in CAUSES if causes.get(cause)}
    known |= {cause: float(spent) for cause, spent in causes.items() if cause not in CAUSES}
    return {**known, UNEXPLAINED: seconds - sum(known.values())}


def flat(spans: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """The thread's time as segments side by side: of nested pieces the innermost is what it was at."""
    found: list[list[Any]] = []
    stack: list[tuple[Any, float, int]] = []
    last = 0.0

    def until(now: float) -> None:
        nonlocal last
        if stack and now > last:
            cause, _, chunk = stack[-1]
            found.append([max(0.0, last), now, chunk, cause, 0, 1])
        last = max(last, now)

    for cause, begin, end, depth, chunk in sorted(spans, key=lambda row: (row[1], row[3])):
        while len(stack) > depth:
            until(stack[-1][1])
            stack.pop()
        until(begin)
        last = max(last, begin)
        stack.append((cause, end, chunk))
    while stack:
        until(stack[-1][1])
        stack.pop()
    return [row for row in found if row[1] > 0]


def busy_seconds(lane: str, rows: Sequence[Sequence[Any]]) -> float:
    """How long a lane was at work, whatever ran side by side in it; the thread's: at arithmetic."""
    total, last = 0.0, 0.0
    for begin, end, _, kind, *_ in sorted(rows, key=lambda row: row[0]):
        if lane == "thread" and kind not in ARITHMETIC:
            continue
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def _widest(rows: list[list[Any]], over: int) -> list[list[Any]]:
    """Where there are too many to draw, the longest of them."""
    if over <= 0:
        return rows
    kept = sorted(rows, key=lambda row: row[0] - row[1])[: max(1000, len(rows) - over)]
    return sorted(kept, key=lambda row: row[0])


# -- curves -------------------------------------------------------------------------------------------


def own_seconds(line: Mapping[str, Any]) -> float:
    """Of a step, without what came between it and the one before."""
    aside = sum(line.get("causes", {}).get(cause, 0.0) for cause in ASIDE)
    return max(1e-9, float(line.get("seconds", 0.0)) - aside)


def curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """By curve: its points, (step, value)."""
    found: dict[str, list[list[float]]] = {}
    for name in CURVES:
        points = []
        for line in steps:
            value = _value(name, line)
            if isinstance(value, int | float):
                points.append([line["step"], value])
        if points:
            found[name] = thinned(points)
    return found


def _value(name: str, line: Mapping[str, Any]) -> Any:
    if name == "tokens_per_second":
        return line["tokens"] / own_seconds(line) if line.get("tokens") and "seconds" in line else None
    if name == "step_seconds":
        return own_seconds(line) if "seconds" in line else None
    return line.get(name)


def link_curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """By link: the bytes that each step moved over it."""
    links = dict.fromkeys(link for line in steps for link, count in line.get("bytes", {}).items() if count)
    return {
        link: thinned([[line["step"], line["bytes"].get(link, 0)] for line in steps if "bytes" in line])
        for link in links
    }


def thinned(points: list[list[float]]) -> list[list[float]]:
    """Of each stretch the lowest and the highest, in their order."""
    if len(points) <= POINTS:
        return points
    width = -(-2 * len(points) // POINTS)
    found = []
    for first in range(0, len(points), width):
        stretch = points[first : first + width]
        ends = {id(one): one for one in (min(stretch, key=_height), max(stretch, key=_height))}
        found += sorted(ends.values(), key=lambda point: point[0])
    return found


def _height(point: Sequence[float]) -> float:
    return point[1]


def _event(line: Mapping[str, Any]) -> dict[str, Any]:
    facts = {key: value for key, value in line.items() if key not in ("event", "step")}
    return {"event": str(line["event"]), "step": line["step"], "facts": facts}


def _traces(steps: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps that were traced, or left their plan: they are events, too."""
    found: list[dict[str, Any]] = []
    for line in steps:
        if line.get("traced"):
            found.append({"event": "traced", "step": line["step"]})
        if line.get("left_plan"):
            found.append({"event": "left its plan", "step": line["step"], "why": line["left_plan"]})
    return found


# -- sums ---------------------------------------------------------------------------------------------


def steady(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Steps that were neither the first nor traced; all where there is no other."""
    found = [
        line for line in steps if line.get("step", 0) > 1 and not line.get("traced") and "seconds" in line
    ]
    return found or [line for line in steps if "seconds" in line]


def median_seconds(steps: Sequence[Mapping[str, Any]]) -> float | None:
    taken = [own_seconds(line) for line in steady(steps)]
    return median(taken) if taken else None


def resource(lane: str) -> str:
    return RESOURCES.get(lane, LANES.get(lane, lane))
