"""One live panel while `train` runs: loss, tokens a second, time left, the tide of each tier, what waits for what.

80 columns are enough. It is shown where a person looks at a terminal; else there are plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbtide.cli.output import clock, console, panels
from ebbtide.report.causes import ASIDE, CAUSES
from ebbtide.units import format_size

if TYPE_CHECKING:
    from ebbtide.cli.loop import Step, Training

WIDTH, BAR = 78, 30
LEVELS = " ▏▎▍▌▋▊▉"
OFTEN = 4
"""Redrawings a second."""


def with_panel(training: Training) -> Iterator[Step]:
    """The steps, with the panel above the command line."""
    begun, first = time.monotonic(), len(training.history)
    view = PanelView(training.task.steps)
    with _shown(view) as live:
        for step in training.steps():
            done = step.number - first
            left = (time.monotonic() - begun) / done * (training.task.steps - step.number)
            view.take(step, training.tokens_per_second, left, training.engine.stats(), waited(training))
            live.update(view.render())
            yield step


@contextmanager
def _shown(view: PanelView) -> Iterator[Live]:
    with Live(view.render(), console=console(), refresh_per_second=OFTEN, transient=False) as live:
        panels.append(view)
        try:
            yield live
        finally:
            panels.remove(view)


def waited(training: Training) -> Mapping[str, float]:
    """Seconds by cause of the last step, where the run records them; else those of waits so far."""
    line = None if training.recording is None else training.recording.last
    if line is not None:
        return {cause: spent for cause, spent in line["causes"].items() if cause not in ASIDE}
    stalls: Mapping[str, float] = training.engine.stats()["stall_seconds"]
    return {link: spent for link, spent in stalls.items() if spent > 0}


class PanelView:
    """What the panel shows, from plain numbers."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step: Step | None = None
        self._rate = self._left = 0.0
        self._stats: Mapping[str, Any] = {}
        self._causes: Mapping[str, float] = {}

    def take(
        self, step: Step, rate: float, left: float, stats: Mapping[str, Any], causes: Mapping[str, float]
    ) -> None:
        self._step, self._rate, self._left, self._stats, self._causes = step, rate, left, stats, causes

    def render(self) -> RenderableType:
        if self._step is None:
            return Text(
                "first step: the pass is imagined, planned and traced", overflow="ellipsis", no_wrap=True
            )
        return Group(self._headline(), *self._tides(), self._waits())

    def _headline(self) -> Text:
        step = self._step
        assert step is not None
        done = f"step {step.number:,}/{self._steps:,}"
        facts = f"loss {step.loss:.4f}  {self._rate:,.0f} tokens/s  {clock(self._left)} left"
        return Text(
            f"{done}  {bar(step.number / self._steps, 12)}  {facts}", overflow="ellipsis", no_wrap=True
        )

    def _tides(self) -> Iterator[Table]:
        now, budgets = self._stats["held_bytes"], self._stats["budget_bytes"]
        for tier, budget in budgets.items():
            if not budget:
                continue
            held, peak = now[tier], self._stats["peak_bytes"][tier]
            table = Table.grid(padding=(0, 1))
            share = f"{format_size(held)} of {format_size(budget)}, at most {format_size(peak)}"
            table.add_row(Text(f"{tier:>6}"), Text(bar(peak / budget, BAR)), Text(share))
            yield table

    def _waits(self) -> Text:
        total = sum(self._causes.values())
        waits = {
            cause: spent for cause, spent in self._causes.items() if cause in CAUSES and CAUSES[cause].waits
        }
        some = sorted(waits.items(), key=lambda one: -one[1])[:2]
        if not total or not some:
            return Text("waits for nothing")
        said = ", ".join(
            f"{CAUSES[cause].name.partition(': ')[2]} {_share(spent, total)}" for cause, spent in some
        )
        return Text(f"waits for {said}", overflow="ellipsis", no_wrap=True)


def _share(spent: float, total: float) -> str:
    return f"{100 * spent / total:.1f} %"


def bar(share: float, width: int) -> str:
    """`share` of so many cells, to an eighth."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (LEVELS[part] if part else "")).ljust(width, "·")
