"""Whether a model's layers do the same one after the other, so that a few tell what many do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str, type(None))
Fact = tuple[str, object]


def layers_alike(module: nn.Module, config: Any, layers: int) -> bool:
    """Whether all layers but the first are made alike, and the config names none of them apart."""
    for value in vars(config).values():
        if isinstance(value, (list, tuple)) and len(value) == layers and any(v != value[0] for v in value):
            return False
    stacks = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    return all(_alike(stack) for stack in stacks)


def _alike(stack: nn.ModuleList) -> bool:
    made = [[*_description(layer)] for layer in stack]
    return all(
        len(one) == len(made[1]) and all(_same(*pair, 1, place) for pair in zip(made[1], one, strict=True))
        for place, one in enumerate(made)
        if place > 1
    )


def _same(one: Fact, other: Fact, place: int, elsewhere: int) -> bool:
    """A number that is the layer's place says nothing about it."""
    name, value = one
    return other == one or (name == other[0] and (value, other[1]) == (place, elsewhere))


def _description(layer: nn.Module) -> Iterator[Fact]:
    """Of all its modules: what they are, their settings, the shapes of their tensors."""
    for name, child in layer.named_modules():
        yield name, type(child)
        for key, value in vars(child).items():
            if isinstance(value, PLAIN):
                yield f"{name}.{key}", value
        for key, tensor in (*child._parameters.items(), *child._buffers.items()):
            yield f"{name}.{key}", None if tensor is None else tuple(tensor.shape)
