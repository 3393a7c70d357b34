"""DeepSpeed: ZeRO-Offload (stages 2 and 3, optimizer state in RAM), and ZeRO-Infinity (state on NVMe)."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from task import BETAS, CLIP, DECAY, EPS, LR, Running, Task

NVME = "nvme"


def start(
    task: Task, stage: int = 3, state: str = "cpu", parameters: bool = False, ratio: float = 1.0, **nvme: Any
) -> Running:
    """`state`: where the optimizer's is. `parameters`: they are offloaded, too. `ratio`: of the state that is updated on
    the CPU. `nvme`: settings of the state's buffers."""
    settings = {
        "train_micro_batch_size_per_gpu": next(iter(task.batch.values())).shape[0],
        "gradient_clipping": CLIP,
        "bf16": {"enabled": task.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
        },
        "zero_optimization": _zero(task, stage, state, parameters, ratio, nvme),
        "steps_per_print": 1_000_000,
    }
    if state == NVME:
        settings["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "overlap_events": True,
        }
    engine, *_ = deepspeed.initialize(
        model=task.module, model_parameters=task.module.parameters(), config=settings
    )
    batch = {name: value.to(engine.device) for name, value in task.batch.items()}

    def step() -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return Running(step, settings)


def _zero(
    task: Task, stage: int, state: str, parameters: bool, ratio: float, nvme: dict[str, Any]
) -> dict[str, Any]:
    """As its documentation has it, with buffers for models of this size on disk: the defaults are for far larger ones,
    and with them it takes more memory and is no faster. `pin_memory` does nothing on a CPU."""
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "offload_optimizer": {"device": state, "pin_memory": True},
    }
    if ratio < 1:
        zero["offload_optimizer"]["ratio"] = ratio
    if parameters:
        zero["offload_param"] = {"device": state, "pin_memory": True}
    if state != NVME:
        return zero
    del zero["overlap_comm"]
    zero |= {"sub_group_size": 20_000_000, "reduce_bucket_size": 50_000_000}
    zero["offload_optimizer"] |= {"nvme_path": str(task.folder), "buffer_count": 4} | nvme
    if parameters:
        # A buffer holds one parameter, and GPT-2's largest, the embedding, has 38.6 million elements. 5 (the default) or
        # 8 buffers end the second step with "Not enough buffers"; this is one for each parameter.
        zero["offload_param"] |= {
            "nvme_path": str(task.folder),
            "buffer_count": 52,
            "buffer_size": 40_000_000,
            "max_in_cpu": 0,
        }
    return zero
