"""`engine.record`: what a run keeps of itself while it trains, and which of its steps it keeps in full."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ebbtide.engine.core import EngineCore
from ebbtide.engine.recorded_step import plain_step
from ebbtide.engine.run_facts import run_facts
from ebbtide.engine.stepping import StepResult
from ebbtide.errors import ConfigError, StateError, warn_user
from ebbtide.memory.journal import EVALUATION, LOOP, RECORDING, SAVING, StepEvents
from ebbtide.planner.activation_trips import OFF
from ebbtide.planner.plans import Plan
from ebbtide.report.plain_files import MOST_STEPS, rank_folder, step_files
from ebbtide.report.run_folder import RunWriter
from ebbtide.report.what_if import Problem

IN_FULL = (1, 4)
"""Steps of a plan after which the next one is recorded in full: as soon as it runs steadily, and once more."""
OWN = frozenset(
    (
        "step",
        "time",
        "seconds",
        "tokens",
        "causes",
        "charges",
        "bytes",
        "peak",
        "budget",
        "rss",
        "traced",
        "left_plan",
    )
) | {"event"}
"""Names in a step's line that only the engine writes."""
PAGE_BYTES = 4096
SYMBOLIC = "symbolic"


@dataclass(slots=True)
class _Full:
    """A step that was recorded, whose last moves may still be under way."""

    number: int
    events: StepEvents
    plan: Plan | None
    problem: Problem | None
    facts: dict[str, Any]


