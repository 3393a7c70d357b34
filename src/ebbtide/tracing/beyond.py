"""What autograd keeps for backward beyond a module's outputs, where the loss is computed outside of it.

The engine does not see the user's own operators between forward and backward. When backward begins, the graph from the
loss to the outputs says what they have saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

MOST = 10_000
"""Nodes that are looked at; a loss has a few dozen."""


def saved_beyond(loss: torch.Tensor, is_inside: Callable[[Any], bool]) -> list[torch.Tensor]:
    """What was saved between the loss and the nodes that passes have made, but for weights and single numbers."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo and len(seen) < MOST:
        node = todo.pop()
        if node is None or node in seen or is_inside(node):
            continue
        seen.add(node)
        found += [tensor for tensor in _saved(node) if tensor.numel() > 1 and not _is_weight(tensor)]
        todo += [following for following, _ in node.next_functions]
    return found


def _saved(node: Any) -> Iterator[torch.Tensor]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in names or ["saved_tensors"]:
        try:
            value = getattr(node, name, None)
        except RuntimeError:
            continue  # it was written in place, or is gone: backward says so
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


def _is_weight(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter)
