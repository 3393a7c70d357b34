"""By which plan the next pass runs: one that is known, one made from an imagined pass, or none yet."""

from __future__ import annotations

import weakref

from ebbtide.config import Config
from ebbtide.errors import BudgetError
from ebbtide.plan.draft import Plan
from ebbtide.plan.uses import least_room
from ebbtide.run.executor import Executor
from ebbtide.run.homes import Homes
from ebbtide.run.imagining import Imagining
from ebbtide.run.portion import Portion
from ebbtide.run.sharing import Sharing
from ebbtide.run.streaming import Streaming
from ebbtide.run.traces import Known, Traces
from ebbtide.runtime.planning.call import Call, with_sizes
from ebbtide.units import format_size


class Planning:
    def __init__(
        self,
        config: Config,
        executor: Executor,
        traces: Traces,
        homes: Homes,
        streaming: Streaming,
        imagining: Imagining,
        sharing: Sharing | None,
    ) -> None:
        self._room, self._course = executor.room, executor.course
        self._traces, self._homes, self._streaming = traces, homes, streaming
        self._imagining, self._sharing = imagining, sharing
        self.portion = Portion(self._room, homes, traces, fixed=sharing is not None)
        self._room.give_state = weakref.WeakMethod(self.portion.give)
        self._in_backward = config.updates == "in-backward"
        self.roomy = self._room.ledger.device_alone and config.device.memory == "auto"
        """The device has all, and as much as there is."""
        self.needs_slices = False
        """Whether some batch had no plan with whole chunks exchanged between ranks."""

    def find(self, call: Call) -> Known | None:
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

    def _fits(self, known: Known) -> bool:
        return self._traces.fits(known, self._traces.settings.device)

    def begin_together(self, sharing: Sharing, known: Known | None, micro: int) -> None:
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

    def plan(self, known: Known) -> Plan:
        """With what others leave of the tiers by now."""
        self.portion.look()
        return self.portion.widened(lambda: self._traces.plan(known))

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

    def adopt(self, known: Known) -> Plan:
        """Brings optimizer state to the plan's homes. An imagined plan that does not fit is no refusal yet
        where the device could still hold it by demand: then the error says so at once."""
        plan = self.plan(known)
        if plan is not self._course.plan or not self._homes.as_in(plan):
            self._homes.follow(plan)
        self._homes.tidy(plan)
        self._streaming.expect(plan.update_order(self._in_backward, self._traces.shape.parameter_chunk))
        return plan
