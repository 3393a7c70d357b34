"""What operators cost, whatever machine they run on: multiplications counted, bytes that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from ebbtide.planner.record import ATTENTION, CONVOLUTION, MATMUL, OTHER, Work

_aten = torch.ops.aten
_KINDS = {
    _aten.mm: MATMUL,
    _aten.addmm: MATMUL,
    _aten.bmm: MATMUL,
    _aten.baddbmm: MATMUL,
    _aten._scaled_mm: MATMUL,
    _aten.convolution: CONVOLUTION,
    _aten._convolution: CONVOLUTION,
    _aten.convolution_backward: CONVOLUTION,
}


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores and their sum over values; a mask saves nothing here, as in torch's own counts."""
    batch, heads, rows, width = query.shape
    columns, depth = key.shape[2], value.shape[3]
    return 2 * batch * heads * rows * columns * (width + depth)


def _attention_backward(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> int:
    """Five products where forward has two: the scores once more, and the gradients of all three."""
    batch, heads, rows, width = query.shape
    columns, depth = key.shape[2], value.shape[3]
    return 2 * batch * heads * rows * columns * (3 * width + 2 * depth)


def _grouped(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Rows of one side are dealt out among the matrices of the other: as many products as without groups."""
    if left.dim() == 3 and right.dim() == 2:
        return 2 * right.numel() * left.shape[1]
    return 2 * left.numel() * right.shape[-1]


_COUNTED: dict[Any, tuple[str, Callable[..., int]]] = {
    _aten._grouped_mm: (MATMUL, _grouped),
    _aten._scaled_dot_product_flash_attention_for_cpu: (ATTENTION, _attention),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (ATTENTION, _attention_backward),
}
"""Operators that torch's own registry lacks."""
_FREE = {_aten.detach, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.alias}
_GATHERS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index}
"""Operators that read of their first argument only what they give out."""
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work | None:
    """None where an operator costs nothing: a view, memory that nothing is written to."""
    packet = func._overloadpacket
    if func.is_view or packet in _FREE:
        return None
    written = _bytes(out)
    read = written if packet in _GATHERS else _bytes((args, kwargs))
    if packet in _COUNTED:
        kind, count = _COUNTED[packet]
        return Work(kind, count(*args, **kwargs), read + written)
    if packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        return Work(_KINDS.get(packet, ATTENTION), flops, read + written)
    if not written:
        return None
    return Work(OTHER, 0, read + written)


def _bytes(values: Any) -> int:
    """What is behind some tensors; an expanded one is no larger than its storage."""
    total = 0
    for value in tensors_in(values):
        if value.layout == torch.strided:
            total += min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
    return total


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results: torch's own walk does ten times the work."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif not isinstance(values, _PLAIN):
        yield from (leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor))
