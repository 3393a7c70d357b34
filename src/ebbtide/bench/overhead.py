"""What management costs where nothing needs it: everything resident, against plain PyTorch, step by step."""

from __future__ import annotations

import statistics
from typing import Any

from ebbtide.bench.progress import Report, silent
from ebbtide.bench.steps import Ours, PlainLoop, median_ratio, race, suited, tokens


def run(
    model: str = "gpt2-124m",
    batch: int = 2,
    seq: int = 256,
    repeats: int = 15,
    precision: str = "auto",
    report: Report = silent,
) -> dict[str, Any]:
    """`ratio` is ours over plain, the median over rounds in which both made a step after another of their own kind: else
    each would find the memory that they share as the other needs it."""
    data = tokens(model, batch, seq)
    precision = suited(precision)
    ours = Ours(model, data, {"clip": None, "precision": precision})
    plain = PlainLoop(model, data, ours.engine.device, precision)
    try:
        seconds = race({"ours": ours.step, "plain": plain.step}, repeats, after_itself=True, report=report)
        stats = ours.engine.stats()
    finally:
        ours.close()
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "repeats": repeats,
        "precision": precision,
        "ratio": median_ratio(seconds["ours"], seconds["plain"]),
        "ours_seconds": statistics.median(seconds["ours"]),
        "plain_seconds": statistics.median(seconds["plain"]),
        "moved_bytes": stats["moved_bytes"],
        "peak_bytes": stats["peak_bytes"],
    }