class Recording:
    """The writer of a run's folder. `engine.record` makes it, `engine.close` ends it."""

    def __init__(self, core: EngineCore, folder: str | Path) -> None:
        self._core, self._session = core, core.session
        self._journal, self._traffic = self._session.journal, self._session.store.traffic
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.folder = rank_folder(Path(folder), rank)
        self._facts = {"started": _now(), **run_facts(core)}
        self._said: set[str] = set()
        """Which of the facts the loop has said."""
        self._writer: RunWriter | None = RunWriter(self.folder)
        self._begun = False
        """Whether something was written, by which it is decided what stays of an earlier run."""
        self._number = core.steps
        """Of the last step, those that were skipped among them."""
        self._last: dict[str, Any] | None = None
        self._line: dict[str, Any] | None = None
        """Of the last step; it is written as soon as another one begins, or something is added to it."""
        self._losses: list[torch.Tensor] = []
        self._pieces = 1
        """Of how many losses the step's is the mean; what the loop has divided by itself it only adds up."""
        self._tokens = 0
        self._plans: list[tuple[weakref.ref[Plan] | None, int]] = []
        """Those that steps ran by, and how many did."""
        self._full: _Full | None = None
        self._again = False
        """The step that was to be kept in full had something beside it: the next one is."""
        self._kept = 0
        self._traces, self._diverged = self._session.traces.count, self._session.cursor.diverged
        self._pending = self._session.recording.last is not None
        """Whether a traced pass is to be learnt of by the next one."""
        self._journal.open()
        spent, moved = dict(self._journal.seconds), dict(self._traffic.moved)
        self._mark = _Mark(time.perf_counter(), spent, moved, self._journal.charged)
        self._process = os.getpid()
        self._at_exit = partial(_end_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        self._say()

    @property
    def last(self) -> Mapping[str, Any] | None:
        """What is known of the last step, as its line has it."""
        return self._last

    # -- what the loop says ---------------------------------------------------------------------------

    def add(self, **facts: Any) -> None:
        """Has something to say of the last step, until something happens after it."""
        _refuse(facts, OWN, "add")
        if self._line is not None:
            self._line |= facts
        elif self._writer is not None:
            when = (
                "no step has ended yet" if self._last is None else "the last step's line is written already"
            )
            warn_user(
                f"recording.add({', '.join(facts)}): {when}, so it is lost: add after engine.step(), and before "
                "recording.mark()"
            )

    def mark(self, event: str, /, **facts: Any) -> None:
        """Something happened after the last step: "evaluated", "checkpoint", or what you like."""
        self._begin()
        self._write_line()
        line = {**facts, "event": event, "step": max(1, self._number)}
        self._guarded(lambda writer: writer.line(line))

    def describe(self, **facts: Any) -> None:
        """Of the run as a whole: what it was asked for, what it came to."""
        _refuse(facts, {*self._facts} - {*self._said}, "describe")
        self._said |= facts.keys()
        self._facts |= facts
        self._say()

    def add_earlier(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Steps that the run took in another folder, before this one was its."""
        earlier = list(steps)
        if earlier:  # those that were skipped count in the loop's numbers, and in no checkpoint's
            self._number = max(self._number, earlier[-1]["step"])
        there = self._begin() if earlier else set()
        for step in earlier:
            if step["step"] not in there:
                self._guarded(partial(RunWriter.line, facts=step))

    # -- what the engine says -------------------------------------------------------------------------

    def saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training pass was given this."""
        self._tokens += tokens_in((*args, *kwargs.values()))

    def before_step(self) -> None:
        self._losses = list(self._core.losses) if self._core.losses_known else []
        self._pieces = self._core.config.accumulate * self._session.pieces

    def after_step(self, result: StepResult) -> None:
        """Whatever goes wrong in here ends the recording, and not the training."""
        if self._writer is not None and (result.updated or result.skipped):
            self._guarded(lambda _: self._take(result))

    def _take(self, result: StepResult) -> None:
        self._journal.turn_to(RECORDING)
        self._write_line()
        self._write_full()
        if not self._begun:
            self._number = self._core.steps - result.updated  # a checkpoint may have been loaded meanwhile
            self._begin()
        self._number += 1
        plan, before = self._session.cursor.plan, self._mark
        beside = any(
            self._journal.seconds.get(c, 0.0) > before.causes.get(c, 0.0) for c in (EVALUATION, SAVING)
        )
        if beside and self._journal.events is not None:
            self._again, self._kept = True, self._kept - 1
        now, events = self._cut(plan)
        losses = [float(loss) for loss in self._losses]
        seconds = {cause: now.causes[cause] - before.causes.get(cause, 0.0) for cause in now.causes}
        self._last = self._line = line = {
            "step": self._number,
            "time": round(time.time(), 3),
            "loss": sum(losses) / self._pieces if losses else None,
            "lr": self._core.optimizer.param_groups[0]["lr"],
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            "seconds": now.at - before.at,
            "tokens": self._tokens,
            "causes": {cause: spent for cause, spent in seconds.items() if spent},
            "charges": now.charged - before.charged,
            "bytes": {link: count - before.moved[link] for link, count in now.moved.items()},
            "peak": dict(self._session.ledger.peak),
            "budget": dict(self._session.ledger.budgets),
            "rss": _resident_bytes(),
        }
        self._losses, self._tokens = [], 0
        self._note_plan(line)
        if events is not None and not beside:
            events.end = now.at
            self._full = _Full(self._number, events, plan, self._problem(plan), dict(line))

    def _cut(self, plan: Plan | None) -> tuple[_Mark, StepEvents | None]:
        """Between this step and the next: the counts, and this one's events where they were kept."""
        journal, ledger = self._journal, self._session.ledger
        # The pass after an imagined plan's has another plan: that of what was traced.
        imagined = plan is not None and plan.record.source == SYMBOLIC
        due = self._steps_of(plan) in IN_FULL or self._again
        in_full, self._again = due and self._kept < MOST_STEPS and not imagined, False
        self._kept += in_full
        self._session.backend.time_copies(in_full)
        events = StepEvents(time.perf_counter()) if in_full else None
        journal.turn_to(LOOP)
        moved, before = self._traffic.cut(events)
        self._mark = mark = _Mark(time.perf_counter(), dict(journal.seconds), moved, journal.charged)
        if events is not None:
            events.begin = mark.at
            journal.note_levels(ledger.tags, ledger.level["device"])
        return mark, before

    def _note_plan(self, line: dict[str, Any]) -> None:
        """Whether this step was traced, or left its plan."""
        traces, cursor = self._session.traces.count, self._session.cursor
        pending = self._session.recording.last is not None  # of this step's pass; the next one learns of it
        traced = traces - self._traces - self._pending + pending
        if traced > 0:
            line["traced"] = traced
        self._pending = pending
        if cursor.diverged and cursor.diverged != self._diverged:
            line["left_plan"] = cursor.diverged
        self._traces, self._diverged = traces, cursor.diverged

    # -- steps in full --------------------------------------------------------------------------------

    def _problem(self, plan: Plan | None) -> Problem | None:
        """What the planner was asked."""
        if plan is None:
            return None
        config, traces = self._core.config, self._session.traces
        offload = traces.offload if plan.away is not None else OFF
        clip = config.clip is not None
        return Problem(traces.shape, traces.settings, plan.record, offload, config.resolved_master, clip)

    def _steps_of(self, plan: Plan | None) -> int:
        """How many steps ran by this plan, this one among them; without a plan all of them are of one."""
        self._plans = [one for one in self._plans if one[0] is None or one[0]() is not None]
        for place, (known, count) in enumerate(self._plans):
            if (known is None and plan is None) or (known is not None and known() is plan is not None):
                self._plans[place] = known, count + 1
                return count + 1
        self._plans.append((None if plan is None else weakref.ref(plan), 1))
        return 1

    def _write_full(self) -> None:
        full, self._full = self._full, None
        if full is not None:
            self._guarded(lambda writer: writer.step(full.number, _content(full)))

    # -- files ----------------------------------------------------------------------------------------

    def _write_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            found = {key: value for key, value in line.items() if value is not None}
            self._guarded(lambda writer: writer.line(found))

    def _say(self) -> None:
        self._guarded(lambda writer: writer.describe(self._facts))

    def _begin(self) -> set[int]:
        """Before the first line: what is kept of an earlier part of the run. Gives the steps that have a line."""
        if self._begun or self._writer is None:
            return set()
        self._begun = True
        there: set[int] = set()
        self._guarded(lambda writer: there.update(writer.begin(self._number)))
        self._kept = len(step_files(self.folder))
        if self._number:
            self.mark("resumed")
        return there

    def _guarded(self, write: Callable[[RunWriter], object]) -> None:
        """What cannot be written ends the recording, and not the training."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except Exception as error:
            self._give_up()
            if isinstance(error, OSError):
                why, do = str(error.strerror), "Free some space, and call engine.record() again"
            else:
                why, do = f"{type(error).__name__}: {error}", "Please report this"
            warn_user(
                f"record: {self.folder} cannot be written to any more ({why}); training goes on, and what it does from "
                f"here on is not recorded. {do}"
            )

    def _give_up(self) -> None:
        writer, self._writer = self._writer, None
        atexit.unregister(self._at_exit)
        if self._journal.events is not None:
            self._session.backend.time_copies(False)
        self._journal.close()
        if writer is not None:
            with suppress(OSError):
                writer.close()

    def close(self, whole: bool = True) -> None:
        """Writes what is left. It can be called again. `whole`: the run came to its end."""
        if self._writer is None:
            return
        self._write_full()
        self._write_line()
        if whole:
            self._facts |= {"ended": _now()}
            self._say()
        self._give_up()

    def end(self, whole: bool = True) -> None:
        """The engine is being closed, whatever becomes of what is left to be written."""
        try:
            self.close(whole)
        except Exception as error:
            self._writer = None
            warn_user(
                f"record: the last lines of {self.folder} were not written ({type(error).__name__}: {error})"
            )

    def __del__(self) -> None:
        """The engine is collected without having been closed."""
        if getattr(self, "_writer", None) is not None:
            self.leave()

    def leave(self, whole: bool = True) -> None:
        """As `end`, of its own accord. A child that was forked off has no part in it."""
        if os.getpid() == self._process:
            self.end(whole)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The counts at a step's end."""

    at: float
    causes: dict[str, float]
    moved: dict[str, int]
    charged: int


def _end_at_exit(recording: weakref.ref[Recording]) -> None:
    """Of a script that ends without closing its engine, or fails."""
    found = recording()
    if found is not None:
        found.leave(whole=getattr(sys, "last_value", None) is None)


def _content(full: _Full) -> dict[str, Any]:
    problem = None if full.problem is None else full.problem.plain()
    return {**plain_step(full.events, full.plan, full.facts), "problem": problem}


def _refuse(facts: Mapping[str, Any], taken: Collection[str], method: str) -> None:
    """Names under which ebbtide writes numbers of its own."""
    both = sorted(facts.keys() & {*taken})
    if both:
        raise ConfigError(f"recording.{method}: {both[0]!r} is a name of ebbtide's own there; choose another")


def record(core: EngineCore, folder: str | Path, before: Recording | None) -> Recording:
    """`before`: what this engine records now, which ends."""
    core.check()
    if core.session.micro:
        raise StateError(
            "engine.record() in the middle of a step: call it before the first pass, or after step()"
        )
    if before is not None:
        before.close()
    return Recording(core, folder)


def tokens_in(values: Iterable[Any]) -> int:
    """Elements of the first tensor of whole numbers with rows: the tokens of a batch. 0 where there is none."""
    for value in values:
        if isinstance(value, Mapping):
            found = tokens_in(value.values())
            if found:
                return found
        elif isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() > 1:
            return value.numel()
    return 0


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
