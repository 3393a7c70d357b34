"""The same Hugging Face config with another number of layers or experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts(config: Any) -> int:
    return next((n for key in EXPERTS if isinstance(n := getattr(config, key, None), int)), 0)


def with_experts(config: Any, count: int) -> Any:
    changed = copy.deepcopy(config)
    setattr(changed, next(key for key in EXPERTS if isinstance(getattr(config, key, None), int)), count)
    return changed


def with_layers(config: Any, count: int) -> Any:
    """A copy, for a config made anew would choose its sparse layers by other rules."""
    changed = copy.deepcopy(config)
    before = config.num_hidden_layers
    changed.num_hidden_layers = count
    for key in ("num_decoder_layers", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(config, key, None), int):
            setattr(changed, key, count)
    for stack in ("encoder", "decoder"):
        step = getattr(config, f"{stack}_sparse_step", None)
        if step:
            setattr(changed, f"num_sparse_{stack}_layers", count // step)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and len(kinds) == before:
        changed.layer_types = [kinds[i % before] for i in range(count)]
    return changed


def widen_routers(module: nn.Module, count: int) -> None:
    """Routers that choose among `count` experts, though the layer holds fewer. Under the device to build on."""
    routers: list[Any] = list(module.modules())
    for child in routers:
        kind = type(child).__name__
        if kind == "SwitchTransformersTop1Router":
            old = child.classifier
            child.classifier = nn.Linear(old.in_features, count, bias=old.bias is not None)
            child.num_experts = count
        elif kind == "MixtralTopKRouter":
            child.weight = nn.Parameter(torch.empty(count, child.hidden_dim, dtype=child.weight.dtype))
            child.num_experts = count
