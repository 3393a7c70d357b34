"""What a model's data asks of the packages above it, handed in by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class PendingValues(Protocol):
    """Updates that may not have reached the values yet."""

    @property
    def ahead_of_passes(self) -> bool:
        """Whether weights change while a pass is under way: a graph may have older ones (lock-free)."""

    def settle_values(self) -> None: ...


class FollowsWrites(Protocol):
    """Who acts on what the user writes into parameters in place."""

    def adopt(self, index: int) -> None:
        """A chunk that ranks share was written: this rank's slice of it counts."""

    def follow(self, index: int, members: Sequence[int]) -> None:
        """These of a chunk's parameters were written: their masters follow."""


class HasOthersElements(Protocol):
    """Ranks that share the chunks."""

    def collect(self, member: int, flat: torch.Tensor) -> None: ...


class StaysInPlace(Protocol):
    """Who counts on parameters that stay where they are."""

    def stop(self) -> None: ...
