"""The steps of a run as a person sees them pass: in a panel where they look at a terminal, else in lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebbtide.cli.doing import doing
from ebbtide.cli.output import clock, console, is_watched
from ebbtide.cli.panel import with_panel
from ebbtide.units import format_size

if TYPE_CHECKING:
    from ebbtide.cli.loop import Step, Training

EVERY, RARELY = 5.0, 60.0
"""Seconds between lines in place of a progress bar where standard error is no terminal, and where JSON is asked for."""


def with_progress(training: Training, json: bool) -> Iterator[Step]:
    """The steps, with a panel where a person is looking, else a line every few seconds."""
    if json or not is_watched():
        yield from _with_lines(training, RARELY if json else EVERY)
        return
    yield from with_panel(training)


def _with_lines(training: Training, every: float) -> Iterator[Step]:
    """The first step, which is traced, and the last have a line each; all others have one when it is time."""
    total, begin, first = training.task.steps, time.monotonic(), len(training.history) + 1
    said = begin
    for step in _first_said(training.steps(), silent=every != EVERY):
        now = time.monotonic()
        if (step.number in (first, total) and every == EVERY) or now - said >= every:
            left = (now - begin) / (step.number + 1 - first) * (total - step.number)
            console().print(
                f"step {step.number}/{total}  {_facts(training, step)}  {clock(left)} left",
                highlight=False,
                soft_wrap=True,
            )
            said = now
        yield step


def _first_said(steps: Iterator[Step], silent: bool) -> Iterator[Step]:
    """The first one takes longer than the others, and says so."""
    with doing("the first step: the pass is imagined, planned and traced", silent):
        first = next(steps, None)
    if first is not None:
        yield first
        yield from steps


def _facts(training: Training, step: Step) -> str:
    peaks = training.engine.stats()["peak_bytes"]
    tiers = "  ".join(f"{tier} {format_size(count)}" for tier, count in peaks.items() if count)
    return f"loss {step.loss:.4f}  {training.tokens_per_second:,.0f} tokens/s  {tiers}"
