"""A training run that outlives its process: checkpoints as it goes, one when it is told to end, and a way back in."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from ebbtide.checkpoint.folders import RunFolder, find
from ebbtide.cli.doing import doing
from ebbtide.cli.loop import Step, Training
from ebbtide.cli.output import say
from ebbtide.cli.settings import CHECKPOINTS, CONFIG_KEYS
from ebbtide.cli.signals import ENDING
from ebbtide.config import Config
from ebbtide.errors import ConfigError

FLAGS = {key: flag for flag, key in CONFIG_KEYS.items()}
AUTO = "auto"
SAME = ("model", "data", "batch", "seq", "seed", "schedule", "steps")
"""Of the task: with another value a run does not go on as it would have."""
SETTINGS = (
    "precision",
    "accumulate",
    "clip",
    "clip_value",
    "updates",
    "max_staleness",
    "nonfinite",
    "loss",
    "compile",
    "threads",
    "optimizer.lr",
)
"""The same, of the config."""


class Checkpoints:
    def __init__(self, training: Training, out: Path) -> None:
        self._training, self._folder = training, out / CHECKPOINTS
        self._last = len(training.history)

    def resume(self, wanted: str) -> dict[str, Any] | None:
        """From the newest checkpoint of this run, where there is one, or from the one that is named. What the run had
        come to, where it was at its end."""
        folder = self._folder if wanted == AUTO else Path(wanted)
        if wanted == AUTO and not self._found_by_all(folder):
            return None
        state = self._training.engine.load(folder)
        try:
            task, self._training.seconds = state["task"], dict(state["seconds"])
            self._training.history = [Step(**row) for row in state["history"]]
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"--resume: {folder} was not saved by `ebbtide train`; load it with engine.load()"
            ) from error
        self._last = self._training.resumed = len(self._training.history)
        self._say(f"resumed after step {self._last}, from {find(folder)}")
        self._tell_what_differs(task, state)
        result: dict[str, Any] | None = state["result"]
        return result if result is not None and self._last >= self._training.task.steps else None

    def _found_by_all(self, folder: Path) -> bool:
        """Whether there is a checkpoint; all ranks must say the same, or some would begin anew beside the others."""
        there = self._training.world.all(RunFolder(folder).latest() is not None)
        if len(set(there)) > 1:
            raise ConfigError(
                f"--resume auto: rank {there.index(True)} finds a checkpoint in {folder}, and rank {there.index(False)} "
                "finds none: all ranks need the same folder, on storage that they share. Nothing was changed"
            )
        return any(there)

    def _tell_what_differs(self, task: dict[str, Any], state: dict[str, Any]) -> None:
        """Older checkpoints know neither settings nor text."""
        config, found = self._training.config, []
        for name, value in asdict(self._training.task).items():
            if name in SAME and task[name] != value:
                found.append(f"--{name} was {task[name]!r} when the checkpoint was saved")
        now, before = _settings(config), state.get("settings", {})
        for key, value in now.items():
            if key not in before or before[key] == value:
                continue
            name = FLAGS.get(key, key)
            if key in SETTINGS:
                found.append(
                    f"{name} was {before[key]!r} when the checkpoint was saved, and is {value!r} now"
                )
            else:
                found.append(f"{name} stays {before[key]!r}, as in the checkpoint; {value!r} is not used")
        if state.get("text") not in (None, self._training.text.digest):
            found.append("--data has other text than when the checkpoint was saved")
        for line in found:
            print(f"ebbtide: {line}", file=sys.stderr)

    def after(self, number: int) -> None:
        """A step is done."""
        task = self._training.task
        if number % task.save_every == 0 and number < task.steps:
            self.save()

    def save(self, result: dict[str, Any] | None = None) -> None:
        """`result`: what the whole run came to."""
        training = self._training
        done = len(training.history)
        if done == self._last and result is None:
            return
        state = {
            "task": asdict(training.task),
            "history": [asdict(step) for step in training.history],
            "seconds": training.seconds,
            "result": result,
            "settings": _settings(training.config),
            "text": training.text.digest,
        }
        with doing(f"saving step {done} to {self._folder}", silent=not training.world.first):
            saved = training.engine.save(self._folder, state, keep=training.task.keep)
        self._last = done
        if training.recording is not None:
            training.recording.mark("checkpoint", folder=str(saved))
        self._say(f"saved step {done} in {saved}")

    def _say(self, message: str) -> None:
        if self._training.world.first:
            say(message)

    @contextmanager
    def told_to_end(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end training after the step that is under way; a second Ctrl-C at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in ENDING}

        def end(number: int, frame: FrameType | None) -> None:
            handler = before[signal.Signals(number)]
            if self._training.ended and number == signal.SIGINT and callable(handler):
                handler(number, frame)
            self._training.end(signal.Signals(number).name)

        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _settings(config: Config) -> dict[str, Any]:
    """Those that numbers hang on. The optimizer's own, but for its learning rate, are the checkpoint's afterwards."""
    rule = {f"optimizer.{key}": value for key, value in config.optimizer.settings.items()}
    own = {key: getattr(config, key) for key in SETTINGS if "." not in key}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in (own | rule).items()}
