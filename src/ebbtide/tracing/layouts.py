"""How the results of batch norms lie in memory, which torch's fake kernels say otherwise.

They give a transposed input's strides to what comes out. The real ones give it a memory format: what follows is another
graph, with copies where views were imagined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_INPUT = {_aten.native_batch_norm.default: 0, _aten.native_batch_norm_backward.default: 1}
"""By operator: which argument is what is normalised."""


def as_laid_out(func: Any, args: Sequence[Any], out: Any) -> Any:
    """What an operator gave, as it would lie in memory."""
    place = _INPUT.get(func)
    if place is None or not isinstance(out[0], FakeTensor):
        return out
    return (torch.empty_like(out[0], memory_format=suggest_memory_format(args[place])), *out[1:])
