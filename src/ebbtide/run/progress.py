"""How far lock-free updates are, by chunk: plain books, kept by the thread that issues the computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbtide.backend.cpu import CopyEvent
from ebbtide.memory.chunk import Chunk


@dataclass(slots=True, eq=False)
class Waiting:
    """A sum of gradients that no update has consumed yet."""

    memory: Chunk
    scale: float
    """What the sum is multiplied with, to be that of the gradients."""
    steps: dict[int, int] = field(default_factory=dict)
    """By parameter, how many steps are in the sum."""
    count: int = 0
    """Steps that the chunk had gradients in."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The optimizer's settings in the newest of them."""
    added: list[CopyEvent] = field(default_factory=list)
    """The ends of additions."""


@dataclass(slots=True, eq=False)
class Progress:
    """Of one chunk. Gradients are counted by steps: `produced` is what the others add up to once nothing is pending."""

    waiting: Waiting | None = None
    running: bool = False
    values: Chunk | None = None
    """New ones that the computation has not taken over."""
    writes: int = 0
    """The user's writes in place that they, or those that are being made, know of."""
    produced: int = 0
    applied: int = 0
    dropped: int = 0
    """Lost with an update that failed."""
    visible: int = 0
    """Of those applied, how many are in the values that the computation has."""
    updates: int = 0
