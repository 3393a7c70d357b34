"""Parameters that are where their module computes, while no pass runs: who takes their memory is noted.

PyTorch counts a write into a parameter, but not one through `.data`, numpy or a storage. Such a write into a chunk that
leaves later would be lost without a word. So between passes a parameter that is in place wears a class that notes when
an alias of that kind is taken, with a checksum; before the next pass, or a read of the value, the bits are compared.
In a pass, and within `engine.resident()`, parameters have the class that they came with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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


class InPlace(nn.Parameter):
    """Worn between passes; it behaves as the parameter does."""

    _ebbtide_taken: Callable[[], None]
    """Told before an alias of the memory is given out."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ALIASES and type(args[0]) is InPlace:
                args[0]._ebbtide_taken()
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            made = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = made
        return made
