"""Layers of experts that ranks can have among them: which tensors are whose, where tokens go, what experts make of them.

A layer is known by its class. Others are made known with `register_experts`; what is not known is shared like
everything else: its chunks are gathered, and each rank computes all experts for its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.layout import Bank, TensorSpec, odd_bank

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpertAdapter:
    """What must be known of a layer's class. Names of tensors are those within the layer."""

    bank: Callable[[Any], Bank]
    """Of a layer: how many experts it has, and their tensors."""
    route: Callable[..., Routed]
    """Of a layer and what its forward is called with: rows (token, width); for each the numbers of the experts that it
    goes to (token, choice), -1 where it goes to none; and the weights that their answers are added up with (token,
    choice)."""
    run: Callable[[Any, torch.Tensor, torch.Tensor, range], torch.Tensor]
    """(layer, rows, for each the number of its expert, the experts that are here): what the experts make of the rows.
    A tensor that has all experts has those here, and no others."""


@dataclass(frozen=True)
class ExpertLayer:
    """A layer whose experts ranks have among them."""

    name: str
    module: nn.Module
    adapter: ExpertAdapter
    bank: Bank
    """With the model's names."""


# -- Hugging Face's ----------------------------------------------------------------------------------------


def _own_bank(layer: Any) -> Bank:
    """A module for each expert."""
    children = list(layer.values())
    names = [[name for name, _ in child.named_parameters()] for child in children]
    keys = list(layer.keys())
    return Bank(
        len(keys), own=tuple(tuple(f"{k}.{n}" for n in own) for k, own in zip(keys, names, strict=True))
    )


def _switch_route(layer: Any, rows: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> Routed:
    """`selected`: (token, 1, expert), all zeros where the expert was full."""
    best = selected.argmax(-1)
    return rows, torch.where(selected.sum(-1) > 0, best, -1), weights


def _switch_run(layer: Any, rows: torch.Tensor, experts: torch.Tensor, here: range) -> torch.Tensor:
    selected = nn.functional.one_hot(experts, len(layer)).unsqueeze(1)
    found: torch.Tensor = type(layer).forward(layer, rows, selected, rows.new_ones(len(rows), 1))
    return found


def _stacked_bank(layer: Any) -> Bank:
    """All experts in each tensor."""
    return Bank(layer.num_experts, stacked=tuple(name for name, _ in layer.named_parameters()))


def _stacked_route(layer: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Routed:
    return rows, torch.where(chosen < layer.num_experts, chosen, -1), weights


def _stacked_run(layer: Any, rows: torch.Tensor, experts: torch.Tensor, here: range) -> torch.Tensor:
    every, layer.num_experts = layer.num_experts, len(here)
    try:
        chosen = (experts - here.start).unsqueeze(1)
        found: torch.Tensor = type(layer).forward(layer, rows, chosen, rows.new_ones(len(rows), 1))
        return found
    finally:
        layer.num_experts = every


_OWN = ExpertAdapter(_own_bank, _switch_route, _switch_run)
_STACKED = ExpertAdapter(_stacked_bank, _stacked_route, _stacked_run)
_known: dict[type | str, ExpertAdapter] = {
    "SwitchTransformersExperts": _OWN,
    "MixtralExperts": _STACKED,
    "OlmoeExperts": _STACKED,
    "Qwen2MoeExperts": _STACKED,
    "Qwen3MoeExperts": _STACKED,
}
"""By class, or by its name where that is of a library that need not be there."""


def register_experts(layer: type, adapter: ExpertAdapter) -> None:
    """Makes a class of layers known, whose experts ranks are to have among them."""
    _known[layer] = adapter


# -- those of a model ----------------------------------------------------------------------------------------


def find_layers(
    module: nn.Module, specs: Sequence[TensorSpec], ranks: int, config: Config
) -> tuple[list[ExpertLayer], dict[str, str]]:
    """The layers whose experts the ranks can have among them, and by name why other known ones cannot be so."""
    found: list[ExpertLayer] = []
    odd: dict[str, str] = {}
    if ranks < 2 or config.experts != "spread":
        return found, odd
    named = {spec.name: spec for spec in specs}
    for name, child in module.named_modules():
        adapter = _known.get(type(child)) or _known.get(type(child).__name__)
        if adapter is None:
            continue
        bank = _named(adapter.bank(child), name)
        why = odd_bank(bank, named, ranks)
        if not why and config.updates == "in-backward":
            # All ranks stop at a gradient that is not finite, so experts' would all have to wait for the end of it.
            why = "updates are in backward"
        if why:
            odd[name] = why
        else:
            found.append(ExpertLayer(name, child, adapter, bank))
    return found, odd


def _named(bank: Bank, prefix: str) -> Bank:
    def full(name: str) -> str:
        return f"{prefix}.{name}" if prefix else name

    return Bank(bank.count, tuple(map(full, bank.stacked)), tuple(tuple(map(full, own)) for own in bank.own))
