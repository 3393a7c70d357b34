"""Products of matrices in half precision, on processors that have no instructions for them."""

from __future__ import annotations

import torch

_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def multiplies(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype on the processor as fast as it should. Where it does not, the
    gradient of a linear layer's input takes up to a hundred times as long as in fp32. A torch that cannot say so is
    trusted."""
    name = _ASKED.get(dtype)
    if name is None or not torch.backends.mkldnn.is_available():
        return True
    asked = getattr(torch.ops.mkldnn, name, None)
    return asked is None or bool(asked())


def fast_dtype() -> torch.dtype:
    """What the processor should compute in: bf16 unless that has to be emulated."""
    return torch.bfloat16 if multiplies(torch.bfloat16) else torch.float32
