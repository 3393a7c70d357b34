"""Llama 3.1 8B under a budget of 24 GB at several tokens a step, with what bounds it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from ceilings import bound_of, compute_seconds, device_of, host, links, products, synchronized
from resident_8b import facts
from results import Store
from shapes import LLAMA_8B, batch_of, built, spec_for

from ebbtide.bench.steps import Ours
from ebbtide.models import ModelSpec

QUESTION = "8B (Llama 3.1's shape) under 24 GB: seconds a step at 4k, 16k and 64k tokens, and its bound"
BUDGET, LENGTH = "24GB", 4096
TOKENS = (16_384, 4_096, 65_536)
"""A step; the one that counts most first."""
MOST = 16_384
"""Tokens of a pass; a step of more has several."""


def run(store: Store, small: bool) -> None:
    measure(
        store, spec_for(LLAMA_8B, small), "3MB" if small else BUDGET, (256, 128) if small else TOKENS, small
    )


def measure(
    store: Store,
    spec: ModelSpec,
    budget: str,
    sizes: tuple[int, ...],
    small: bool,
    config: dict[str, Any] | None = None,
) -> None:
    device, shape = device_of(small), spec.config
    length = 64 if small else LENGTH
    most = min(MOST, max(sizes))
    shapes = (shape.hidden_size, shape.intermediate_size, shape.vocab_size)
    store.part("products, TFLOP/s", lambda: products(device, most, *shapes), needs=5)
    rates = store.part("links, bytes a second", lambda: links(device, small), needs=5)
    ram = store.part("host memory, bytes a second", lambda: host(small), needs=10)
    for tokens in sizes:
        passes = max(1, tokens // most)
        batch = batch_of(spec, max(1, tokens // passes // length), length)

        def one(passes: int = passes, batch: Any = batch, tokens: int = tokens) -> dict[str, Any]:
            found = steps(store, spec, batch, passes, tokens, budget, config or {}, device)
            compute = compute_seconds(built(spec.with_layers(2)), batch, device)
            pass_seconds = compute["block_seconds"] * shape.num_hidden_layers
            bound = bound_of(
                pass_seconds, found["parameters"], found["moved_a_step"], rates, ram["update"], passes
            )
            return found | bound | {"achieved_over_bound": bound["bound_seconds"] / found["step_seconds"]}

        store.part(f"{tokens} tokens a step", one, needs=60)


def steps(
    store: Store,
    spec: ModelSpec,
    batch: dict[str, torch.Tensor],
    passes: int,
    tokens: int,
    budget: str,
    config: dict[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    precision = "bf16" if device.type == "cuda" else "fp32"
    settings = {
        "clip": 1.0,
        "compile": "blocks",
        "loss": "pieces",
        "precision": precision,
        "device": {"memory": budget},
        **config,
    }
    begin = time.perf_counter()
    ours = Ours(spec, batch, settings, checkpoint=True, module=built(spec))
    started = time.perf_counter() - begin
    try:
        seconds: list[float] = []
        losses: list[float] = []
        before: dict[str, int] = {}
        while len(seconds) < 6 and (len(seconds) < 3 or store.left > 45):
            before = dict(ours.engine.stats()["moved_bytes"])
            start = synchronized(device)
            for _ in range(passes):
                loss = ours.engine(**ours.batch).loss / passes
                ours.engine.backward(loss)
            ours.engine.step()
            losses.append(passes * float(loss.detach()))
            seconds.append(synchronized(device) - start)
        stats = ours.engine.stats()
        count = sum(p.numel() for p in ours.engine.module.parameters())
    finally:
        ours.close()
    step = statistics.median(seconds[2:])
    return {
        "tokens": tokens,
        "passes": passes,
        "parameters": count,
        "built_seconds": started,
        "steps_seconds": seconds,
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "losses": losses[:3],
        "moved_a_step": {link: stats["moved_bytes"][link] - before[link] for link in before},
        "stats": facts(stats),
    }
