"""What `engine.record` costs: the charges of a step times what one takes, the step's line, and steps in pairs.

A step's share is counted, not the difference of two noisy times: charges times the seconds of one, and what the line
takes, over the step's seconds. Pairs of steps with and without recording are there to be looked at.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ebbtide.bench.progress import BenchProgress, Report, silent
from ebbtide.bench.steps import Ours, median_ratio, suited, tokens
from ebbtide.memory.journal import EBBTIDE, Journal
from ebbtide.report.run_files import RunFiles, read_run

CHARGES = 200_000
WARM_UP = 3
IN_A_ROW = 8
"""Steps of a recorded run: two of them in full."""


def run(
    model: str = "gpt2-124m",
    batch: int = 2,
    seq: int = 256,
    repeats: int = 7,
    precision: str = "auto",
    report: Report = silent,
) -> dict[str, Any]:
    """`share`: of a step, what recording takes where the step is not kept in full; `full_share`: where it is."""
    precision = suited(precision)
    settings = {"clip": None, "precision": precision, "device": {"memory": "half"}}
    each = seconds_of_a_charge()
    ours = Ours(model, tokens(model, batch, seq), settings)
    try:
        with tempfile.TemporaryDirectory() as folder:
            seconds = _pairs(ours, Path(folder) / "pairs", repeats, report)
            files = _recorded(ours, Path(folder) / "run")
            size = sum(path.stat().st_size for path in (Path(folder) / "run").rglob("*") if path.is_file())
    finally:
        ours.close()
    lines = [line for line in files.steps if not line.get("traced")]
    step = statistics.median(seconds["plain"])
    charges = statistics.median(line["charges"] for line in lines)
    line = _line_seconds(lines)
    in_full = max(line["causes"].get("recording", 0.0) for line in lines)
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "precision": precision,
        "repeats": repeats,
        "seconds_of_a_charge": each,
        "charges": charges,
        "line_seconds": line,
        "full_seconds": in_full,
        "step_seconds": step,
        "share": (charges * each + line) / step,
        "full_share": (charges * each + in_full) / step,
        "pairs_ratio": median_ratio(seconds["recorded"], seconds["plain"]),
        "recorded_seconds": seconds["recorded"],
        "plain_seconds": seconds["plain"],
        "unexplained_share": max(abs(1 - sum(line["causes"].values()) / line["seconds"]) for line in lines),
        "bytes_on_disk": size,
    }


def seconds_of_a_charge(count: int = CHARGES) -> float:
    """One of many, without events: the cheaper half of the rounds, for others use the processor, too."""
    rounds = []
    for _ in range(5):
        journal = Journal()
        journal.open()
        start = time.perf_counter()
        for _ in range(count // 10):
            journal.enter(EBBTIDE)
            journal.leave()
        rounds.append((time.perf_counter() - start) / journal.charged)
    return statistics.median(rounds)


def _line_seconds(lines: list[dict[str, Any]]) -> float:
    """What writing the line of the step before took; steps in full are apart."""
    return statistics.median(line["causes"].get("recording", 0.0) for line in lines)


def _pairs(ours: Ours, folder: Path, repeats: int, report: Report) -> dict[str, list[float]]:
    """Steps with and without, in turn; each after one of its own kind."""
    seconds: dict[str, list[float]] = {"recorded": [], "plain": []}
    progress = BenchProgress(repeats + WARM_UP, report)
    for number in range(repeats + WARM_UP):
        for name, taken in seconds.items():
            recording = ours.engine.record(folder) if name == "recorded" else None
            ours.step()
            start = time.perf_counter()
            ours.step()
            spent = time.perf_counter() - start
            if recording is not None:
                recording.close()
            if number >= WARM_UP:
                taken.append(spent)
        progress.done()
    return seconds


def _recorded(ours: Ours, folder: Path) -> RunFiles:
    recording = ours.engine.record(folder)
    for _ in range(IN_A_ROW):
        ours.step()
    recording.close()
    return read_run(folder)
