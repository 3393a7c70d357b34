"""Plain PyTorch: fused AdamW on fp32 parameters, or on fp32 masters of bf16 parameters."""

from __future__ import annotations

import torch
from task import BETAS, CLIP, DECAY, EPS, LR, Running, Task
from torch import nn

from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks


def start(task: Task, compiled: bool = False) -> Running:
    model = task.module.to(task.device)
    masters = list(model.parameters())
    if apart := task.precision == "bf16":
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in masters]
        model.to(torch.bfloat16)
    for _, block in list(repeated_blocks(model)) if compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    batch, pairs = task.inputs, list(zip(masters, model.parameters(), strict=True)) if apart else []

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        for master, parameter in pairs:
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        return loss

    return Running(step, {"masters": "fp32", "fused": True, "compiled": compiled})
