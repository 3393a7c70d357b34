"""Dynamic loss scaling for fp16: skip and back off where gradients overflow, grow after a quiet time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LEAST = 2.0**-14
"""A smaller one would make numbers of fp16 vanish that are not small."""


@dataclass
class LossScaler:
    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    quiet: int = 0
    """Steps since the scale last changed."""

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.scale = max(self.scale * self.backoff, LEAST)
            self.quiet = 0
            return
        self.quiet += 1
        if self.quiet == self.interval:
            self.scale = min(self.scale * self.growth, 2.0**24)
            self.quiet = 0

    @property
    def exhausted(self) -> bool:
        """It cannot be lowered any more: what overflows now is not finite in itself."""
        return self.scale <= LEAST

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, value)
