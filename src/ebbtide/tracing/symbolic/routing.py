"""Mixtures of experts in an imagined pass: where tokens go depends on values, so every expert gets an equal share.

The stand-in forwards do what the real ones do, expert by expert and operator by operator, on the rows of an evenly
loaded layer: tokens times experts per token, over the experts that the layer holds, rounded so that the total
agrees. Saved bytes and multiplications are those of that load, and every expert gets a gradient. They sit on the
instances for as long as the pass is imagined; classes are left alone.

Another layer: write a function that yields (module, attribute, stand-in) for an instance, and add it to `EVEN`
under the name of its class. Layers whose shapes do not depend on values (grouped or batched multiplications) need
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Replacements = Iterator[tuple[nn.Module, str, Any]]
_MISSING = object()


def shares(total: int, experts: int) -> list[int]:
    """Rows by expert, equal but for rounding."""
    return [total * (i + 1) // experts - total * i // experts for i in range(experts)]


# -- SwitchTransformers: a module for each expert, one expert for a token, no more than a capacity ----


def _switch(layer: Any) -> Replacements:
    classifier = layer.router.classifier
    # The router moves its classifier to fp32 for good, in its first forward: managed weights stay what they are.
    yield classifier, "to", lambda *_, **__: classifier
    yield classifier, "forward", partial(_linear_in_input_dtype, classifier)
    yield layer, "forward", partial(_switch_layer, layer)
    yield layer.experts, "forward", partial(_switch_experts, layer.experts)


def _linear_in_input_dtype(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.to(rows.dtype)
    return nn.functional.linear(rows, layer.weight.to(rows.dtype), bias)


def _switch_layer(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    batch, length, width = hidden_states.shape
    selected, weights, _ = layer.router(hidden_states)
    count = len(layer.experts)
    most = layer.router.expert_capacity * batch * count
    hidden_states = layer.experts(
        hidden_states.view(-1, width),
        selected.view(batch * length, 1, -1),
        weights.view(-1, 1),
        shares(min(batch * length, most), count),
    )
    return hidden_states.reshape(batch, length, width)


def _switch_experts(
    experts: Any, hidden_states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor, rows: list[int]
) -> torch.Tensor:
    final = torch.zeros_like(hidden_states)
    mask = selected.permute(2, 1, 0)
    torch.greater(mask.sum(dim=(-1, -2)), 0)
    for index, (expert, count) in enumerate(zip(experts.values(), rows, strict=True)):
        chosen = mask[index : index + 1].clone().squeeze(0).new_empty((count, 2))
        position, token = chosen.unbind(1)
        current = hidden_states[None, token].reshape(-1, hidden_states.shape[-1])
        out = expert(current) * weights[token, position, None]
        final.index_add_(0, token, out.to(hidden_states.dtype))
    return final


# -- Mixtral and those built alike, where they loop over experts: all experts in two parameters -------


def _mixtral(experts: Any) -> Replacements:
    if getattr(experts.config, "_experts_implementation", None) in (None, "eager"):
        yield experts, "forward", partial(_mixtral_experts, experts)


def _mixtral_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    final = torch.zeros_like(hidden_states)
    with torch.no_grad():
        mask = nn.functional.one_hot(top_k_index, num_classes=experts.num_experts + 1).permute(2, 1, 0)
        torch.greater(mask.sum(dim=(-1, -2)), 0)
    for index, count in enumerate(shares(top_k_index.numel(), experts.num_experts)):
        position, token = mask.new_empty((count, 2)).unbind(1)
        current = hidden_states[token]
        gate, up = nn.functional.linear(current, experts.gate_up_proj[index]).chunk(2, dim=-1)
        out = experts.act_fn(gate) * up
        out = nn.functional.linear(out, experts.down_proj[index])
        out = out * top_k_weights[token, position, None]
        final.index_add_(0, token, out.to(final.dtype))
    return final


EVEN: dict[str, Callable[[Any], Replacements]] = {
    "SwitchTransformersSparseMLP": _switch,
    "MixtralExperts": _mixtral,
}
"""What stands in for an instance of a class, by its name or that of a class it inherits from."""


@contextmanager
def even_load(module: nn.Module) -> Iterator[None]:
    """The layers of `module` that route by value are evenly loaded."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for child in list(module.modules()):
            kind = next((c.__name__ for c in type(child).__mro__ if c.__name__ in EVEN), None)
            for owner, name, value in EVEN[kind](child) if kind else ():
                before.append((owner, name, owner.__dict__.get(name, _MISSING)))
                owner.__dict__[name] = value
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _MISSING:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = value
