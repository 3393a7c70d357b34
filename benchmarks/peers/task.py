"""What a peer is given, what it gives back, and the meters around its steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 1.0


@dataclass(frozen=True)
class Task:
    """The same for all: AdamW, gradients clipped to a global norm, one batch again and again (a loss that falls shows
    that the updates do something)."""

    module: nn.Module
    """In fp32, on the CPU."""
    batch: dict[str, torch.Tensor]
    device: torch.device
    precision: str = "fp32"
    """bf16: with fp32 masters."""
    folder: Path | None = None
    """On the disk that takes what goes to SSD."""
    memory: str = "auto"
    """The engine's device budget."""

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device) for name, value in self.batch.items()}


@dataclass(frozen=True)
class Running:
    step: Callable[[], torch.Tensor]
    """Makes one and gives its loss."""
    settings: dict[str, Any]
    end: Callable[[], dict[str, Any]] = field(default=dict)
    """Gives what there is to say of it, and lets it go."""


def measure(running: Running, warm_up: int, steps: int) -> dict[str, Any]:
    losses, seconds, whole = [], [], 0
    before, cpu = disk_bytes(), 0.0
    for number in range(warm_up + steps):
        if number == warm_up:
            before, cpu = disk_bytes(), sum(os.times()[:2])
            whole = memory("VmHWM")
            forget_peak()
        start = time.perf_counter()
        losses.append(float(running.step().detach()))
        seconds.append(time.perf_counter() - start)
    cpu = (sum(os.times()[:2]) - cpu) / steps
    after, peak = disk_bytes(), memory("VmHWM")
    return {
        "seconds": seconds[warm_up:],
        "losses": losses,
        "cpu_seconds": cpu,
        "peak": peak,
        "whole_peak": max(whole, peak),
        "disk_read": (after[0] - before[0]) // steps,
        "disk_written": (after[1] - before[1]) // steps,
        "settings": running.settings,
        **running.end(),
    }


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """The kernel's peak starts anew: what compiling and the first steps took is not the training's."""
    Path("/proc/self/clear_refs").write_text("5")


def disk_bytes() -> tuple[int, int]:
    """(read, written) by this process, as the kernel counts what reaches the disk."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"]), int(facts["write_bytes"])
