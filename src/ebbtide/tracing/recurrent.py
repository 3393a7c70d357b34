"""The workspace of LSTM layers on a CPU, which torch's fake kernel says is empty.

It is as large as several of the layer's outputs, and kept for backward. How large only the library that computes such a
layer knows: a layer of the same size is run on fewer steps, and what it takes grows with their number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
FEW, MORE = 16, 48
"""Steps: what is laid out in whole pages grows evenly from here on."""


def with_workspace(func: Any, args: Sequence[Any], out: Any) -> Any:
    """What an operator gave, with the workspace that it would have."""
    if func is not _LAYER or not isinstance(out[0], FakeTensor) or not torch.is_grad_enabled():
        return out
    shapes = tuple((tuple(one.shape), one.dtype) for one in args[:7])
    return (*out[:3], torch.empty(_bytes(shapes, (*args[7:8], *args[9:])), dtype=torch.uint8))


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
        given = [torch.zeros((steps, *first[1:]), dtype=dtype)]
        given += [torch.zeros(shape, dtype=kind) for shape, kind in others]
        *_, workspace = _LAYER(*given, reverse, [], *rest)
        return workspace.untyped_storage().nbytes()
