"""Saved tensors that are no model data.

Note [what autograd leaves to hooks]: where there are hooks it neither looks at a saved tensor's version nor
saves an operator's own output without the operator. So a tensor is kept detached, which shares its version, and
the version is compared when backward wants it.
"""

from __future__ import annotations

import torch


class Kept:
    """A saved tensor that is no model data."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        refuse_modified(self._tensor, self._version)
        return self._tensor


def refuse_modified(tensor: torch.Tensor, version: int) -> None:
    """What autograd says of a tensor that was written after it was saved."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead"
        )
