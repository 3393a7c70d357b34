"""What a machine with a GPU is asked: `make gpu-check`.

The GPU tests, then overhead (1B resident), the update kernel, and 7B under a 24 GB device budget. Each result is
written as soon as it is there; a table comes last. Nothing is installed and nothing is fetched.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ebbtide.bench.steps import Ours, PlainLoop, drawn_quickly, median_ratio, race
from ebbtide.kernels import ADAMW, Operands, cpu_kernels, gpu_kernels
from ebbtide.models import spec_of

RESULTS = Path("benchmarks/results")
SECONDS = 520
"""All of it must end within nine minutes."""
FOR_OFFLOAD = 200
"""Of these, what the tests leave."""
TESTS = ("tests/kernels/test_gpu.py", "tests/kernels/test_kernels_gpu.py")
ROUNDS = 30
"""A step of ours and a plain one, in turn, six seconds in all: ten of each hung on what else the host did."""
WORKERS = 8
"""Processes that test beside each other: each takes half a gigabyte of the card for itself."""


def gpt(layers: int, width: int) -> Any:
    """A GPT of the PatrickStar family: 16 heads, vocabulary 50,257, tied."""
    fields = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": width,
        "n_head": 16,
        "n_positions": 1024,
        "vocab_size": 50257,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    }
    return spec_of(f"gpt {layers} x {width}", fields)


def batch(size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50257, (size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def tests(left: float) -> dict[str, Any]:
    """The tests for a GPU, in a process of their own; what it wrote is kept where it failed, or was stopped."""
    _let_go()
    command = [sys.executable, "-m", "pytest", *TESTS, "-p", "no:cacheprovider", "--tb=short", "-v"]
    if find_spec("xdist"):
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    with tempfile.TemporaryFile("w+") as said:
        try:
            allowed = max(60.0, left - FOR_OFFLOAD)
            code = subprocess.run(command, stdout=said, stderr=said, timeout=allowed, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        said.seek(0)
        lines = said.read().strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    found = {"exit": code, "summary": lines[-1] if lines else "", "failed": failed[:40]}
    return found if code == 0 else {**found, "output": lines[-400:]}


def _let_go() -> None:
    """Of what the last measurement left, so that the next has the card to itself."""
    gc.collect()
    torch.cuda.empty_cache()


def update(_: float) -> dict[str, Any]:
    """One pass of the GPU kernel over 100M elements, against torch's fused AdamW with its casts; and the bits."""
    device = torch.device("cuda")
    count = 100_000_000
    kernels = gpu_kernels()
    parameter = torch.randn(count, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(count, device=device, dtype=torch.bfloat16)
    remainder = torch.zeros(count, device=device, dtype=torch.int16)
    states = tuple(torch.zeros(count, device=device) for _ in range(2))
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    coefficients = ADAMW.coefficients(group, 10, 1.0)
    operands = Operands(parameter, gradient, remainder, states)
    master = parameter.float().requires_grad_()
    fused = torch.optim.AdamW([master], lr=1e-3, fused=True)

    def plain() -> None:
        master.grad = gradient.float()
        fused.step()
        parameter.copy_(master.detach())

    jobs = {"plain": plain, "ours": lambda: kernels.update(ADAMW, operands, coefficients)}
    seconds = race(jobs, 10)
    bytes_moved = count * 26
    middle = sorted(seconds["ours"])[len(seconds["ours"]) // 2]
    return {
        "kernels": type(kernels).__name__,
        "speedup": median_ratio(seconds["plain"], seconds["ours"]),
        "ours_ms": 1e3 * middle,
        "gbytes_per_second": bytes_moved / middle / 1e9,
        "same_bits_as_cpu": _same_bits(kernels),
    }


def _same_bits(kernels: Any) -> bool:
    generator = torch.Generator().manual_seed(1)
    count = 1 << 20
    held = [
        torch.randn(count, generator=generator).to(torch.bfloat16),
        torch.randn(count, generator=generator).to(torch.bfloat16),
        torch.randint(-32768, 32767, (count,), generator=generator, dtype=torch.int16),
        torch.randn(count, generator=generator),
        torch.rand(count, generator=generator),
    ]
    there = [value.cuda() for value in held]
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    coefficients = ADAMW.coefficients(group, 3, 0.7)
    for one, some in ((cpu_kernels(), held), (kernels, there)):
        one.update(ADAMW, Operands(some[0], some[1], some[2], (some[3], some[4])), coefficients)
    return all(
        torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(held, there, strict=True)
    )


def overhead(_: float) -> dict[str, Any]:
    """1B resident, against plain PyTorch with bf16 parameters and fp32 masters."""
    spec, data = gpt(20, 2048), batch(4, 1024)
    plain = PlainLoop(spec, data, torch.device("cuda"), module=drawn_quickly(spec))
    plain.step()  # its optimizer state is there before ours counts what lies beside it
    ours = Ours(spec, data, {"clip": None}, module=drawn_quickly(spec))
    try:
        ours.step()
        before = ours.engine.stats()["moved_bytes"]
        seconds = race({"ours": ours.step, "plain": plain.step}, ROUNDS)
        stats = ours.engine.stats()
    finally:
        ours.close()
    return {
        "ratio": median_ratio(seconds["ours"], seconds["plain"]),
        "ours_ms": 1e3 * median(seconds["ours"]),
        "plain_ms": 1e3 * median(seconds["plain"]),
        "moved_bytes": {link: count - before[link] for link, count in stats["moved_bytes"].items()},
        "peak_bytes": stats["peak_bytes"],
    }


def offload(left: float) -> dict[str, Any]:
    """7B under a 24 GB device budget: seconds a step and what moved."""
    begin = time.perf_counter()
    _let_go()
    spec = gpt(34, 4096)
    config = {"clip": 1.0, "device": {"memory": "24GB"}}
    ours = Ours(spec, batch(4, 1024), config, checkpoint=True, module=drawn_quickly(spec))
    built = time.perf_counter() - begin
    try:
        seconds: list[float] = []
        while len(seconds) < 6 and time.perf_counter() - begin < left - 30:
            start = time.perf_counter()
            ours.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        stats = ours.engine.stats()
        parameters = sum(p.numel() for p in ours.engine.module.parameters())
    finally:
        ours.close()
    steady = sorted(seconds[3:]) or seconds
    step = steady[len(steady) // 2]
    return {
        "parameters": parameters,
        "step_seconds": seconds,
        "tokens_per_second": 4 * 1024 / step,
        "tflops": 8 * parameters * 4 * 1024 / step / 1e12,
        "moved_bytes": stats["moved_bytes"],
        "stall_seconds": stats["stall_seconds"],
        "planned_traffic": stats["planned_traffic"],
        "minimum_traffic": stats["minimum_traffic"],
        "peak_bytes": stats["peak_bytes"],
        "built_seconds": built,
        "imagined": stats["symbolic"] or "yes",
    }


STEPS: dict[str, Callable[[float], dict[str, Any]]] = {
    "update": update,
    "overhead": overhead,
    "tests": tests,
    "offload": offload,
}


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device on this machine", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name().replace(" ", "-").lower()
    file = RESULTS / f"gpu-{name}.json"
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for step, job in STEPS.items():
        left = SECONDS - (time.perf_counter() - begin)
        if left < 40:
            found[step] = {"not_run": "no time left"}
            continue
        try:
            found[step] = job(left)
        except Exception as error:
            # One failure must not hide the other measurements.
            found[step] = {"error": f"{type(error).__name__}: {error}"}
        file.write_text(json.dumps(found, indent=1, default=str) + "\n")
        print(step, json.dumps(found[step], default=str)[:2000], flush=True)
    _table(found)
    good = all("error" not in part for part in found.values() if isinstance(part, dict))
    return 0 if good and found["tests"].get("exit") == 0 else 1


def _table(found: dict[str, Any]) -> None:
    table = Table("step", "figure", "value", title=f"{found['device']}, torch {found['torch']}")
    for step, part in found.items():
        if isinstance(part, dict):
            for key, value in part.items():
                table.add_row(step, key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
