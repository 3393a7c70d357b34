"""ebbtide: everything resident, under a budget, or with the optimizer's state on SSD."""

from __future__ import annotations

import os
from typing import Any

import torch
from task import BETAS, CLIP, DECAY, EPS, LR, Running, Task

import ebbtide
from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks
from ebbtide.runtime.parameters.selection import PRECISIONS

STATE_BYTES = 12
"""Of an element: itself in fp32, and AdamW's two averages."""
FACTS = ("moved_bytes", "peak_bytes", "stall_seconds", "tags", "chunks", "device_state_chunks")


def start(task: Task, compiled: bool = False, quarter: bool = False, ssd: bool = False) -> Running:
    """`quarter`: the device has room for what a pass computes and for a quarter of the model data."""
    settings: dict[str, Any] = {
        "precision": task.precision,
        "clip": CLIP,
        "threads": len(os.sched_getaffinity(0)),
        "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
        "device": {"memory": task.memory},
        "compile": "blocks" if compiled else "off",
    }
    if ssd:
        settings |= {"host": {"memory": 0}, "ssd": {"folder": str(task.folder), "memory": "4GB"}}
    if quarter:
        settings["device"] = {"memory": _quarter(task, settings, compiled)}
    engine = ebbtide.initialize(task.module, settings)
    ebbtide.tune_memory(engine)  # as `ebbtide train` does
    batch = {name: value.to(engine.device) for name, value in task.batch.items()}

    def step() -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    def end() -> dict[str, Any]:
        stats = engine.stats()
        engine.close()
        share = 1 - stats["device_state_chunks"] / stats["chunks"]
        return {"streamed_share": share, "stats": {name: stats[name] for name in FACTS}}

    return Running(step, settings, end)


def _quarter(task: Task, settings: dict[str, Any], compiled: bool) -> int:
    """What the pass takes beside the chunks, known without a run, and a quarter of the parameters and their state."""
    blocks = [block for _, block in repeated_blocks(task.module)] if compiled else []
    peak = ebbtide.trace(
        task.module, task.batch, PRECISIONS[settings["precision"]], blocks=blocks
    ).record.peak
    return peak + STATE_BYTES * sum(parameter.numel() for parameter in task.module.parameters()) // 4
