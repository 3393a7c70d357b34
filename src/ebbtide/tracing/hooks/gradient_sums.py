"""A weight that several modules use gets its gradient in parts, which autograd adds up.

It adds a part to the sum so far in place where nobody else holds that. A linear layer's part is a view of what a product
gave, which holds it: the sum goes to memory of its own, and for a moment there are three tensors of an embedding's
size. So such parts are handed on as tensors of their own, on the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch

from ebbtide.devices.pool import users

NEAR = 32
"""Operators that are looked at, from a module's outputs on: what it does with a weight is among its last."""

_MARK = "_ebbtide_sum"
_ALONE = users(torch.empty(1, device="cpu"))
"""Of memory that one tensor has."""


def own_parts(outputs: Iterable[torch.Tensor], parameters: Collection[torch.Tensor]) -> None:
    """The parts of the gradients of `parameters` that come from here will be tensors of their own."""
    wanted = {id(parameter) for parameter in parameters}
    nodes = deque(output.grad_fn for output in outputs if output.grad_fn is not None)
    seen = set(nodes)
    for _ in range(NEAR):
        if not nodes:
            return
        node = nodes.popleft()
        # In the graph's order: an imagined pass looks at the same ones.
        following = dict.fromkeys(other for other, _ in node.next_functions if other is not None)
        if any(id(getattr(other, "variable", None)) in wanted for other in following):
            node.register_hook(_on_their_own)
        nodes.extend(other for other in following if other not in seen)
        seen.update(following)


def _on_their_own(gradients: Any, _: Any) -> Any:
    if torch.is_grad_enabled():
        return None  # their own gradient is wanted
    return tuple(_on_its_own(part) if isinstance(part, torch.Tensor) else part for part in gradients)


def _on_its_own(part: torch.Tensor) -> torch.Tensor:
    if part.layout is not torch.strided or not part._is_view():
        return part
    own = part.detach()
    setattr(own, _MARK, True)
    return own


def carried_out(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator's result under a dispatch mode. There autograd adds nothing in place; where it would without, it is
    done here."""
    return args[0].add_(args[1]) if _adds_a_part(func, args) else func(*args, **kwargs)


def _adds_a_part(func: Any, args: Any) -> bool:
    if func is not torch.ops.aten.add.Tensor or not hasattr(args[0], _MARK):
        return False
    if users(args[0]) > _ALONE:
        return False  # the node gave a view of what others want: h + w.view(...) gives the gradient of h
    node = torch._C._current_autograd_node()
    # Where a gradient arrives, all parts are together: what a hook of the user's adds is no part.
    return node is not None and not hasattr(node, "variable")
