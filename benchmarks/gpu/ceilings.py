"""What the hardware gives, measured in the same run, and the least that a step can take by it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ebbtide.bench.steps import repeated_blocks
from ebbtide.forecasting.doctor import ram

UPDATE_BYTES = ram.UPDATE_BYTES


def device_of(small: bool) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronized(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(job: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """The median; the first, which compiles, does not count."""
    job()
    taken = []
    for _ in range(rounds):
        begin = synchronized(device)
        job()
        taken.append(synchronized(device) - begin)
    return sorted(taken)[len(taken) // 2]


def products(device: torch.device, tokens: int, width: int, inner: int, vocabulary: int) -> dict[str, float]:
    """TFLOP/s of bf16 products at the block's shapes, and at the head's for 1,024 tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {}
    for name, (rows, inside, columns) in {
        "attention": (tokens, width, width),
        "up": (tokens, width, inner),
        "down": (tokens, inner, width),
        "head": (min(tokens, 1024), width, vocabulary),
    }.items():
        one = torch.randn(rows, inside, device=device, dtype=dtype)
        other = torch.randn(inside, columns, device=device, dtype=dtype)
        seconds = seconds_of(lambda one=one, other=other: one @ other, device)  # type: ignore[misc]
        found[name] = 2e-12 * rows * inside * columns / seconds
    return found


def links(device: torch.device, small: bool) -> dict[str, float]:
    """Bytes a second: each direction alone, and both at once."""
    if device.type != "cuda":
        return {}
    from ebbtide.forecasting.doctor.cuda_rates import links as measured

    return measured(device, 1 << (20 if small else 30), 5)


def host(small: bool) -> dict[str, float]:
    """Bytes a second of the host's memory, from all cores: copies, and the optimizer's update."""
    threads = len(os.sched_getaffinity(0))
    streams = ram.streams(threads, 1 << (22 if small else 30), 5)
    return {**streams, "update": ram.update(threads, 1_000_000 if small else 200_000_000, 5)}


def compute_seconds(
    module: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, float]:
    """Forward and backward of one compiled block, with its recomputation, on the batch's tokens; and how many there are.
    What the head and the loss take is not in it, so the bound is too low by that."""
    _, block = next(iter(repeated_blocks(module)))
    count = sum(1 for _ in repeated_blocks(module))
    width, (rows, length) = module.config.hidden_size, batch["input_ids"].shape  # type: ignore[union-attr]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    block = block.to(device, dtype)
    hidden = torch.randn(rows, length, width, device=device, dtype=dtype, requires_grad=True)
    places = torch.arange(length, device=device)[None]
    rotary = module.model.rotary_emb.to(device)(hidden, places)  # type: ignore[union-attr, operator]
    block.compile()

    def step() -> None:
        with torch.no_grad():
            block(hidden, position_embeddings=rotary)
        found = block(hidden, position_embeddings=rotary)
        found = found[0] if isinstance(found, tuple) else found
        found.sum().backward()
        block.zero_grad(set_to_none=True)
        hidden.grad = None

    return {"block_seconds": seconds_of(step, device, 3), "blocks": count}


def bound_of(
    compute: float,
    parameters: int,
    moved: Mapping[str, int],
    rates: Mapping[str, float],
    update: float,
    passes: int,
) -> dict[str, Any]:
    """The seconds of each resource in a step, and the largest. `compute`: of one pass; `moved`: bytes by link in a step;
    `update`: bytes a second of the host's updates; `passes`: micro-batches."""
    seconds = {"compute": compute * passes, "update": parameters * UPDATE_BYTES / update}
    for link in ("host_to_device", "device_to_host"):
        if rates.get(link):
            seconds[link] = moved.get(link, 0) / rates[link]
    return {
        "seconds": seconds,
        "bound_seconds": max(seconds.values()),
        "bound_by": max(seconds, key=seconds.__getitem__),
    }
