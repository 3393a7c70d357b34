"""Llama 3.1 8B, everything on the card, blocks compiled: tokens a second of the engine and of plain PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from ceilings import device_of, products, synchronized
from results import Store
from shapes import LLAMA_8B, batch_of, built, spec_for
from torch import nn

from ebbtide.bench.steps import LR, Ours
from ebbtide.nn.head_loss import LossInPieces
from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks

QUESTION = "8B resident, blocks compiled, 4,096 tokens: the engine against plain PyTorch compiled"
STEPS, WARM_UP = 10, 3


class PlainCompiled:
    """bf16 parameters, fp32 masters, one fused AdamW a tensor: a gradient in fp32 is there of one tensor at a time."""

    def __init__(self, module: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> None:
        self.module = module.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        LossInPieces(module)
        for _, block in repeated_blocks(module):
            block.compile()
        self.masters = [nn.Parameter(p.detach().float()) for p in module.parameters()]
        self.optimizers = [torch.optim.AdamW([master], lr=LR, fused=True) for master in self.masters]
        self.batch = {name: value.to(device) for name, value in batch.items()}

    def step(self) -> float:
        loss = self.module(**self.batch).loss
        loss.backward()
        for parameter, master, optimizer in zip(
            self.module.parameters(), self.masters, self.optimizers, strict=True
        ):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            master.grad = None
            with torch.no_grad():
                parameter.copy_(master)
        return float(loss.detach())


def timed(step: Callable[[], float], tokens: int, device: torch.device) -> dict[str, Any]:
    losses, seconds = [], []
    for number in range(STEPS + WARM_UP):
        begin = synchronized(device)
        losses.append(step())
        if number >= WARM_UP:
            seconds.append(synchronized(device) - begin)
    found = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "step_seconds": found,
        "spread": [min(seconds), max(seconds)],
        "tokens_per_second": tokens / found,
        "losses": losses[:3],
        "peak_bytes": peak,
    }


def run(store: Store, small: bool) -> None:
    device, spec = device_of(small), spec_for(LLAMA_8B, small)
    rows, length = (2, 32) if small else (1, 4096)
    batch, tokens = batch_of(spec, rows, length), rows * length
    config = spec.config
    store.part(
        "ceilings",
        lambda: products(device, tokens, config.hidden_size, config.intermediate_size, config.vocab_size),
    )

    def plain() -> dict[str, Any]:
        return timed(PlainCompiled(built(spec), batch, device).step, tokens, device)

    def ours() -> dict[str, Any]:
        precision = "bf16" if device.type == "cuda" else "fp32"
        engine = Ours(
            spec,
            batch,
            {"clip": None, "compile": "blocks", "loss": "pieces", "precision": precision},
            module=built(spec),
        )
        try:
            return timed(engine.step, tokens, device) | {"stats": facts(engine.engine.stats())}
        finally:
            engine.close()

    found = store.part("plain compiled", plain, needs=70)
    here = store.part("ebbtide compiled", ours, needs=70)
    store.part(
        "ratio",
        lambda: {"tokens_per_second": here["tokens_per_second"] / found["tokens_per_second"]},
        needs=0,
    )


def facts(stats: dict[str, Any]) -> dict[str, Any]:
    """What a result keeps of `engine.stats()`."""
    names = (
        "peak_bytes",
        "moved_bytes",
        "stall_seconds",
        "planned_traffic",
        "minimum_traffic",
        "diverged",
        "traces",
    )
    return {name: stats[name] for name in names}
