"""Follows an iteration: makes chunks resident when they are accessed, and acts on the plan's triggers.

The plan is a hint. Each event is compared with the trace; while they agree, the plan's moves are triggered and
evictions use its next uses. Where they do not, access on demand goes on alone, and the iteration is traced
again next time. Note [who is in use]: forward pins chunks from a module's start to its end. In backward
there is no such end: an operator that asked for a weight holds a view of it, so a chunk stays in use
while its storage has more users than we gave it; the next event finds it released.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from ebbtide.devices.profiler import in_profile, profiled
from ebbtide.devices.real_memory import on_real_memory
from ebbtide.memory.chunk import Chunk, Lease
from ebbtide.memory.journal import EBBTIDE, GRADIENTS
from ebbtide.memory.links import SSD_READ
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import BACKWARD, FORWARD, GRADIENT, UPDATE, event
from ebbtide.planner.shape import WHOLE
from ebbtide.planner.states import RunStates, State
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import IDLE, REVERSING, RUNNING, PlanCursor
from ebbtide.runtime.movement.protocols import PendingUpdates, TakesGradients
from ebbtide.runtime.parameters.places import SavedWeight
from ebbtide.tracing.hooks import Unit
from ebbtide.tracing.hooks.observer import SavedTensor
from ebbtide.tracing.live_recorder import Recorder

STRIDE = 4096
"""Room for what is saved beyond a plan is made for so many bytes at once, at least."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def told(hook: Hook) -> Hook:
    """What PyTorch tells the executor, in the midst of the user's operators: on real memory, and in the journal."""
    acts = on_real_memory(hook)

    @wraps(hook)
    def called(self: Executor, *args: Any, **kwargs: Any) -> Any:
        if profiled():
            with in_profile(f"{hook.__name__} {self._subject(hook.__name__, args[0])}"):
                return noted(self, *args, **kwargs)
        return noted(self, *args, **kwargs)

    def noted(self: Executor, *args: Any, **kwargs: Any) -> Any:
        if not self.journal.on:
            return acts(self, *args, **kwargs)
        self.journal.enter(EBBTIDE)
        try:
            return acts(self, *args, **kwargs)
        finally:
            self.journal.leave()

    return called  # type: ignore[return-value]


