"""Where fake tensors differ from real ones: a workspace, a layout, a gradient's copy, a copy of a tensor.

LSTM layers on a CPU keep a workspace that the fake kernel says is empty; a layer of the same size is run on fewer steps
to see how it grows. Batch norms give what comes out a memory format, not the input's strides. A gradient that comes to
what was written through a view passes into memory of its own. `copy.deepcopy` of a fake tensor corrupts the process's
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
FEW, MORE = 16, 48
"""Steps: what is laid out in whole pages grows evenly from here on."""


def with_workspace(func: Any, args: Sequence[Any], out: Any) -> Any:
    """What an operator gave, with the workspace that it would have."""
    if func is not _LAYER or not isinstance(out[0], FakeTensor) or not torch.is_grad_enabled():
        return out
    shapes = tuple((tuple(one.shape), one.dtype) for one in args[:7])
    return (*out[:3], torch.empty(_bytes(shapes, (*args[7:8], *args[9:])), dtype=torch.uint8, device="cpu"))


@functools.lru_cache(256)
def _bytes(shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], settings: tuple[Any, ...]) -> int:
    steps = shapes[0][0][0]
    if steps <= MORE:
        return _measured(steps, shapes, settings)
    few, more = (_measured(count, shapes, settings) for count in (FEW, MORE))
    return more + -(-(more - few) * (steps - MORE) // (MORE - FEW))


def _measured(
    steps: int, shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], settings: tuple[Any, ...]
) -> int:
    (first, dtype), *others = shapes
    reverse, *rest = settings
    with _disable_current_modes(), torch.enable_grad():
        given = [torch.zeros((steps, *first[1:]), dtype=dtype, device="cpu")]
        given += [torch.zeros(shape, dtype=kind, device="cpu") for shape, kind in others]
        *_, workspace = _LAYER(*given, reverse, [], *rest)
        return workspace.untyped_storage().nbytes()


_aten = torch.ops.aten
_INPUT = {_aten.native_batch_norm.default: 0, _aten.native_batch_norm_backward.default: 1}
"""By operator: which argument is what is normalised."""


def as_laid_out(func: Any, args: Sequence[Any], out: Any) -> Any:
    """What an operator gave, as it would lie in memory."""
    place = _INPUT.get(func)
    if place is None or not isinstance(out[0], FakeTensor):
        return out
    return (torch.empty_like(out[0], memory_format=suggest_memory_format(args[place])), *out[1:])


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
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").zero_().requires_grad_(requires_grad)
