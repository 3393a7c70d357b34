"""What a pass traced on a CPU takes on another device: a small table of rules.

Tensors are the same but for what kernels keep and use inside themselves. The table has what is known to matter for
transformers; it has been held against CPU runs only, so plans for CUDA say how far it may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_aten = torch.ops.aten
Temporary = Callable[..., int]
"""From an operator's arguments, bytes that it uses beside them and its results."""


@dataclass(frozen=True)
class Rules:
    granule: int
    """The allocator rounds what it is asked for up to multiples of this."""
    temporaries: Mapping[Any, Temporary]
    note: str


def _attention_backward(_: torch.Tensor, query: torch.Tensor, *__: Any, **___: Any) -> int:
    """FlashAttention sums the query's gradient up in fp32, rows padded to 128 and widths to 32, and keeps a number a
    row beside."""
    batch, heads, rows, width = query.shape
    padded = math.ceil(rows / 128) * 128
    return 4 * batch * heads * padded * (math.ceil(width / 32) * 32 + 1)


def _embedding_backward(gradient: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> int:
    """Indices are sorted: they, their order, and the sort's own buffers, in 64 bits."""
    return 4 * 8 * indices.numel()


CUDA = Rules(
    512,
    {
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        _aten.embedding_dense_backward: _embedding_backward,
    },
    "traced on a CPU for a CUDA device: non-model bytes may be off by 5 % (other kernels; not yet held against a card)",
)
RULES: Mapping[str, Rules] = {"cuda": CUDA}
