"""An engine's portion of device and host, where others train beside it.

Engines take turns: what one computes with can leave for another's pass, its optimizer state stays. So each plans with
what the state of the others leaves of the device, and with what they leave of the host. A portion only shrinks, or two engines would hand the same bytes to
and fro, with state moved in every step; it grows again when one of the others is gone. Where not even the least fits,
the others give up state until it does, and have smaller portions from then on. So do they in the middle of a pass where
nobody has foreseen what it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ebbtide.errors import BudgetError
from ebbtide.run.homes import Homes
from ebbtide.run.room import Room
from ebbtide.run.traces import Traces

Found = TypeVar("Found")


class Portion:
    def __init__(self, room: Room, homes: Homes, traces: Traces, fixed: bool) -> None:
        """`fixed`: ranks share the chunks, and must have the same plan whatever else each of them does."""
        self._room, self._homes, self._traces, self._fixed = room, homes, traces, fixed
        self._others = 0

    @property
    def bytes(self) -> int:
        return self._traces.settings.device

    def look(self) -> None:
        """A pass is about to begin: others may hold more of the device than when the last one did, or be gone."""
        before, self._others = self._others, len(self._room.peers) - 1
        if self._fixed or not max(before, self._others):
            return
        left, host = self._left(), self._room.budget("host")
        self._room.most_elsewhere = 0
        if self._others >= before:
            left, host = min(left, self.bytes), min(host, self._traces.settings.host)
        if (left, host) != (self.bytes, self._traces.settings.host):
            self._traces.settle(left, host)

    def _left(self) -> int:
        """What others leave: their state, and what they have where passes are interleaved."""
        elsewhere = max(self._room.most_elsewhere, self._room.elsewhere())
        return max(0, self._room.budget("device") - elsewhere)

    def widened(self, make: Callable[[], Found]) -> Found:
        """What can be made with the portion. Where it is too small, with a larger one that the others make room for."""
        while True:
            try:
                return make()
            except BudgetError as error:
                if self._fixed or not self._others or error.tier != "device" or not self._widen(error.short):
                    raise

    def _widen(self, short: int) -> bool:
        needed = self.bytes + short
        self._room.ask(lambda: needed - self._left())
        if self._left() < needed:
            return False
        self._traces.settle(needed)
        return True

    def give(self, short: int) -> None:
        """Another engine needs so much more of the device. State is at rest but in an engine's own updates, so it may
        leave while a pass of this engine is under way."""
        if not self._fixed:
            given = self._homes.give_up(short)
            self._traces.settle(max(0, self.bytes - given))

    def go_on(self) -> None:
        """A backward pass or an update begins. Of what others have in passes that began meanwhile the plan knows
        nothing: the next one will, this one goes on with less state."""
        self._room.begin_turn()
        if self._room.elsewhere() and self._room.course.plan is not None and not self._fixed:
            self._homes.give_up(self.bytes - self._left())
