"""What an observer of an execution is told, and what it must answer."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ebbtide.intercept.kept import Kept
from ebbtide.intercept.runs import Unit


class Observer(Protocol):
    def enter(self, unit: Unit) -> None:
        """A module that owns parameters starts: they must be readable until `leave`."""

    def leave(self, unit: Unit) -> None:
        """The module is done, or its forward raised."""

    def read(self, run: int, outside: bool) -> None:
        """A parameter of `run` was read while its module was not running.

        It stays readable until `unread`, or, where it was read outside every module (`outside`), until
        something else needs its room.
        """

    def unread(self, run: int) -> None:
        """The module that read a foreign parameter is done."""

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """Autograd saves `tensor`: a handle to find it again, or None where it is not model data."""

    def keep(self, tensor: torch.Tensor) -> Kept | None:
        """Autograd saves what is no model data, and nobody computes it again: how it is kept, or None where the
        observer does not care."""

    def unpack(self, handle: Any) -> torch.Tensor:
        """Backward wants what `pack` described."""

    def gradient(self, parameter: int) -> None:
        """The gradient of a parameter (by index) has been accumulated into its `.grad`."""
