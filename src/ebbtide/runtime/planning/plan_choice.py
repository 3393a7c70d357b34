"""By which plan the next pass runs, and with which share of the budget where several engines have one.

Engines take turns: chunks that one computes with leave for another's pass, optimizer state stays. So each plans with
what the others' state leaves of the device and of the host. A share only shrinks, or two engines would hand the same
bytes to and fro in every step; it grows again when one of the others is gone. Where not even the least fits, the others
give up state until it does, and have less from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from ebbtide.config import Config
from ebbtide.errors import BudgetError
from ebbtide.planner.plans import Plan
from ebbtide.planner.uses import least_room
from ebbtide.runtime.distributed.gather import ChunkSharing
from ebbtide.runtime.movement.eviction import STATE, Room
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.movement.state_placement import StatePlacement, StateStreaming
from ebbtide.runtime.planning.calls import Call, with_sizes
from ebbtide.runtime.planning.plan_cache import KnownInput, PlanCache
from ebbtide.runtime.planning.tracer import SymbolicPasses
from ebbtide.units import format_size

Found = TypeVar("Found")


class BudgetShare:
    def __init__(self, room: Room, homes: StatePlacement, traces: PlanCache, fixed: bool) -> None:
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
        seen = self._room.claims.take_most_elsewhere()
        self._elsewhere = max(0 if gone else seen, self._room.claims.elsewhere())
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

    def give_room(self, short: int) -> bool:
        """Another engine needs so much more of the device. State is at rest but in an engine's own updates, so it may
        leave while a pass of this engine is under way."""
        if not self._fixed:
            self._device = max(0, self._device - self._homes.give_up(short))
            self._settle()
        return not self._fixed

    def go_on(self) -> None:
        """A backward pass or an update begins. Of what others have in passes that began meanwhile the plan knows
        nothing: where its moments cannot have the room that they need at least, this pass goes on with less state."""
        self._room.begin_turn()
        plan = self._room.cursor.plan
        if self._room.claims.elsewhere() and plan is not None and not self._fixed:
            left = self._room.budget("device") - self._room.claims.elsewhere()
            self._homes.give_up(plan.static_bytes + plan.in_use - left)

    def _settle(self) -> None:
        device = max(0, self._device - self._elsewhere)
        if (device, self._host) != (self._traces.settings.device, self._traces.settings.host):
            self._traces.settle(device, self._host)


class PlanChoice:
    def __init__(
        self,
        config: Config,
        room: Room,
        cursor: PlanCursor,
        traces: PlanCache,
        homes: StatePlacement,
        streaming: StateStreaming,
        imagining: SymbolicPasses,
        sharing: ChunkSharing | None,
    ) -> None:
        self._room, self._cursor = room, cursor
        self._traces, self._homes, self._streaming = traces, homes, streaming
        self._imagining, self._sharing = imagining, sharing
        self.portion = BudgetShare(self._room, homes, traces, fixed=sharing is not None)
        self._room.add_giver(STATE, self.portion)
        self._in_backward = config.updates == "in-backward"
        self.roomy = self._room.ledger.device_alone and config.device.memory == "auto"
        """The device has all, and as much as there is."""
        self.needs_slices = False
        """Whether some batch had no plan with whole chunks exchanged between ranks."""

    def find(self, call: Call) -> KnownInput | None:
        """What is known of a batch like this one, or of larger ones. Where that is nothing, a symbolic trace, so that
        even the first iteration has a plan; not needed where all is resident."""
        known = self._traces.find(call.signature)
        if known is not None and (self.roomy or not known.recalled or self._fits(known)):
            return known
        self._traces.forget(call.signature)
        if not self.roomy:
            self._compare(call)
        known = self._traces.cover(call.signature, whatever=self.roomy)
        if self.roomy or (known is not None and self._fits(known)):
            return known
        larger = self._resized(call, self._traces.outgrown(call.signature))
        if larger is not None:
            record = self._imagining.imagine(larger)
            if record is None:
                self._traces.cannot_grow(call.signature)
            else:
                self._traces.foresee(record)
            known = self._traces.cover(call.signature)
            if known is not None and self._fits(known):
                return known
        record = self._imagining.imagine(call)
        return None if record is None else self._traces.foresee(record)

    def _compare(self, call: Call) -> None:
        """Once for a kind of input: whether the numbers in it make a difference."""
        other = self._resized(call, self._traces.to_compare(call.signature))
        if other is not None:
            self._traces.compare(call.signature, self._imagining.imagine(other))

    def _resized(self, call: Call, sizes: tuple[tuple[int, ...], ...] | None) -> Call | None:
        return None if sizes is None else with_sizes(call, sizes, self._room.store.backend.device)

    def _fits(self, known: KnownInput) -> bool:
        return self._traces.fits(known, self._traces.settings.device)

    def begin_together(self, sharing: ChunkSharing, known: KnownInput | None, micro: int) -> None:
        """Where some rank has no plan, gradients are exchanged in slices. Batches that need it take turns with others:
        one is enough for all that follow."""
        reductions, device = sharing.reductions, self._room.budget("device")
        extra = reductions.extra()
        whole = device - extra if reductions.in_slices else device
        short = known is None and extra > 0 and not self.roomy
        if known is not None and extra and not self._traces.fits(known, whole):
            short = self.needs_slices = self.needs_slices or self._traces.fits(known, whole + extra)
        in_slices = sharing.begin(micro, short or self.needs_slices)
        if in_slices != reductions.in_slices:
            reductions.go(in_slices)
            self._traces.settle(self._room.budget("device"))

    def plan(self, known: KnownInput) -> Plan:
        """With what others leave of the tiers by now."""
        self.portion.look()
        try:
            return self.portion.widened(lambda: self._traces.plan(known))
        except BudgetError:
            if not known.beyond:
                raise
            return self._traces.plan(known, bare=True)

    def hold(self, plan: Plan, count: int) -> None:
        """A pass by this plan finds so many bytes of outputs of passes before, most likely until forward is over. State
        leaves for them where nothing else can."""
        if count:
            length = len(plan.record.moments)
            forward = length if plan.record.forward < 0 else plan.record.forward
            levels = [
                level + (count if place < length * plan.accumulate and place % length <= forward else 0)
                for place, level in enumerate(plan.levels)
            ]
            needed = plan.static_bytes + least_room(levels, self._traces.shape.sizes, plan.uses)
            self._make_room(needed, count)
        self._room.hold(count)

    def _make_room(self, needed: int, held: int) -> None:
        budget = self._room.budget("device")
        short = needed - budget
        if short > 0 and self._sharing is None:
            short -= self._homes.give_up(short)
        if short > 0 and not self._room.ledger.stretch("device", short):
            raise BudgetError(
                f"device: this iteration needs at least {format_size(budget + short)}, with {format_size(held)} of "
                f"outputs of passes before that are still held; {format_size(budget)} are there",
                tier="device",
                short=short,
                advice=f"let go of them (del out), or raise device.memory by {short} bytes",
            )

    def adopt(self, known: KnownInput) -> Plan:
        """Brings optimizer state to the plan's homes. An imagined plan that does not fit is no refusal yet
        where the device could still hold it by demand: then the error says so at once."""
        plan = self.plan(known)
        if plan is not self._cursor.plan or not self._homes.as_in(plan):
            self._homes.follow(plan)
        self._homes.tidy(plan)
        chunks = self._traces.shape.parameter_chunk
        self._streaming.expect(lambda: plan.update_order(self._in_backward, chunks))
        return plan
