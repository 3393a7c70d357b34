"""A run's folder as it is written: `run.json`, a line of `metrics.jsonl` for each step, a few steps in full.

A file is replaced as a whole or gets whole lines, so a run that is killed leaves what it had. One writer at a time has
the folder; the lock ends with its process.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ebbtide.errors import ConfigError

FORMAT = 1
RUN, METRICS, STEPS, PAGE = "run.json", "metrics.jsonl", "steps", "report.html"
STEP_FILE = re.compile(r"(\d{6,})\.json\.gz")
MOST_STEPS = 16
"""Steps that are kept in full."""


def rank_folder(folder: Path, rank: int) -> Path:
    """The first rank's is the run's; another has a folder of its own in it."""
    return folder if rank == 0 else folder / f"rank-{rank}"


class RunWriter:
    def __init__(self, folder: Path, after: int) -> None:
        """`after`: the steps that the run has behind it. What an earlier run left here of later ones goes."""
        self.folder = folder
        self._lock = _locked(folder)
        try:
            self._kept = _kept_lines(folder / METRICS, after)
            replace(folder / METRICS, "".join(f"{line}\n" for line in self._kept).encode())
            for path in step_files(folder):
                if number_of(path) > after:
                    path.unlink()
            self._metrics: IO[str] = (folder / METRICS).open("a", encoding="utf-8")
        except BaseException:
            _unlock(self._lock)
            raise

    @property
    def steps_before(self) -> set[int]:
        """Those that have a line from an earlier part of the run."""
        return {line["step"] for text in self._kept if "event" not in (line := json.loads(text))}

    def describe(self, facts: Mapping[str, Any]) -> None:
        """What the run is, and what it came to."""
        replace(self.folder / RUN, json.dumps(finite({"format": FORMAT, **facts}), indent=1).encode())

    def line(self, facts: Mapping[str, Any]) -> None:
        """Of a step, or of something that happened after one."""
        self._metrics.write(json.dumps(finite(facts)) + "\n")
        self._metrics.flush()

    def step(self, number: int, facts: Mapping[str, Any]) -> None:
        """A step in full."""
        (self.folder / STEPS).mkdir(exist_ok=True)
        content = json.dumps(finite({"format": FORMAT, **facts}), separators=(",", ":")).encode()
        replace(self.folder / STEPS / f"{number:06d}.json.gz", gzip.compress(content, 6, mtime=0))

    def close(self) -> None:
        self._metrics.close()
        _unlock(self._lock)


def step_files(folder: Path) -> list[Path]:
    """Those of steps that were recorded in full, first to last."""
    try:
        found = [path for path in (folder / STEPS).iterdir() if STEP_FILE.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    return int(path.name.partition(".")[0])


def replace(path: Path, content: bytes) -> None:
    """Writes a file as a whole: a reader has the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _kept_lines(path: Path, after: int) -> list[str]:
    """Whole lines of steps up to `after`, and of what happened until then."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    kept = []
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # it was cut when its writer was killed
        if isinstance(found, dict) and isinstance(found.get("step"), int) and 0 < found["step"] <= after:
            kept.append(line)
    return kept


def _locked(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"record: {str(folder)!r} cannot be written to ({error.strerror}); name a folder that can"
        ) from None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise ConfigError(
            f"record: another run writes to {str(folder)!r} now; wait for its end, or name another folder"
        ) from None
    return number


def _unlock(number: int) -> None:
    fcntl.flock(number, fcntl.LOCK_UN)  # for children, too, that were forked off and share it
    os.close(number)
