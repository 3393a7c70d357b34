"""Passes of which nobody need be told, for nothing moves.

Where the device is as large as the machine's memory allows, and either the only tier or has room for all, a pass that
went as planned before is let alone: hooks return at once, and gradients are taken in when backward is over. What the
tier held meanwhile is what the plan says. Whether the pass was the planned one, its gradients tell, and how many modules
ran; if not, the next is followed, and traced again.

Where there is a tier to go to, parameters are held where they are until the pass is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.intercept import Interceptor
from ebbtide.memory.ledger import Ledger
from ebbtide.plan.draft import Plan
from ebbtide.record import FORWARD
from ebbtide.run.traces import Known
from ebbtide.run.untold import Untold
from ebbtide.run.updates import Updates


class Resting:
    def __init__(self, interceptor: Interceptor, updates: Updates, ledger: Ledger, possible: bool) -> None:
        self._interceptor, self._updates, self._ledger = interceptor, updates, ledger
        self._untold = Untold(updates)
        self._possible = possible
        self._known: Known | None = None
        self._plan: Plan | None = None
        """That of the pass, where it rests."""
        self._offset = 0
        self._before: int | None = None
        """Bytes that were reserved when the pass's first backward began."""
        self._had_none: set[int] = set()
        self._arrived: set[int] = set()
        self._captured = 0
        self._held = False
        """Whether parameters may be pinned by a pass that rests."""

    @property
    def now(self) -> bool:
        """Whether this pass does."""
        return self._plan is not None

    def rule_out(self) -> None:
        """Not all gradients of a pass come in one backward, at its end: only who follows it knows what comes when."""
        self._possible = False

    def begin(self, known: Known | None, plan: Plan | None, offset: int) -> None:
        """A pass begins, at `offset` moments into the plan's iteration."""
        self.end()
        ready = known is not None and known.followed and not known.stale
        rests = self._possible and ready and plan is not None and not plan.take_over
        rests = rests and not self._updates.sparse and not self._interceptor.others_listen
        rests = rests and (self._ledger.device_alone or self._hold(plan))
        self._known, self._plan = (known, plan) if rests else (None, None)
        self._offset, self._before = offset, None
        self._captured = self._updates.captured
        self._arrived.clear()
        self._interceptor.unnoticed, self._interceptor.deaf = 0, False
        self._interceptor.rest(rests)

    def _hold(self, plan: Plan | None) -> bool:
        """Keeps parameters on the device, where all of them are and the plan has none leave; whether that is so. Until
        gradients are taken in they lie beside their chunks: that needs room for one chunk more."""
        data, room = self._updates.data, self._updates.executor.room
        if plan is None or plan.traffic or len(room.peers) != 1 or not all(data.bound):
            return False
        chunks = [data.computed(index) for index in range(len(data.bound))]
        spare = room.budget("device") - plan.highest
        if any(c.worked_on or c.move is not None or c.nbytes > spare for c in chunks):
            return False
        self._held = True  # first: whatever interrupts this, all of them are let go
        for chunk in chunks:
            chunk.pins += 1
        return True

    def end(self) -> None:
        """Chunks may move again, if they could: only `resident()` still has some."""
        if not self._held:
            return
        self._interceptor.rest(False)
        for index, residing in enumerate(self._updates.executor.places.residing):
            self._updates.data.computed(index).pins = residing
        self._held = False

    @contextmanager
    def reversing(self) -> Iterator[None]:
        """Around autograd's backward."""
        if self._plan is None:
            yield
            return
        self._look_around()
        try:
            self._interceptor.deaf = True
            self._untold.hand_out()
            yield
        finally:
            self._interceptor.deaf = False
            self._take_in(self._plan)

    def _look_around(self) -> None:
        """What is there before backward."""
        if self._captured != self._updates.captured:
            self.rule_out()  # another backward reaches these parameters within the pass
        if self._before is None:
            self._before = self._ledger.reserved["device"]
            self._had_none = {m for m, count in enumerate(self._updates.arrived) if not count}

    def _take_in(self, plan: Plan) -> None:
        assert self._before is not None
        room = self._updates.executor.room
        room.set_level(plan.levels[self._offset + len(plan.record.moments) - 1])
        self._arrived |= self._untold.take_in()
        self._captured = self._updates.captured
        self._ledger.look_back("device", self._before + self._highest(plan, self._arrived & self._had_none))

    def _highest(self, plan: Plan, new: set[int]) -> int:
        """Non-model data, and the gradients that were there by then. `new`: of parameters that had none."""
        coming = Counter[int]()
        for arrival in plan.record.arrivals:
            if arrival.parameter in new:
                coming[arrival.moment] += self._updates.gradient_bytes(arrival.parameter)
        highest = gradients = 0
        for moment in range(len(plan.record.moments)):
            gradients += coming[moment]
            highest = max(highest, plan.levels[self._offset + moment] + gradients)
        return highest

    def finish(self) -> None:
        """The pass is over."""
        self.end()
        known = self._known
        assert known is not None
        units = sum(moment.phase == FORWARD for moment in known.record.moments)
        arriving = {arrival.parameter for arrival in known.record.arrivals}
        taken = {member for member in arriving if self._updates.steps.group_of[member] >= 0}
        if self._arrived != taken or self._interceptor.unnoticed != units or not self._possible:
            known.stale, known.followed = True, False
