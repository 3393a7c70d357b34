"""Copies of tensors in an imagined pass: torch copies and pickles memory that a fake tensor does not have.

`copy.deepcopy` of one corrupts the process's memory, and of a real one while a fake mode is on as well.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode


class ImaginedCopies(TorchFunctionMode):
    """Answers `copy.deepcopy` of a tensor with a clone, and pickling with its shape."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._safe = torch.serialization.safe_globals([_blank])
        self._safe.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._safe.__exit__(*raised)
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return _copied(*args, **(kwargs or {}))
        if func is torch.Tensor.__reduce_ex__:
            tensor = args[0]
            return _blank, (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
        return func(*args, **(kwargs or {}))


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) in memo:
        found: torch.Tensor = memo[id(tensor)]
        return found
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = _copied(tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


def _blank(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype).zero_().requires_grad_(requires_grad)
