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
        self.refuse_modified(tuple(self._tensor.shape))
        return self._tensor

    def refuse_modified(self, shape: tuple[int, ...]) -> None:
        """What autograd says of a tensor that was written after it was saved."""
        version = self._tensor._version
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(shape)}] is at version {version}; expected version {self._version} "
                "instead"
            )
