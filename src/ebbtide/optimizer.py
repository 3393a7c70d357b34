"""The torch.optim face of the engine's updates: param groups and learning-rate schedulers work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebbtide.errors import UnsupportedError


class EngineOptimizer(torch.optim.Optimizer):
    """Holds the param groups. Its `step` is the engine's update; its state lives in chunks, not here."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        update: Callable[[], None],
        clear: Callable[[], None],
    ) -> None:
        self._update = update
        self._clear = clear
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UnsupportedError(
                "a closure would evaluate the model again inside the update; call engine.step()"
            )
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that are held; after a step there are none."""
        self._clear()
