"""What movement asks of those that work beside it, without knowing them: pending updates, and activations that leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ebbtide.planner.activation_trips import ActivationTrips
from ebbtide.tracing.hooks.observer import SavedTensor
from ebbtide.tracing.live_recorder import Recorder


class PendingUpdates(Protocol):
    """Updates that go on beside the computation: each has its chunks to itself until it is settled."""

    def collect(self) -> None:
        """Settles those that are over."""

    def moment(self) -> None:
        """A moment begins."""

    def settle_oldest(self, ready: bool = False) -> bool:
        """Waits for one; False where none is pending. `ready`: only for one that takes no room first."""

    def bring_all(self) -> None:
        """Has what they work on come now: soon there may be less room."""

    def flush(self) -> None:
        """Waits for all of them."""

    @property
    def ahead_of_passes(self) -> bool:
        """Whether passes do not wait for updates (lock-free)."""

    def halt(self) -> None:
        """Waits for all of them, and nothing is updated lock-free until the next pass begins."""


class TakesGradients(Protocol):
    """Who gets gradients, and has lent parameters' space to them."""

    def capture(self, member: int) -> None:
        """A gradient is in `.grad`; its moment has begun."""

    def reclaim(self, members: Sequence[int]) -> None:
        """Parameters are about to be used."""


class Gathers(Protocol):
    """Who brings chunks that ranks share to the device as a whole."""

    def gather(self, index: int) -> None: ...


class GivesRoom(Protocol):
    """Who can make room on the device, or on the host, where others need it."""

    def give_room(self, short: int) -> bool:
        """Whether there was something to give."""


class LeavingActivations(Protocol):
    """Saved activations that leave the device between forward and backward."""

    surprise: str
    """What was saved otherwise than planned."""
    late: int
    """Bytes that should have left by now."""

    def foresee(self, plan: ActivationTrips | None) -> None: ...

    def begin(self, plan: ActivationTrips | None, recorder: Recorder | None) -> None: ...

    def keep(self, tensor: torch.Tensor) -> SavedTensor | None: ...

    def moment(self) -> None: ...

    def depart(self, place: int, room: int) -> int:
        """Those that leave by a moment are gone; gives the bytes that are late."""

    def arrive(self, place: int) -> None: ...

    def leave_plan(self) -> None: ...

    def finish(self) -> None: ...
