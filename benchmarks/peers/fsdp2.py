"""FSDP2 on one rank, a unit a block, with and without CPUOffloadPolicy."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from task import BETAS, CLIP, DECAY, EPS, LR, Running, Task
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks


def start(task: Task, compiled: bool = False, offload: bool = False) -> Running:
    model, device = task.module, task.device
    _join(device)
    mixed = task.precision == "bf16"
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    else:
        model.to(device)
    for _, block in list(repeated_blocks(model)):
        if compiled:
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    batch = task.inputs

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Running(step, {"compiled": compiled, "offload": offload, "param_dtype": task.precision})


def _join(device: torch.device) -> None:
    """A group of one, on whatever port is free."""
    if dist.is_initialized():
        return
    if "MASTER_PORT" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)
