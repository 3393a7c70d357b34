"""A run's folder as it is written: `run.json`, a line of `metrics.jsonl` for each step, a few steps in full.

A file is replaced as a whole or gets whole lines, so a run that is killed leaves what it had. One writer at a time has
the folder. Its lock is on a file and not on the folder, which may hold checkpoints, too, and is locked by who saves one;
it ends with its process.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ebbtide.devices.device import when_gone
from ebbtide.errors import ConfigError
from ebbtide.report.plain_files import (
    EARLIER,
    FORMAT,
    METRICS,
    RUN,
    STEPS,
    finite,
    number_of,
    replace,
    step_files,
)

LOCK = ".recording.lock"


class RunWriter:
    """`begin` comes before the first line, and decides what stays of an earlier run. Until then that run is there as it
    was: another one that is refused before its first step leaves it alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = _locked(folder)
        self._release = when_gone(self, partial(_unlock, self._lock))
        self._metrics = -1
        self._begun = False
        self._facts: Mapping[str, Any] | None = None
        """What the run is, while an earlier one's steps are still here."""

    def begin(self, after: int) -> set[int]:
        """The run goes on after so many steps: what is here of later ones goes. Gives the steps that have a line."""
        if self._begun:
            return set()
        self._begun = True
        path = self.folder / METRICS
        kept, dropped = _kept_lines(path, after)
        if dropped:
            path.replace(self.folder / EARLIER)
        replace(path, "".join(f"{line}\n" for line in kept).encode())
        for file in step_files(self.folder):
            if number_of(file) > after:
                file.unlink()
        self._metrics = os.open(path, os.O_WRONLY | os.O_APPEND)
        if self._facts is not None:
            self.describe(self._facts)
        return {line["step"] for text in kept if "event" not in (line := json.loads(text))}

    def describe(self, facts: Mapping[str, Any]) -> None:
        """What the run is, and what it came to."""
        if not self._begun and _has_content(self.folder / METRICS):
            self._facts = facts
            return
        replace(self.folder / RUN, json.dumps({"format": FORMAT, **finite(facts)}, indent=1).encode())

    def line(self, facts: Mapping[str, Any]) -> None:
        """Of a step, or of something that happened after one. It is there as a whole, or cut by a full disk."""
        assert self._metrics >= 0, "begin() comes first"
        text = (json.dumps(finite(facts)) + "\n").encode()
        while text:
            text = text[os.write(self._metrics, text) :]

    def step(self, number: int, facts: Mapping[str, Any]) -> None:
        """A step in full."""
        (self.folder / STEPS).mkdir(exist_ok=True)
        content = json.dumps(finite({"format": FORMAT, **facts}), separators=(",", ":")).encode()
        replace(self.folder / STEPS / f"{number:06d}.json.gz", gzip.compress(content, 6, mtime=0))

    def close(self) -> None:
        """It can be called again."""
        number, self._metrics = self._metrics, -1
        try:
            if number >= 0:
                os.close(number)
        finally:
            self._release()


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _kept_lines(path: Path, after: int) -> tuple[list[str], int]:
    """Whole lines of steps up to `after`, and of what happened until then; and how many others there were."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    kept = []
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue  # it was cut when its writer was killed
        if isinstance(found, dict) and isinstance(found.get("step"), int) and 0 < found["step"] <= after:
            kept.append(line)
    return kept, len(lines) - len(kept)


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder for who records, as long as it is open."""
    number = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return number
    except BlockingIOError:
        os.close(number)
        raise ConfigError(
            f"record: another run writes to {str(folder)!r} now; wait for its end, or name another folder"
        ) from None
    except OSError as error:
        if number >= 0:
            os.close(number)
        raise ConfigError(
            f"record: {str(folder)!r} cannot be written to ({error.strerror}); name a folder that can"
        ) from None


def _unlock(number: int) -> None:
    fcntl.flock(number, fcntl.LOCK_UN)  # for children, too, that were forked off and share it
    os.close(number)
