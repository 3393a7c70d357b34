"""A run's folder as it is read: whatever is there, and in words what is missing or damaged."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.errors import ConfigError
from ebbtide.report.plain_files import FORMAT, METRICS, RUN, is_number, number_of, step_files

RANK = re.compile(r"rank-(\d+)")
TABLES = ("causes", "bytes", "peak", "budget")
"""Of a line: numbers by name."""
NUMBERS = ("loss", "lr", "grad_norm", "seconds", "tokens", "rss", "traced")
SECTIONS = ("machine", "model", "task", "result", "forecast", "budgets")
"""Of `run.json`."""
NEEDED = ("causes", "bytes", "seconds", "moments", "spans", "moves", "updates", "levels")
"""Of a step that was recorded in full."""


@dataclass(frozen=True)
class RunFiles:
    """What one rank has kept."""

    folder: Path
    rank: int
    facts: dict[str, Any]
    """Of `run.json`; empty where that is missing."""
    steps: list[dict[str, Any]]
    """A line of the metrics each, in the order of steps."""
    events: list[dict[str, Any]]
    recorded: list[dict[str, Any]]
    """Steps in full."""
    others: list[RunFiles] = field(default_factory=list)
    """The other ranks'."""
    problems: list[str] = field(default_factory=list)

    @property
    def everyone(self) -> Iterator[RunFiles]:
        yield self
        yield from self.others


def read_run(folder: Path) -> RunFiles:
    """Raises where there is nothing to show."""
    if not folder.is_dir():
        raise ConfigError(
            f"report: expected the folder of a run (--out of `ebbtide train`), found no {str(folder)!r}"
        )
    found = _read(folder, 0)
    ranks = found.facts.get("ranks", 0)
    count = ranks if isinstance(ranks, int) else 0
    others = [_read(folder / name, rank) for name, rank in _ranks(folder) if not count or rank < count]
    if not found.facts and not found.steps and not found.recorded:
        raise ConfigError(
            f"report: {str(folder)!r} has no {RUN}, no {METRICS} and no recorded steps: expected the folder of a run, "
            "as `ebbtide train --out FOLDER` or `engine.record(FOLDER)` keeps it"
        )
    found.others.extend(one for one in others if one.steps or one.recorded)
    for one in others:
        found.problems.extend(f"rank {one.rank}: {problem}" for problem in one.problems)
    return found


def _ranks(folder: Path) -> list[tuple[str, int]]:
    found = [(path.name, int(match[1])) for path in folder.iterdir() if (match := RANK.fullmatch(path.name))]
    return sorted(found, key=lambda one: one[1])


def _read(folder: Path, rank: int) -> RunFiles:
    problems: list[str] = []
    facts = _facts(folder / RUN, problems)
    lines = _lines(folder / METRICS, problems)
    steps = {line["step"]: line for line in lines if "event" not in line}
    recorded = [step for path in step_files(folder) if (step := _step(path, problems)) is not None]
    if facts and "ended" not in facts:
        problems.append("the run has not ended, or was killed: what it had is shown")
    if not recorded:
        problems.append(
            "no step was recorded in full (a run needs three steps for that): there is no tide to show"
        )
    return RunFiles(
        folder,
        rank,
        facts,
        [steps[number] for number in sorted(steps)],
        [line for line in lines if "event" in line],
        recorded,
        problems=problems,
    )


def _facts(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: settings and machine are not known")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read ({_why(error)}): settings and machine are not known")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is no table: settings and machine are not known")
        return {}
    for name in SECTIONS:
        if name in found and not isinstance(found[name], dict):
            found[name] = {"": found[name]}
    if found.get("format") != FORMAT:
        problems.append(
            f"{path.name} has format {found.get('format')}, this ebbtide reads {FORMAT}: some may be missing"
        )
    return found


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: there are no curves")
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({_why(error)}): there are no curves")
        return []
    found, bad = [], 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row if "event" in row else _line(row))
        else:
            bad += 1
    if bad:
        problems.append(f"{path.name}: {bad} of {bad + len(found)} lines cannot be read and are left out")
    return found


def _line(row: dict[str, Any]) -> dict[str, Any]:
    """Without what is no number where one belongs: the loop may have said anything."""
    kept = {key: value for key, value in row.items() if key not in (*TABLES, *NUMBERS)}
    kept |= {key: row[key] for key in NUMBERS if is_number(row.get(key))}
    for key in TABLES:
        table = row.get(key)
        if isinstance(table, dict):
            kept[key] = {name: value for name, value in table.items() if is_number(value)}
    return kept


def _step(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        problems.append(f"{path.name} cannot be read ({_why(error)}): step {number_of(path)} is not shown")
        return None
    missing = [name for name in NEEDED if not isinstance(found, dict) or name not in found]
    if missing:
        problems.append(f"{path.name} has no {', '.join(missing)}: step {number_of(path)} is not shown")
        return None
    found["step"] = number_of(path)
    if found.get("lost"):
        problems.append(
            f"{path.name}: {found['lost']} events were too many to be kept; its lanes and its tide have holes"
        )
    return dict(found)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
