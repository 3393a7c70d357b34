"""What a session asks for the values of tensors on the meta device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Source(Protocol):
    def value(self, name: str) -> torch.Tensor | None:
        """A managed parameter's value, asked for once; None where the parameter holds it itself."""

    def fill(self) -> None:
        """Gives every tensor outside the chunks its value and memory."""

    def undo(self) -> None:
        """The take-over failed: what `fill` did is taken back."""


def apart(value: torch.Tensor) -> torch.Tensor:
    """The same memory with a version of its own: a view has that of what it is a view of, and all placeholders are views
    of one."""
    found = torch.empty(0, dtype=value.dtype, device=value.device)
    found.data = value
    return found


def replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor another's memory, device included, and leaves it the same object; `data` cannot do that."""
    if type(value) is torch.Tensor:
        value = apart(value)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__class__ = type(tensor)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)
