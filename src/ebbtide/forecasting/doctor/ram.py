"""What the RAM gives: streams, first touch, the update's pass, and copies of the back end beside the computation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.devices.cpu_device import CpuBackend
from ebbtide.devices.pool import map_memory
from ebbtide.kernels import ADAMW, Operands, cpu_kernels

UPDATE_BYTES = 26
"""Read and written of an element: gradient 2, parameter 4, master's other half 4, two states of 8."""
_GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def streams(threads: int, count: int, rounds: int) -> dict[str, float]:
    """Bytes a second on all threads. A copy and an addition in place read and write: both are counted."""
    kernels = cpu_kernels(threads)
    touched = []
    for _ in range(3):  # the one before is given back
        source = map_memory(count)
        begin = time.perf_counter()
        source.fill_(1)
        touched.append(time.perf_counter() - begin)
    target = map_memory(count).fill_(1)
    numbers = target.view(torch.float32)
    jobs: dict[str, tuple[Callable[[], object], int]] = {
        "refill": (lambda: source.fill_(1), count),
        "copy": (lambda: kernels.copy(target, source), 2 * count),
        "add": (lambda: numbers.add_(1.0), 2 * count),
    }
    seconds = timed({name: job for name, (job, _) in jobs.items()}, rounds)
    found = {name: moved / seconds[name] for name, (_, moved) in jobs.items()}
    return {"first_touch": count / statistics.median(touched), **found}


def update(threads: int, elements: int, rounds: int) -> float:
    """Bytes a second that one pass of the optimizer's update reads and writes."""
    kernels = cpu_kernels(threads)
    parameter, gradient = (torch.full((elements,), 0.01, dtype=torch.bfloat16) for _ in range(2))
    remainder = torch.zeros(elements, dtype=torch.int16)
    states = (torch.full((elements,), 1e-4), torch.full((elements,), 1e-4))
    operands = Operands(parameter, gradient, remainder, states)
    coefficients = ADAMW.coefficients(_GROUP, 10, 1.0)
    seconds = timed({"update": lambda: kernels.update(ADAMW, operands, coefficients)}, rounds)["update"]
    return elements * UPDATE_BYTES / seconds


def background_copies(count: int, rounds: int) -> dict[str, float]:
    """Copies as the back end of the CPU makes them: bytes a second, and seconds of the smallest."""
    backend = CpuBackend()
    try:
        here, there = backend.allocate("device", count), backend.allocate("host", count)
        here.fill_(1)
        there.fill_(1)
        jobs: dict[str, Callable[[], object]] = {
            "large": lambda: backend.copy(here, there, "host_to_device").synchronize(),
            "small": lambda: backend.copy(here[:64], there[:64], "host_to_device").synchronize(),
        }
        seconds = timed(jobs, rounds)
        return {"rate": count / seconds["large"], "latency": seconds["small"]}
    finally:
        backend.close()


def timed(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of jobs that run in turn; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in seconds.items()}
