"""torchao: AdamW whose state and gradients are on the CPU, and AdamW with state of 8 bits, updated within backward."""

from __future__ import annotations

from typing import Any

import torch
from task import BETAS, CLIP, DECAY, EPS, LR, Running, Task
from torch import nn
from torchao.optim import AdamW8bit, CPUOffloadOptimizer

from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks

SETTINGS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def start(task: Task, kind: str = "offload", compiled: bool = False) -> Running:
    model = task.module.to(task.device)
    if task.precision == "bf16":
        model.to(torch.bfloat16)
    for _, block in list(repeated_blocks(model)) if compiled else ():
        block.compile()
    step = _offloaded(task, model) if kind == "offload" else _in_backward(task, model)
    clipped = "clipped" if kind == "offload" else "not clipped: each gradient goes as it comes"
    return Running(step, {"kind": kind, "compiled": compiled, "gradients": clipped})


def _offloaded(task: Task, model: nn.Module) -> Any:
    """Gradients stay until they are clipped; with `offload_gradients` they would go, and could not be."""
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **SETTINGS)
    batch = task.inputs

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _in_backward(task: Task, model: nn.Module) -> Any:
    optimizers = {p: AdamW8bit([p], **SETTINGS) for p in model.parameters()}
    batch = task.inputs

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss

    return step
