"""What no adapter takes, wherever it comes from: a model that others have placed, a launcher that asks for others."""

from __future__ import annotations

import os
from functools import partial
from typing import NoReturn

from torch import nn

from ebbtide.errors import UnsupportedError
from ebbtide.integrations import _accelerate, _transformers


def refuse_placed(model: nn.Module) -> None:
    """The model, or a part of it, is where others keep it, or their hooks move what it computes."""
    for module in model.modules():
        if getattr(module, _transformers.DEVICE_MAP, None) is not None:
            _refuse(
                "was loaded with device_map",
                "load it without, on the CPU; the engine places it within its budgets",
            )
        if any(getattr(module, name, None) for name in _transformers.QUANTIZED):
            _refuse("is quantized", "load it in bf16 or fp32; the engine keeps what does not fit on the host")
        if getattr(module, _transformers.SHARDED, False):
            _refuse(
                "was sharded when it was loaded",
                "load it without distributed_config; the engine shards its chunks",
            )
        checkpointed = getattr(module, _transformers.CHECKPOINTED, None)
        if isinstance(checkpointed, partial) and checkpointed.func.__name__ == _transformers.OFFLOADING:
            _refuse(
                "checkpoints with offload=True",
                "leave offload out, and say ebbtide={'offload_activations': 'checkpoints'} in its place",
            )


def _refuse(what: str, why: str) -> NoReturn:
    raise UnsupportedError(f"the model {what}: {why}")


def refuse_launched() -> None:
    """Where the environment says that `accelerate launch` was told to use DeepSpeed, FSDP, Megatron or a compiler."""
    for name, off, why in _accelerate.LAUNCHED:
        found = os.environ.get(name, off)
        if found.lower() != off:
            raise UnsupportedError(f"accelerate launch ({name}={found}): {why}")
