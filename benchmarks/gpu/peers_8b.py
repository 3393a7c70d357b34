"""The same work by others: FSDP2 with CPU offload and DeepSpeed ZeRO-3 offload, where their packages are there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from ceilings import device_of, synchronized
from results import Store
from shapes import LLAMA_8B, batch_of, built, spec_for
from task import Running, Task
from torch import nn

from ebbtide.models import ModelSpec
from ebbtide.nn.head_loss import LossInPieces

QUESTION = "8B at 16k tokens a step, model data in RAM: FSDP2's offload and DeepSpeed's ZeRO-3 offload"
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2 offload": ("fsdp2", {"offload": True, "compiled": True}),
    "zero-3 offload": ("deepspeed_zero", {"stage": 3, "parameters": True}),
}
STEPS = 4


def run(store: Store, small: bool) -> None:
    compare(store, PEERS, small)


def compare(store: Store, peers: Mapping[str, tuple[str, dict[str, Any]]], small: bool) -> None:
    spec, device = spec_for(LLAMA_8B, small), device_of(small)
    rows, length = (2, 32) if small else (4, 4096)
    batch = batch_of(spec, rows, length)
    for name, (file, options) in peers.items():
        try:
            peer = import_module(file)
        except ModuleNotFoundError as error:
            store.part(name, lambda missing=error.name: not_there(missing), needs=0)
            continue

        def one(peer: Any = peer, options: dict[str, Any] = options) -> dict[str, Any]:
            task = Task(prepared(spec), batch, device, "bf16" if device.type == "cuda" else "fp32")
            return timed(peer.start(task, **options), rows * length, device)

        store.part(name, one, needs=100, anothers=True)


def not_there(package: str | None) -> dict[str, Any]:
    raise RuntimeError(f"{package} is not installed on this machine; carry its wheel")


def prepared(spec: ModelSpec) -> nn.Module:
    """Checkpointed, with the loss in pieces, as ours."""
    module: nn.Module = built(spec)
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    LossInPieces(module)
    return module


def timed(running: Running, tokens: int, device: torch.device) -> dict[str, Any]:
    seconds, losses = [], []
    for _ in range(STEPS):
        begin = synchronized(device)
        losses.append(float(running.step().detach()))
        seconds.append(synchronized(device) - begin)
    found = statistics.median(seconds[2:])
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "steps_seconds": seconds,
        "step_seconds": found,
        "tokens_per_second": tokens / found,
        "losses": losses[:3],
        "peak_bytes": peak,
        "settings": running.settings,
        **running.end(),
    }
