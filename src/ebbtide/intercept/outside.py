"""Modules of the model that are called by themselves, outside every pass: no step would train them.

Where weights are needed is known for passes only, and so is what activations take. A loss that comes from such a call is
refused when backward reaches it, before any gradient.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.backend.real import unreal
from ebbtide.errors import UnsupportedError


def refuse_backward(module: nn.Module, output: Any) -> None:
    """`module` gave `output`; its module is not known to be in a pass."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0 or unreal():
        return  # a checkpoint computes again, or nobody can go back
    for tensor in tree_iter(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_Refusal(type(module).__name__))


class _Refusal:
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            f"the loss comes from a {self._kind} that was called by itself, outside a pass of the engine's, so its "
            "gradients would be part of no step. Call engine(...) or the module, or run what you call as the pass: "
            "engine.run(function, *args), as in engine.run(model.encode, x)"
        )
