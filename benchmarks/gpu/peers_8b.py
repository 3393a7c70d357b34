"""The same work by others: DeepSpeed ZeRO-Offload and FSDP2 with CPU offload, where their packages are there."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from typing import Any

import torch
from ceilings import device_of, synchronized
from results import Store
from shapes import LLAMA_8B, batch_of, built, spec_for

from ebbtide.nn.head_loss import LossInPieces
from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks

QUESTION = "8B at 16k tokens a step, optimizer state on the host: DeepSpeed ZeRO-Offload and FSDP2 offload"
LR, STEPS = 1e-4, 4


def run(store: Store, small: bool) -> None:
    spec, device = spec_for(LLAMA_8B, small), device_of(small)
    rows, length = (2, 32) if small else (4, 4096)
    batch = {name: value.to(device) for name, value in batch_of(spec, rows, length).items()}
    store.part("fsdp2 offload", lambda: fsdp2(spec, batch, device, rows * length), needs=100, anothers=True)
    for stage in (2, 3):
        store.part(
            f"deepspeed {stage}", lambda stage=stage: deepspeed(spec, batch, rows * length, stage), needs=100
        )


def timed(step: Any, tokens: int, device: torch.device) -> dict[str, Any]:
    seconds, losses = [], []
    for _ in range(STEPS):
        begin = synchronized(device)
        losses.append(step())
        seconds.append(synchronized(device) - begin)
    found = statistics.median(seconds[2:])
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "steps_seconds": seconds,
        "step_seconds": found,
        "tokens_per_second": tokens / found,
        "losses": losses[:3],
        "peak_bytes": peak,
    }


def prepared(spec: Any) -> Any:
    """Checkpointed, with the loss in pieces, as ours."""
    module = built(spec)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    LossInPieces(module)
    return module


def fsdp2(spec: Any, batch: dict[str, torch.Tensor], device: torch.device, tokens: int) -> dict[str, Any]:
    import os

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1
        )
    mesh = init_device_mesh(device.type, (1,))
    module = prepared(spec)
    mixed = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed, "offload_policy": CPUOffloadPolicy()}
    for _, block in list(repeated_blocks(module)):
        block.compile()
        fully_shard(block, **options)
    fully_shard(module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step() -> float:
        loss = module(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return timed(step, tokens, device)


def deepspeed(spec: Any, batch: dict[str, torch.Tensor], tokens: int, stage: int) -> dict[str, Any]:
    if find_spec("deepspeed") is None:
        raise RuntimeError("DeepSpeed is not installed on this machine; carry its wheel")
    import deepspeed as package

    rows = int(batch["input_ids"].shape[0])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            **({"offload_param": {"device": "cpu", "pin_memory": True}} if stage == 3 else {}),
        },
    }
    engine, *_ = package.initialize(model=prepared(spec), config=config)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return timed(step, tokens, engine.device)
