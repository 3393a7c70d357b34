"""What a write in place to a view costs backward, which fake tensors do not show.

Gradients come to what was written through the view's own function in an imagined pass. In a real one they pass by
strides, into memory of their own: one copy more. A Linear's output is such a view where its input has three dimensions,
and an activation in place after it the write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_AS_THEY_ARE = {"ViewBackward0", "TransposeBackward0", "TBackward0", "PermuteBackward0", "UnsqueezeBackward0"}
"""Backward of views that takes no memory; that of others takes what the strides would."""


class CopiedGradients(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], FakeTensor) else None
        if first is None or first.is_inference():
            return func(*args, **(kwargs or {}))
        before = first._version
        out = func(*args, **(kwargs or {}))
        if out is first and first._version != before:
            _copy_gradient(first)
        return out


def _copy_gradient(written: torch.Tensor) -> None:
    if written.requires_grad and written._is_view():
        node = written.grad_fn
        if node is not None and node.name() in _AS_THEY_ARE:
            written.register_hook(torch.clone)
