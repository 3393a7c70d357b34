"""A run in a sentence: how near its bound a step is, what bounds it, what it waits for, and what would lift it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.report.causes import ARITHMETIC, ASIDE, CAUSES
from ebbtide.report.figures import median_seconds, resource, steady
from ebbtide.report.run_files import RunFiles
from ebbtide.report.what_if import WORTH, WhatIf
from ebbtide.units import format_size

UNTIMED = ("wire",)
"""Lanes whose bars end where somebody first waited: how busy they were is not known."""
NOTABLE = 0.01
"""Share of a step that is worth a word."""


@dataclass(frozen=True)
class RunVerdict:
    sentence: str
    numbers: list[tuple[str, str, str]]
    """(name, value, meaning)."""
    lifts: list[tuple[str, float]]
    """What a change would do: (change, times as fast)."""

    def plain(self) -> dict[str, Any]:
        return {"sentence": self.sentence, "numbers": self.numbers, "lifts": self.lifts}


def run_verdict(
    run: RunFiles, recorded: Sequence[Mapping[str, Any]], asked: WhatIf | None = None
) -> RunVerdict:
    """`asked`: what the planner says that would change a step."""
    seconds = median_seconds(run.steps)
    one = _last(recorded)
    numbers = _numbers(run, seconds)
    if seconds is None:
        return RunVerdict(
            "No step was taken, or none left its numbers: there is nothing to judge.", numbers, []
        )
    if one is None:
        return RunVerdict(
            f"A step takes {_time(seconds)}. No step was recorded in full, so what bounds it is not known.",
            numbers,
            [],
        )
    lanes = {lane: busy for lane, busy in one["busy"].items() if lane not in UNTIMED}
    lane, busy = max(lanes.items(), key=lambda item: item[1])
    share = busy / one["own_seconds"]
    numbers.append(
        (
            "of the bound",
            f"{100 * share:.1f} %",
            f"seconds of the busiest resource, {resource(lane)}, in {one['label']}, as a share of the step: were all "
            "other work done beside it, a step of this plan would take so much",
        )
    )
    text = f"A step takes {_time(seconds)}, {100 * share:.0f} % of the bound, which is {resource(lane)}"
    text += _waiting(one)
    if asked is None:
        return RunVerdict(text + ".", numbers, [])
    return RunVerdict(text + _lifting(asked) + ".", numbers, asked.lifts)


def _lifting(asked: WhatIf) -> str:
    """A setting that costs more than it brings goes first; then what would make a step faster."""
    if asked.costly:
        setting, instead, factor = max(asked.costly, key=lambda row: row[2])
        return (
            f"; {setting} costs more than it brings: {instead} would make a step {factor:.2f} times as fast"
        )
    if asked.lifts and asked.lifts[0][1] >= WORTH:
        change, factor = asked.lifts[0]
        return f"; {change} would make a step {factor:.2f} times as fast"
    return "; neither more memory nor another setting would make it faster by 3 %" if asked.lifts else ""


def _last(recorded: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The latest step in full of the first rank."""
    first = [one for one in recorded if one["rank"] == 0] or list(recorded)
    return first[-1] if first else None


def _waiting(one: Mapping[str, Any]) -> str:
    """The largest cause beside the arithmetic."""
    left_out = (*ARITHMETIC, *ASIDE)
    causes = {cause: spent for cause, spent in one["causes"].items() if cause not in left_out}
    cause, spent = max(causes.items(), key=lambda item: item[1], default=("", 0.0))
    share = f"{_time(spent)}, {100 * spent / one['own_seconds']:.0f} %"
    if spent < NOTABLE * one["own_seconds"]:
        return "; it waits for nothing worth a word"
    if cause in CAUSES and CAUSES[cause].waits:
        return f"; it waits most for {CAUSES[cause].name.partition(': ')[2]} ({share})"
    name = CAUSES[cause].name if cause in CAUSES else cause
    return f"; the most beside that is {name} ({share})"


def _numbers(run: RunFiles, seconds: float | None) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    if seconds is not None:
        count = len(steady(run.steps))
        meaning = f"the median of {count} steps that were not traced, without evaluations and saving"
        found.append(("a step", _time(seconds), meaning))
        tokens = [line["tokens"] for line in steady(run.steps) if line.get("tokens")]
        if tokens:
            rate = f"{tokens[-1] * run.facts.get('ranks', 1) / seconds:,.0f}"
            found.append(("tokens a second", rate, "tokens of a step on all ranks, over its seconds"))
    if run.steps:
        last = run.steps[-1]
        found.append(("steps", f"{last['step']:,}", "updates of the weights that left a line"))
        if isinstance(last.get("loss"), int | float):
            found.append(("last loss", f"{last['loss']:.4f}", f"of step {last['step']}"))
        for tier, budget in last.get("budget", {}).items():
            peak = last.get("peak", {}).get(tier)
            if budget and peak:
                value = f"{format_size(peak)} of {format_size(budget)}"
                found.append((f"peak on {tier}", value, f"the most that {tier} held, and its budget"))
    return found


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"
