"""Compiled blocks: the engine's step against plain PyTorch's with the same ones, resident and under a budget."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ebbtide.bench.progress import Report, silent
from ebbtide.bench.steps import Ours, PlainLoop, built, median_ratio, race, suited, tokens
from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks
from ebbtide.runtime.parameters.selection import PRECISIONS
from ebbtide.tracing.standalone import trace

SHARE = 4
"""Under the budget model data has room for one part of so many."""
COMPILED = {"compile": "blocks"}


def run(
    model: str = "gpt2-124m",
    batch: int = 2,
    seq: int = 512,
    repeats: int = 7,
    precision: str = "auto",
    report: Report = silent,
) -> dict[str, Any]:
    """`ratio` of each row: ours over plain compiled, the median over rounds in which both made a step after another of
    their own kind."""
    data, precision = tokens(model, batch, seq), suited(precision)
    common: dict[str, Any] = {"clip": None, "precision": precision}
    report("compiling plain PyTorch's blocks")
    resident = Ours(model, data, common | COMPILED)
    plain = PlainLoop(model, data, resident.engine.device, precision, blocks=True)
    try:
        rows = {"resident": _row(resident, plain, repeats, report)}
        model_data = sum(resident.engine.stats()["tags"]["device"].values())
    finally:
        resident.close()
    budget = _planned_peak(model, data, precision) + model_data // SHARE
    others = {
        "quarter": common | COMPILED | {"device": {"memory": budget}},
        "resident, as written": common,
    }
    for name, config in others.items():
        ours = Ours(model, data, config)
        try:
            rows[name] = _row(ours, plain, repeats, report)
        finally:
            ours.close()
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "repeats": repeats,
        "precision": precision,
        "budget_bytes": budget,
        "rows": rows,
    }


def _planned_peak(model: str, data: dict[str, torch.Tensor], precision: str) -> int:
    """What the engine expects a pass to take beside the chunks, before it has seen compiled code: as the blocks are
    written."""
    module = built(model)
    blocks = [block for _, block in repeated_blocks(module)]
    return trace(module, data, PRECISIONS[precision], blocks=blocks).record.peak


def _row(ours: Ours, plain: PlainLoop, repeats: int, report: Report) -> dict[str, Any]:
    seconds = race({"ours": ours.step, "plain": plain.step}, repeats, after_itself=True, report=report)
    stats = ours.engine.stats()
    return {
        "ratio": median_ratio(seconds["ours"], seconds["plain"]),
        "ours_seconds": statistics.median(seconds["ours"]),
        "plain_seconds": statistics.median(seconds["plain"]),
        "peak_bytes": stats["peak_bytes"]["device"],
        "moved_bytes": stats["moved_bytes"],
    }
