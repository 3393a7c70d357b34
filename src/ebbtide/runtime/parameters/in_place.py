"""Parameters that are where their module computes, while no pass runs: who takes their memory is noted.

PyTorch counts a write into a parameter, but not one through `.data`, numpy or a storage. Such a write into a chunk that
leaves later would be lost without a word. So between passes a parameter that is in place wears a class that notes when
an alias of that kind is taken, with a checksum; before the next pass, or a read of the value, the bits are compared.
In a pass, and within `engine.resident()`, parameters have the class that they came with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

_ALIASES = frozenset(
    (
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.__dlpack__,
    )
)


_told: dict[int, Callable[[], None]] = {}
"""By parameter (its number as an object): who is told before its memory is given out."""


def tell(parameter: nn.Parameter, told: Callable[[], None]) -> None:
    """From now on the parameter wears this class, until it is taken off."""
    _told[id(parameter)] = told
    parameter.__class__ = InPlace


def forget(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        _told.pop(id(parameter), None)


def _unmasked(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call with parameters of the class that they came with: torch 2.11's fake mode takes no other. The
    parameters wear theirs again when the call returns."""
    worn: list[Any] = [one for one in tree_iter((args, kwargs)) if type(one) is InPlace]
    for one in worn:
        one.__class__ = nn.Parameter
    try:
        return func(*args, **kwargs)
    finally:
        for one in worn:
            one.__class__ = InPlace


class InPlace(nn.Parameter):
    """Worn between passes; it behaves as the parameter does."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ALIASES and type(args[0]) is InPlace:
                told = _told.get(id(args[0]))
                if told is not None:
                    told()
            if torch._C._len_torch_dispatch_stack():
                return _unmasked(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            made = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = made
        return made
