"""An engine's portion of device and host, where others train beside it.

Engines take turns: what one computes with can leave for another's pass, its optimizer state stays. So each plans with
what the state of the others leaves of the device, and with what they leave of the host. That only shrinks, or two
engines would hand the same bytes to and fro, with state moved in every step; it grows again when one of the others is
gone. Where not even the least fits, the others give up state until it does, and have less from then on. So do they in
the middle of a pass where nobody has foreseen what it takes. Where passes are interleaved, what others had in them
beside the last one is left to them in the next, too.
"""

from __future__ import annotations

import weakref
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
        self._others: tuple[weakref.ref[Room], ...] = ()
        self._device, self._host = traces.settings.device, traces.settings.host
        """What others' state leaves, at most."""
        self._halved = False
        self._elsewhere = 0
        """What others have in passes that are under way beside those of this engine."""

    def look(self) -> None:
        """A pass is about to begin: others may hold more of the device than when the last one did, or be gone."""
        before = [one() for one in self._others]
        here = [peer for peer in self._room.peers if peer is not self._room]
        self._others = tuple(map(weakref.ref, here))
        if self._fixed or not (before or here):
            return
        device, host = self._room.budget("device"), self._room.budget("host")
        gone = any(peer not in here for peer in before)
        self._device = device if gone else min(device, self._device)
        self._host = host if gone else min(host, self._host)
        seen, self._room.most_elsewhere = self._room.most_elsewhere, 0
        self._elsewhere = max(0 if gone else seen, self._room.elsewhere())
        self._settle()

    def widened(self, make: Callable[[], Found]) -> Found:
        """What can be made with the portion. Where it is too small, with a larger one that the others make room for."""
        while True:
            try:
                return make()
            except BudgetError as error:
                if error.tier != "device" or not (self._stretch(error.short) or self._widen(error.short)):
                    raise

    def _stretch(self, short: int) -> bool:
        """Where the budget is found: as much as a batch needs, and where that is asked for half of the model data."""
        ledger = self._room.ledger
        if ledger.wish == "half" and not self._halved:
            self._halved = True
            half = (sum(self._traces.shape.sizes) + sum(self._traces.shape.state_bytes)) // 2
            stretched = ledger.stretch("device", short + half) or ledger.stretch("device", short)
        else:
            stretched = ledger.stretch("device", short)
        if not stretched:
            return False
        self._device = self._room.budget("device")
        self._settle()
        return True

    def _widen(self, short: int) -> bool:
        if self._fixed or not self._others:
            return False
        needed = self._traces.settings.device + self._elsewhere + short
        self._room.ask(lambda: needed - self._room.budget("device"))
        if self._room.budget("device") < needed:
            return False
        self._device = needed
        self._settle()
        return True

    def give(self, short: int) -> None:
        """Another engine needs so much more of the device. State is at rest but in an engine's own updates, so it may
        leave while a pass of this engine is under way."""
        if not self._fixed:
            self._device = max(0, self._device - self._homes.give_up(short))
            self._settle()

    def go_on(self) -> None:
        """A backward pass or an update begins. Of what others have in passes that began meanwhile the plan knows
        nothing: where its moments cannot have the room that they need at least, this pass goes on with less state."""
        self._room.begin_turn()
        plan = self._room.course.plan
        if self._room.elsewhere() and plan is not None and not self._fixed:
            left = self._room.budget("device") - self._room.elsewhere()
            self._homes.give_up(plan.static_bytes + plan.in_use - left)

    def _settle(self) -> None:
        device = max(0, self._device - self._elsewhere)
        if (device, self._host) != (self._traces.settings.device, self._traces.settings.host):
            self._traces.settle(device, self._host)
