"""How fast the CPU kernels are, against torch and against the memory.

All variants run in turn, several rounds; a ratio is taken within each round, and its median reported: on a
noisy machine only ratios can be trusted. Memory is allocated and touched before anything is timed.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ebbtide.kernels import ADAMW, FallbackKernels, Kernels, Operands, cpu_kernels

STREAM = replace(ADAMW, name="stream")
"""The native kernel that touches the memory of an update and computes next to nothing."""

GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
COEFFICIENTS = ADAMW.coefficients(GROUP, 10, 1.0)
SPLIT_BYTES, SEPARATE_BYTES = 26, 28
"""Read and written per element: gradient 2, parameter 4 (2 where only written), master 4 or 8, states 16."""


@dataclass
class Race:
    """Named jobs that run in turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, rounds: int, jobs: dict[str, Callable[[], object]], prepare: Callable[[], object]) -> None:
        for number in range(rounds + 1):
            for name, job in jobs.items():
                prepare()
                start = time.perf_counter()
                job()
                if number:  # the first round warms up
                    self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def milliseconds(self, name: str) -> float:
        return 1e3 * statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return statistics.median(a / b for a, b in pairs)


def run(
    elements: int = 100_000_000, rounds: int = 7, threads: int = 2, fallback: bool = True
) -> dict[str, float]:
    """Times one update of bf16 parameters, and the passes over gradients, on `threads` threads.

    `speedup` is that of one pass with a split master over torch's fused AdamW, to which the gradient is
    converted up and from which the parameter is converted down. `share` is the speed of that pass over that
    of the memory: the same reads and writes without the arithmetic.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        race = Race()
        kernels = cpu_kernels(threads, native=True)
        _race_updates(race, kernels, elements, rounds, fallback)
        _race_captures(race, kernels, elements // 4, rounds)
        result = {f"{name}_ms": race.milliseconds(name) for name in race.seconds}
        result |= {
            "speedup": race.ratio("torch", "split"),
            "speedup_separate": race.ratio("torch", "separate"),
            "share": race.ratio("stream_split", "split"),
            "share_separate": race.ratio("stream_separate", "separate"),
            "split_gbytes_per_s": elements * SPLIT_BYTES / race.milliseconds("split") / 1e6,
            "separate_gbytes_per_s": elements * SEPARATE_BYTES / race.milliseconds("separate") / 1e6,
            "capture_copy_speedup": race.ratio("torch_copy", "capture_copy"),
            "capture_add_speedup": race.ratio("torch_add", "capture_add"),
            "call_us": _call_seconds(kernels) * 1e6,
        }
        if fallback:
            result["speedup_fallback_split"] = race.ratio("torch", "fallback_split")
            result["speedup_fallback_separate"] = race.ratio("torch", "fallback_separate")
        return result
    finally:
        torch.set_num_threads(before)


def _race_updates(race: Race, kernels: Kernels, n: int, rounds: int, fallback: bool) -> None:
    gradient, parameter = torch.randn(n).bfloat16(), torch.randn(n).bfloat16()
    low, master = torch.zeros(n, dtype=torch.int16), torch.randn(n)
    states = (torch.zeros(n), torch.zeros(n))
    split, separate = (Operands(parameter, gradient, form, states) for form in (low, master))
    full = torch.nn.Parameter(master.clone())
    upcast = full.grad = torch.zeros(n)
    optimizer = torch.optim.AdamW([full], **GROUP, fused=True)

    def in_torch() -> None:
        upcast.copy_(gradient)
        optimizer.step()
        parameter.copy_(full.detach())

    jobs: dict[str, Callable[[], object]] = {
        "torch": in_torch,
        "split": lambda: kernels.update(ADAMW, split, COEFFICIENTS),
        "stream_split": lambda: kernels.update(STREAM, split, COEFFICIENTS),
        "separate": lambda: kernels.update(ADAMW, separate, COEFFICIENTS),
        "stream_separate": lambda: kernels.update(STREAM, separate, COEFFICIENTS),
    }
    if fallback:
        plain = FallbackKernels()
        jobs["fallback_split"] = lambda: plain.update(ADAMW, split, COEFFICIENTS)
        jobs["fallback_separate"] = lambda: plain.update(ADAMW, separate, COEFFICIENTS)
    race.run(rounds, jobs, prepare=lambda: [state.fill_(1e-4) for state in states])


def _race_captures(race: Race, kernels: Kernels, n: int, rounds: int) -> None:
    gradient, space = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.bfloat16)
    source, target = gradient.view(torch.uint8), space.view(torch.uint8)
    jobs: dict[str, Callable[[], object]] = {
        "torch_copy": lambda: space.copy_(gradient),
        "capture_copy": lambda: kernels.capture(space, gradient, False),
        "torch_add": lambda: space.add_(gradient),
        "capture_add": lambda: kernels.capture(space, gradient, True),
        "sum_of_squares": lambda: kernels.sum_of_squares(gradient),
        "copy": lambda: kernels.copy(target, source),
    }
    race.run(rounds, jobs, prepare=lambda: None)


def _call_seconds(kernels: Kernels, calls: int = 3000) -> float:
    """What capturing a small gradient costs, mostly the way into the kernel."""
    gradient: Tensor = torch.randn(16, 16).bfloat16()
    space = torch.zeros_like(gradient)
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            kernels.capture(space, gradient, False)
        rounds.append(time.perf_counter() - start)
    return min(rounds) / calls


if __name__ == "__main__":
    print(json.dumps({name: round(value, 3) for name, value in run().items()}, indent=1))