class Executor:
    """The interceptor's observer."""

    def __init__(
        self, places: FetchOnDemand, cursor: PlanCursor, updates: PendingUpdates, gradients: TakesGradients
    ) -> None:
        self.data, self.store, self.ledger = places.data, places.store, places.store.ledger
        self.places, self.room, self.cursor = places, places.room, cursor
        self._updates, self._gradients = updates, gradients
        self.journal = self.store.traffic.journal
        self.states = RunStates(self.data.run_names)
        self.lock = threading.RLock()
        self.recorder: Recorder | None = None
        self._wanted: list[tuple[Chunk, bool]] = []
        """Moves that the plan has for chunks that are being updated: (chunk, whether it comes)."""
        self._leases: dict[int, list[Lease]] = {}
        """By run that is in use: its chunks are."""
        self._reversing: list[int] = []
        self.packed = 0
        """Bytes of what autograd has saved in this pass but for weights, each as often as it was."""
        self._most = sys.maxsize
        """And how many there were, at most, in those that the plan is from."""
        self._planned = 0
        self.outgrown = False
        """Whether there were more in this one."""
        self._together = self.data.gradients_together()
        """By run of a compiled block: bytes of the gradients that its backward gives at once."""

    # -- events ---------------------------------------------------------------------------------------

    @told
    def enter(self, unit: Unit) -> None:
        with self.lock:
            self._tick(event(FORWARD, unit.index))
            acquired: list[int] = []
            try:
                for run in unit.runs:
                    self._acquire(run, FORWARD)
                    acquired.append(run)
                    if self.recorder is not None and run in self._together:
                        self.recorder.block(run)
            except BaseException:
                for run in acquired:
                    self._release(run, State.HOLD_AFTER_FWD)
                raise

    @told
    def leave(self, unit: Unit) -> None:
        with self.lock:
            for run in unit.runs:
                if self.recorder is not None and run in self._together:
                    self.recorder.block_over(run)
                self._release(run, self._after_forward())

    @told
    def read(self, run: int, outside: bool) -> None:
        with self.lock:
            if outside:
                # Nobody says when the reader is done: the value is right now, and the chunk may go later.
                self._acquire(run, FORWARD)
                self._release(run, self._after_forward())
                return
            self._tick(event(BACKWARD, run))
            self._acquire(run, FORWARD)

    @told
    def unread(self, run: int) -> None:
        with self.lock:
            self._release(run, self._after_forward())

    def pack(self, tensor: torch.Tensor) -> SavedWeight | None:
        weight = self.data.locate(tensor)
        if weight is None and self.cursor.phase != IDLE:
            self.packed += tensor.numel() * tensor.itemsize
            if self.packed > self._most:
                self._outgrow()
            if self._together and self.recorder is not None:
                self.recorder.note(tensor)
        return weight

    @on_real_memory
    def _outgrow(self) -> None:
        """More is saved than in any pass that the plan is from, for all that the events are the same: tokens that a mask
        has chosen, autocast in some steps."""
        with self.lock:
            plan = self.cursor.plan
            if plan is None:
                return
            if self.cursor.on_track:
                self.leave_track("more was saved for backward than planned")
                self.outgrown = True
            self._most = self.packed + max(self.packed >> 6, STRIDE)
            self.room.raise_level(max(plan.levels, default=0) + self._most - self._planned, guess=True)

    def keep(self, tensor: torch.Tensor) -> SavedTensor | None:
        if self.room.activations is None or self.cursor.phase != RUNNING:
            return None
        with self.lock:
            kept = self.room.activations.keep(tensor)
            if self.room.activations.surprise and self.cursor.on_track:
                self.leave_track(self.room.activations.surprise)
            return kept

    @told
    def unpack(self, handle: SavedWeight) -> torch.Tensor:
        with self.lock:
            new = handle.run not in self._reversing
            if new:
                self._tick(event(BACKWARD, handle.run))
            # Not all of its run: gradients of others may have come, with which this operator has nothing to do.
            self._gradients.reclaim((handle.member,))
            if new:
                self._acquire(handle.run, BACKWARD)
                self._reversing.append(handle.run)
                if self.recorder is not None and handle.run in self._together:
                    # A checkpoint around the block has computed it again since its backward began.
                    self.recorder.block_reversed(handle.run, self._together[handle.run])
            return self.data.rebuild(handle)

    @told
    def reverse_block(self, unit: Unit) -> None:
        with self.lock:
            new = [run for run in unit.runs if run not in self._reversing]
            if not new:
                return
            self._tick(event(BACKWARD, unit.runs[0]))
            for run in new:
                self._gradients.reclaim(self.data.runs[run].parameters)
                self._acquire(run, BACKWARD)
                self._reversing.append(run)
                if self.recorder is not None:
                    self.recorder.block_reversed(run, self._together[run])

    @told
    def gradient(self, parameter: int) -> None:
        with self.lock:
            run = self.data.run_of[parameter]
            # What a compiled block's backward gives is all part of one moment.
            if run not in self._reversing or run not in self._together:
                self._tick(event(GRADIENT, parameter))
            if self.recorder is not None:
                self.recorder.arrival(parameter)
            with self.journal.at(GRADIENTS):
                self._gradients.capture(parameter)

    def updating(self, index: int) -> None:
        """The update of a chunk begins."""
        with self.lock:
            self._tick(event(UPDATE, index))

    # -- passes ---------------------------------------------------------------------------------------

    def begin(self, plan: Plan | None, recorder: Recorder | None, offset: int = 0, packed: int = -1) -> None:
        """A training pass starts, at `offset` moments into the plan's iteration. `packed`: so many bytes were saved, at
        most, in those that the plan is from; -1 where the record does not say."""
        if self.cursor.phase == IDLE:
            self.packed = 0  # else it is another forward of one pass
        self._planned = packed
        self._most, self.outgrown = packed if packed >= 0 else sys.maxsize, False
        if self.room.activations is not None:
            self.room.activations.begin(None if plan is None else plan.away, recorder)
        self.recorder = recorder
        if recorder is not None and self._together:
            self._together = self.data.gradients_together()
        if plan is not self.cursor.plan:
            self._updates.bring_all()  # that there is room for them later was the other plan's word
        self.cursor.begin(plan, offset)
        if plan is not None and plan.levels[offset] > self.room.claims.level:
            self.room.raise_level(plan.levels[offset])  # something may be computed before the first moment

    def reverse(self) -> None:
        """Backward starts."""
        with self.lock:
            self.states.settle()
            self.cursor.phase = REVERSING
            if self.recorder is not None:
                self.recorder.reverse()

    def turn(self) -> None:
        """A backward is over that is not the last one of the pass: forward goes on."""
        with self.lock:
            self._sweep(everything=True)
            self.states.settle()
            self.cursor.phase = RUNNING
            if self.recorder is not None:
                self.recorder.turn()

    def finish(self) -> None:
        """A pass is over, or was given up: nothing stays in use."""
        with self.lock:
            self._sweep(everything=True)
            self.states.settle()
            self.cursor.phase = IDLE
            if self.room.activations is not None:
                self.room.activations.finish()

    def let_go(self) -> None:
        """What a pass used that ended early, between whichever two lines: only `resident()` still has something."""
        with self.lock:
            self._reversing = []
            self.states.drop()
            for run in list(self._leases):
                self._end_leases(run)

    def _after_forward(self) -> State:
        return State.HOLD_AFTER_FWD if self.cursor.phase != IDLE else State.HOLD

    def _tick(self, what: int) -> None:
        """The next moment: release what backward has done with, then do what the plan has for it."""
        if torch.is_inference_mode_enabled():
            # Views that are made in inference mode could never be written after it, by those beside the pass either.
            with torch.inference_mode(False), torch.no_grad():
                self._tick(what)
            return
        if self._reversing:
            self._sweep()
        self._catch_up()
        self.cursor.advance()
        if self.cursor.phase == IDLE and what % 4 != UPDATE:
            return
        self.cursor.position += 1
        self.states.moment = self.cursor.position
        if self.recorder is not None and what % 4 != UPDATE:
            self.recorder.moment(what)
        if self.room.activations is not None:
            self.room.activations.moment()
        if self.cursor.on_track:
            self._follow(what)
        if self.journal.events is not None:
            self.journal.moment(what, self.cursor.position, self.ledger.tags, self.ledger.level["device"])

    def _catch_up(self) -> None:
        """Ends the updates that are over, and starts the moves that waited for them."""
        self._updates.moment()
        if self._wanted:
            wanted, self._wanted = self._wanted, []
            for chunk, fetch in wanted:
                self._start(chunk, fetch, 0)

    def _follow(self, what: int) -> None:
        plan = self.cursor.plan
        assert plan is not None
        place = self.cursor.position
        moments = plan.record.moments
        length = len(moments)
        if what % 4 == UPDATE:
            place = length * plan.accumulate + what // 4
            expected = place < len(plan.levels)
            self.cursor.position = place
        else:
            expected = place < length * plan.accumulate and moments[place % length].event == what
        if not expected:
            self.leave_track(f"moment {place}: {self._name(what)} was not expected")
            return
        late = 0 if self.room.activations is None else self.room.late(place)
        level, before = plan.levels[place] + late, self.room.claims.level
        if level < before:
            self.room.claims.set_level(level)
        for trigger in plan.triggers[place]:
            self._start(
                self.store.chunks.get(plan.items[trigger.item]), trigger.fetch, max(0, level - before)
            )
        if level > before:
            short = level - before > self.ledger.room("device")
            self.room.raise_level(plan.levels[place] + self.room.late(place, wait=short))
        if self.room.activations is not None and what % 4 != UPDATE:
            self.room.activations.arrive(place % length)

    def _start(self, chunk: Chunk | None, fetch: bool, rise: int) -> None:
        """One of the plan's moves: a hint, left undone where the state of things is another."""
        if chunk is None:
            return
        if chunk.work is not None or self._loading(chunk):
            self._wanted.append((chunk, fetch))
        elif chunk.move is not None:
            return
        elif fetch:
            self._start_fetch(chunk, rise)
        elif chunk.device_valid and not self.store.in_use(chunk):
            self.room.evict(chunk)

    def _loading(self, chunk: Chunk) -> bool:
        """Whether the chunk is on its way from SSD to the host; a load that is over is ended."""
        if chunk.move is None or chunk.move[0] != SSD_READ or not self.store.has_host:
            return False
        if chunk.arrived:
            self.store.settle(chunk)
        return chunk.move is not None

    def _start_fetch(self, chunk: Chunk, rise: int) -> None:
        if chunk.device_valid:
            return
        if chunk.kind == WHOLE:
            # As planned, whatever this rank's moves are at: the others do it now.
            self.places.gather(chunk.index)
            return
        if chunk.host_valid or (chunk.ssd_valid and not self.store.has_host):
            if self.room.ready(chunk.nbytes + rise):
                self.store.fetch(chunk)
            elif self.room.leaving():
                self._wanted.append((chunk, True))  # for what it waits for
        elif chunk.ssd_valid and self.ledger.room("host") >= self.store.room_needed(chunk, "host"):
            self.store.load(chunk)
            self._wanted.append((chunk, True))

    def leave_track(self, why: str) -> None:
        """Execution is not what was traced: go on by demand, with room for the highest tide."""
        self._updates.bring_all()
        self.cursor.on_track = False
        self.cursor.diverged = why
        if self.room.activations is not None:
            self.room.activations.leave_plan()
        if self.cursor.plan is not None:
            self.room.raise_level(max(self.cursor.plan.levels, default=0))

    def _name(self, what: int) -> str:
        subject = what // 4
        if what % 4 == BACKWARD:
            return f"backward of {self.data.run_names[subject]}"
        if what % 4 == GRADIENT:
            return f"gradient of {self.data.names[subject]}"
        return f"{('forward of unit', '', '', 'update of chunk')[what % 4]} {subject}"

    def _subject(self, hook: str, what: Any) -> str:
        """Whose a hook's call is, as a profile names it."""
        if isinstance(what, Unit):
            return what.name or "the model"
        if isinstance(what, SavedWeight):
            return self.data.names[what.member]
        return self.data.names[what] if hook == "gradient" else self.data.run_names[what]

    # -- access and release ---------------------------------------------------------------------------

    def _acquire(self, run: int, phase: int) -> None:
        if phase == FORWARD:
            self._gradients.reclaim(self.data.runs[run].parameters)
            if self.cursor.phase == RUNNING:
                self.cursor.uses[run] += 1
        if self.states.access(run):
            if self.recorder is not None:
                self.recorder.begin(run, phase)
            leases = self._leases[run] = []
            try:
                for index in self.data.run_chunks[run]:
                    leases.append(self.places.hold(self.data.computed(index)))
            except BaseException:
                self._end_leases(run)
                self.states.release(run, State.HOLD)
                raise

    def _release(self, run: int, target: State) -> None:
        if self.states.release(run, target):
            if self.recorder is not None:
                self.recorder.end(run)
            self._end_leases(run)

    def _end_leases(self, run: int) -> None:
        for lease in self._leases.pop(run, ()):
            lease.end()

    def _sweep(self, everything: bool = False) -> None:
        """Releases the runs whose weights no backward operator looks at any more."""
        still: list[int] = []
        for run in self._reversing:
            if not everything and self._seen(run):
                still.append(run)
            else:
                self._release(run, State.HOLD_AFTER_BWD)
        self._reversing = still

    def _seen(self, run: int) -> bool:
        for index in self.data.run_chunks[run]:
            chunk = self.data.computed(index)
            if chunk.device is not None and self.store.backend.aliases(chunk.device) > chunk.aliases:
                return True
        return False
