"""The files of a run's folder: what they are called, and how one is written as a whole. It knows no torch and no run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 1
RUN, METRICS, STEPS, PAGE = "run.json", "metrics.jsonl", "steps", "report.html"
EARLIER = "metrics.earlier.jsonl"
"""The lines of a run that another one has taken the place of."""
STEP_FILE = re.compile(r"(\d{6,})\.json\.gz")
MOST_STEPS = 16
"""Steps that are kept in full."""


def rank_folder(folder: Path, rank: int) -> Path:
    """The first rank's is the run's; another has a folder of its own in it."""
    return folder if rank == 0 else folder / f"rank-{rank}"


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


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> Any:
    """As JSON takes it, whatever it is. NaN becomes null; of what JSON does not know, a number or its text is kept."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    try:
        return finite(value.item())  # of a tensor or an array with one element
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return str(value)
