"""A model's passes (forward, backward, update), led through its machinery: how they begin, are traced, planned and
followed, and how they end.

The engine is its face.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from ebbtide.devices.real_memory import on_real_memory, real
from ebbtide.errors import StateError
from ebbtide.memory.journal import COMPUTING, EBBTIDE, EVALUATION, PLANNING, RANKS
from ebbtide.planner.plans import Plan
from ebbtide.planner.shape import ModelShape
from ebbtide.runtime.build import Parts
from ebbtide.runtime.distributed.agreement import DONE, EVALUATED, FORWARD
from ebbtide.runtime.distributed.ranks import Ranks
from ebbtide.runtime.movement.plan_cursor import IDLE, RUNNING, UPDATING
from ebbtide.runtime.parameters.initial_values import Source
from ebbtide.runtime.parameters.parameter_classes import plainly
from ebbtide.runtime.parameters.selection import Choice
from ebbtide.runtime.planning.calls import Call
from ebbtide.runtime.planning.earlier_passes import beside
from ebbtide.runtime.planning.plan_cache import WATCHED, KnownInput
from ebbtide.runtime.process_tiers import Tiers

MANY = 256
"""Forward passes before one backward: whoever makes more forgot torch.no_grad, and a trace of them all has no use."""


class Averaged(Protocol):
    """An average of the weights."""

    label: str

    def parts(self) -> Iterator[Any]: ...

    def stepped(self) -> None: ...

    def catch_up(self) -> None: ...

    def loaded(self, stored: Collection[str]) -> None: ...

    def widen(self) -> None: ...

    def close(self) -> None: ...


class Session:
    """Leads a module's passes through the parts of the runtime."""

    def __init__(self, parts: Parts, tiers: Tiers, choice: Choice, source: Source | None = None) -> None:
        """`source`: has values that the module has not."""
        self.parts = parts
        self.module, self.config, self.backend, self.ledger = (
            parts.module,
            parts.config,
            parts.backend,
            parts.ledger,
        )
        self.layout, self.store, self.data, self.queue = parts.layout, parts.store, parts.data, parts.queue
        self.room, self.cursor, self.places, self.executor = (
            parts.room,
            parts.cursor,
            parts.places,
            parts.executor,
        )
        self.updates, self.homes, self.streaming = parts.updates, parts.homes, parts.streaming
        self.lock_free, self.sharing, self.companions = parts.lock_free, parts.sharing, parts.companions
        self.unmanaged, self.interceptor, self.recording = parts.unmanaged, parts.interceptor, parts.recording
        self.imagining, self.traces, self.planning = parts.imagining, parts.traces, parts.planning
        self.evaluations, self.outputs, self.waiting = parts.evaluations, parts.outputs, parts.waiting
        self.resting, self.unfreezing = parts.resting, parts.unfreezing
        self.journal = self.store.traffic.journal
        self.pieces = 1
        """Of how many losses the gradients are the sum, beside `accumulate`: micro-batches that are one pass."""
        self._captured = 0
        """Gradients taken before the pass that is under way."""
        self._known: KnownInput | None = None
        """What is known of the pass that is under way."""
        self._another = False
        """Whether its plan is that of a later forward."""
        self._by_node = False
        """Whether the last backward was one that the user's code started."""
        self.averages: list[Averaged] = []
        self.swapped = ""
        """What is in place of the weights, where something is."""
        self.micro = 0
        """Backward passes since the last update."""
        self._averaged: tuple[int, list[Any]] = 0, []
        """For which backward pass ranks had the mean of gradients outside the chunks, and which those were."""
        try:
            self.room.claims.lasting = self.unmanaged.device_bytes(choice)
            self.room.raise_level(self.room.claims.lasting)
            with nullcontext() if self.sharing is None else self.sharing.beginning():
                parts.takeover(source).take_over(self.shape, choice)
        except BaseException:
            parts.undo(source)
            raise
        self.recording.begin()
        tiers.rooms.add(self.room)

    @property
    def ranks(self) -> Ranks | None:
        """Those that share the chunks."""
        return None if self.sharing is None else self.sharing.ranks

    @property
    def shape(self) -> ModelShape:
        return self.traces.shape

    @property
    def frozen(self) -> bool:
        """Nothing is trained: nobody says when backward has gone through it, on its way to somebody else."""
        outside = self.unmanaged.parameters.values()
        return not any(self.data.trained) and not any(p.requires_grad for p in outside)

    @property
    def idle(self) -> bool:
        """Whether no training pass is under way."""
        return self.cursor.phase == IDLE

    @contextmanager
    def evaluating(self, call: Call) -> Iterator[None]:
        """Around a forward pass without gradients. Where nobody can say what its activations take, as much as those of
        training, as far as chunks have somewhere to go."""
        with self.journal.apart(EVALUATION), self._evaluating(call):
            yield

    @contextmanager
    def _evaluating(self, call: Call) -> Iterator[None]:
        before: tuple[int, bool, int] | None = None
        try:
            with real(), torch.inference_mode(False), torch.no_grad():
                if self.lock_free is not None:
                    self.lock_free.begin_evaluation()
                self.queue.bring_all()  # there is room for them in the moments of training
                if self.idle and not self.planning.roomy:
                    self.room.begin_turn(evaluates=True)
                    before = self.room.claims.level, self.ledger.is_guess("device"), self.room.claims.outputs
                    self._make_room(call)
            with self.data.in_pass(), self.interceptor.scope():
                yield
            if self.sharing is not None and not self.places.all_reside():
                self.meet(EVALUATED, self.micro)  # a rank that is done serves those that still gather
        except BaseException:
            if self.idle:
                self.executor.let_go()
            raise
        finally:
            if before is not None:
                self.room.claims.imagined = False
                with real(), torch.inference_mode(False), torch.no_grad():
                    level, guessed, held = before
                    self.room.hold(held, guess=True)
                    self.room.go_back(level, guessed)
                    self.room.end_turn()

    def _make_room(self, call: Call) -> None:
        """For an evaluation."""
        plan = self.cursor.plan
        planned = max(plan.levels, default=0) if plan is not None else -1
        self.hold_outputs()
        # Gradients, too, may have taken room that training's activations had.
        pinned = any(self.places.residing) or self.micro > 0
        held = self.outputs.nbytes
        self.room.claims.imagined = self.evaluations.make_room(call, planned, pinned, held)
        if not self.room.claims.imagined:
            level = self.homes.first_level(self.shape) if plan is None else planned
            self.room.raise_level(max(level, self.room.claims.level), guess=True)

    def begin_training(self, call: Call) -> None:
        """A training pass is about to run forward: find its plan, or the way to one."""
        with self.journal.at(EBBTIDE):
            self._begin_training(call)

    @on_real_memory
    def _begin_training(self, call: Call) -> None:
        self.reclaim()
        self.interceptor.watch_gradients()
        self.unfreezing.notice()
        for average in self.averages:
            average.widen()
        if not self.idle and self.frozen:
            self._finish_pass()
        if not self.idle:
            self._begin_another(call)
            return
        self.waiting.clear()
        self.waiting.begin()
        self._captured = self.updates.sink.captured
        self._known, self._another = None, False
        if self.sharing is not None:
            self.sharing.turn()
        if self.unmanaged.parameters:
            self.room.claims.lasting = self.unmanaged.fixed_bytes()  # with the state that an update makes
        over = self.recording.take()
        if over is not None:
            self.traces.learn(over)
        with self.journal.at(PLANNING):
            known = self._known = self.planning.find(call)
        if self.sharing is not None:
            self.planning.begin_together(self.sharing, known, self.micro)
        plan = self.planning.adopt(known) if known is not None else None
        if plan is not None and plan is not self.cursor.plan and not self.planning.roomy:
            self.evaluations.trained(plan, call)
        self.outputs.begin()
        self._hold_old(plan)
        if known is not None and plan is not None:
            known.peak = plan.record.peak
        if known is None or known.to_trace:
            self.recording.start(call, self.outputs.old, None if known is None else known.imagined)
        offset = 0 if plan is None else self.micro % plan.accumulate * len(plan.record.moments)
        if plan is None:
            self.homes.settle()
            self.room.raise_level(self.homes.first_level(self.shape), guess=True)
        if self.lock_free is not None:
            states = self.shape.state_bytes
            self.lock_free.open(
                [i for i, count in enumerate(states) if count and not self.store.updates_on_device(i)]
            )
            self.lock_free.begin_pass()
        self.updates.sink.in_parameter_space = plan is not None and plan.in_parameter_space
        self.resting.begin(known, plan, offset)
        try:
            packed = -1 if plan is None or self.planning.roomy else plan.record.packed
            self.executor.begin(plan, self.recording.recorder, offset, packed)
        except BaseException:
            self.abandon()
            raise

    def hold_outputs(self) -> None:
        """What the loop holds between passes has its room, as far as chunks have somewhere to go."""
        if self.idle and not self.planning.roomy:
            plan = self.cursor.plan
            known = plan.record.left if plan is not None else 0
            self.room.hold(beside(self.outputs.nbytes, known), guess=True)

    def _hold_old(self, plan: Plan | None) -> None:
        """What it holds when a pass begins has its room beside what the plan knows of that."""
        if self.planning.roomy:
            return
        if plan is None:
            self.room.hold(self.outputs.old, guess=True)
        else:
            self.planning.hold(plan, beside(self.outputs.old, plan.record.carried))

    def _begin_another(self, call: Call) -> None:
        """A second forward before one backward belongs to the same pass. Where its plan has none it gets its own,
        beside what the first has saved."""
        useless = self.waiting.partly_gone or self.waiting.count >= MANY
        self.waiting.begin()
        if useless:
            self._stop_recording()
        known = None
        if self.sharing is None and not self.planning.roomy and not self._foresees_another():
            known = self.waiting.beside(call)
        try:
            if known is None or (self.resting.now and self.resting.has_room(self.planning.plan(known))):
                self.resting.forward()
                return
            self._another = True
            self.resting.stop()
            self._follow_beside(known)
        except BaseException:
            self.abandon()
            raise

    def _follow_beside(self, known: KnownInput) -> None:
        """By a plan beside what waits. Where activations leave, or values change between passes, only its room is made:
        what waits has numbers of its own there, and is to see the values that it saw."""
        if self.lock_free is not None or self.room.activations is not None:
            self.executor.leave_track("a forward pass more than planned")
            level = max(known.record.peak, self.room.claims.level)
            self.room.raise_level(level, guess=self.room.activations is not None)
            return
        plan = self.planning.adopt(known)
        self.updates.sink.in_parameter_space = plan.in_parameter_space
        offset = self.micro % plan.accumulate * len(plan.record.moments)
        self.executor.begin(plan, self.recording.recorder, offset)

    def _foresees_another(self) -> bool:
        """Whether the plan that is followed has another forward pass now. If not, what the first has saved is known."""
        plan, run = self.cursor.plan, self._moments_run
        if plan is None or not self.cursor.on_track or not run:
            return False
        if run % len(plan.record.moments) <= plan.record.forward:
            return True
        if not self._another:
            self.waiting.planned(plan, run)
        return False

    def _end_forward(self) -> int | None:
        """Notes what forward has left. Gives the bytes of non-model data that are there until backward, where forward
        went as planned and none waited; what the user's own operators save for `loss.backward()` is not known."""
        plan, run, known = self.cursor.plan, self._moments_run, self._known
        if known is None or plan is None or not self.cursor.on_track or not run:
            return None
        known.after_forward = max(known.after_forward, self.recording.alive() or 0)
        record = plan.record
        forward_is_over = (run - 1) % len(record.moments) == record.forward
        if not forward_is_over or self.waiting.count != 1 or self._by_node:
            return None
        return max(known.after_forward, record.left_by_forward + record.fixed)

    @property
    def _moments_run(self) -> int:
        return self.resting.run if self.resting.now else self.cursor.position + 1

    @on_real_memory
    def reclaim(self) -> None:
        """Parameters whose space gradients took are wanted again before the update; gradients that were being dropped
        are not, nor is a pass that nobody can go back from any more. When outputs go, ranks do not agree about."""
        self.room.begin_turn()
        alone = self.sharing is None and not self.frozen and self.updates.sink.captured == self._captured
        if alone and self.cursor.phase == RUNNING and self.waiting.gone:
            self._leave()
        if self.updates.unwanted:
            self.drop_gradients()
        if self.updates.sink.parameter_space.away:
            self._notice_overwritten()
            self.updates.sink.parameter_space.give_back()

    @contextmanager
    def running(self, by_node: bool = False) -> Iterator[None]:
        """Around a pass: hooks on, and everything let go of where it raises. `by_node`: a backward that the user's code
        started."""
        self.room.claims.while_waiting = None
        try:
            with self.data.in_pass(), self.interceptor.scope(), self.recording.metered(by_node):
                self.journal.turn_to(COMPUTING)
                yield
                self.journal.turn_to("")
            self.resting.built()
            if self.cursor.phase == RUNNING:
                self.meet(FORWARD, self.micro)
                self.room.claims.while_waiting = self._end_forward()
        except BaseException:
            self.abandon()
            raise

    @contextmanager
    def reversing(
        self, last: bool, by_node: bool = False, loss: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Around autograd's backward. After one that is not the pass's `last`, forward passes go on. `by_node`: as for
        `running`. `loss`: the tensor that backward starts from, where the engine has it."""
        self._by_node = by_node
        self.interceptor.watch_gradients()
        self.planning.portion.go_on()
        self.updates.sink.stand_ins.forget()
        over = self.idle
        if not over:
            self._let_go_of_old(loss)
        self.executor.reverse()
        if not last:
            self.resting.rule_out()
        with self.running(by_node or self.interceptor.compiles):
            if over and self.cursor.plan is not None:
                self.executor.leave_track("a backward pass after the one that was planned")
            with self.resting.reversing():
                yield
            self.updates.finish_backward()
            if not last:
                # Nobody waits for another stage while a rank of this one gathers.
                self.meet(FORWARD, self.micro)
        if last:
            self._finish_pass()
        else:
            self.executor.turn()

    def _let_go_of_old(self, loss: torch.Tensor | None) -> None:
        """Backward begins: most loops hold no outputs any more but those that they go back from."""
        old, plan = self.outputs.old, self.cursor.plan
        self.recording.reverse(old, partial(self.waiting.beyond, loss))
        if not self.planning.roomy:
            self.room.hold(beside(old, plan.record.aside if plan is not None else 0), guess=True)

    def _finish_pass(self) -> None:
        with self.journal.at(EBBTIDE):
            self._end_pass()

    def _end_pass(self) -> None:
        if self.resting.now:
            self.resting.finish(self.waiting.count)
        elif self._another and self.waiting.one_left and not self.cursor.off_track():
            self._stop_recording()  # nobody has gone back, or will, from what came before
        elif self.recording.finish(self.executor.packed):
            self.executor.recorder = None
        elif self.cursor.plan is not None:
            known = self._known
            if known is not None:
                known.followed = not self._another and not self.cursor.off_track()
                if self.executor.outgrown and known.widen(self.executor.packed):
                    pass  # the next plan has room for as much
                elif not known.followed:
                    known.watch(0 if self.planning.roomy else WATCHED)
        self.executor.finish()
        self.room.end_pass()
        self.micro += 1
        self.updates.sink.show()

    @on_real_memory
    def abandon(self) -> None:
        """A pass raised: what it held is released, its trace is thrown away."""
        self._leave()
        self.updates.sink.stand_ins.forget()
        with plainly():
            for parameter in self.data.parameters:
                parameter.grad = None  # one that arrived and was not taken would be added to the next
        self.updates.sink.show()

    def _leave(self) -> None:
        self._stop_recording()
        self.resting.end()
        self.executor.let_go()
        self.executor.finish()

    def _stop_recording(self) -> None:
        self.recording.abandon()
        self.executor.recorder = None

    def meet(self, deed: int, number: int = 0, check: int = 0) -> Sequence[int]:
        """Where ranks share the chunks, all of them are there. The `check` that each gave."""
        if self.sharing is None:
            return [check]
        with self.journal.at(RANKS):
            return self.sharing.meet(deed, number, check)

    def of_all_ranks(self, losses: list[torch.Tensor]) -> list[float]:
        """Of each rank the first that is not finite, if there is one; else its last. Some stages of a pipeline have
        none."""
        values = [float(loss) for loss in losses]
        if self.sharing is None or not values:
            return values
        bad = [value for value in values if not math.isfinite(value)]
        with self.journal.at(RANKS):
            return [float(row) for row in self.sharing.ranks.objects((bad or values)[-1])]

    def average_unmanaged(self) -> None:
        """Parameters outside the chunks get the mean gradients of the ranks, once for a step."""
        if self.sharing is None:
            return
        if self._averaged[0] != self.micro:
            with self.journal.at(RANKS):
                self.sharing.average(self.unmanaged.parameters)
            self._averaged = self.micro, self.unmanaged.arrived()
        elif self._averaged[1] != self.unmanaged.arrived():
            raise StateError(
                "a gradient came after engine.clip_grad_norm_(), to a parameter outside the chunks, of which ranks have "
                "had the mean: clip after all backward passes of the step"
            )

    def brought(self) -> bool:
        """Whether gradients are held of parameters that the optimizer has; on ranks, of any of them."""
        updates = self.updates
        elsewhere = updates.shares is not None and bool(updates.shares.everywhere)
        groups = updates.param_groups.groups
        outside = [p for p in self.unmanaged.parameters.values() if p.grad is not None]
        if any(updates.sink.arrived) or elsewhere or not outside:
            return any(updates.sink.arrived) or elsewhere
        trained = {id(p) for group in groups for p in group["params"]}
        return any(id(p) in trained for p in outside)

    # -- update ---------------------------------------------------------------------------------------

    def regroup(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the optimizer's groups as they are now."""
        self.updates.regroup(groups)
        self.unmanaged.regroup(groups)

    def prelaunch(self) -> None:
        """A step begins, and the host is to look at the gradients first."""
        self.updates.chunks.forget()  # of a step that was interrupted
        if self.resting.now and not self.updates.sink.in_place.always:
            self.updates.prelaunch()

    def apply(self, scale: float) -> None:
        self.planning.portion.go_on()
        self.homes.settle()
        self.cursor.phase = UPDATING
        try:
            self.updates.apply(scale, self.executor.updating)
            self.meet(DONE)  # nobody is left alone with a gather that the update began
        finally:
            self.executor.finish()
            self._begin_counting()
            if self.sharing is not None:
                self.sharing.turn()

    def notice_writes(self) -> None:
        """What the user has written since backward is known before an update writes: the two could not be told apart."""
        self._notice_overwritten()
        self.data.notice_all()

    def _notice_overwritten(self) -> None:
        """A write where a gradient was is refused: it is lost, and the gradients are."""
        places, away = self.data.places, self.updates.sink.parameter_space.away
        try:
            for index in sorted({places[member].chunk for member in away}):
                self.data.notice_writes(index)
        except StateError:
            self.drop_gradients()
            raise

    def catch_up_averages(self) -> None:
        """Before weights change that averages have not taken in."""
        for average in self.averages:
            average.catch_up()

    def refuse_swapped(self) -> None:
        if self.swapped:
            raise StateError(
                f"{self.swapped}: evaluate under torch.no_grad(), export or read by name there; train and save after it"
            )

    def notice_dropped(self) -> bool:
        """Gradients that the user's code has set to None are dropped, as in plain PyTorch; whether all were."""
        updates = self.updates
        dropped = updates.sink.stand_ins.hide()
        if not dropped or updates.in_backward:
            return False
        if all(m in dropped for m, count in enumerate(updates.sink.arrived) if count):
            self.drop_gradients()
            return True
        updates.forget(dropped)
        return False

    def set_by_hand(self) -> str:
        """The first parameter of the optimizer's whose gradient no backward pass has brought; empty where there is
        none."""
        group_of = self.updates.param_groups.group_of
        members = (member for member, group in enumerate(group_of) if group >= 0)
        return self.updates.sink.stand_ins.set_by_hand(members)

    def without_gradient(self) -> list[str]:
        """Parameters of the optimizer that were updated before, and have no gradient in this step. Not on ranks, where
        another one may have it."""
        groups, data, unmanaged = self.updates.param_groups, self.data, self.unmanaged
        if self.sharing is not None:
            return []
        chunked = zip(
            data.names,
            data.parameters,
            groups.group_of,
            groups.counts,
            self.updates.sink.arrived,
            strict=True,
        )
        found = [
            name
            for name, p, group, count, came in chunked
            if group >= 0 and count and not came and p.requires_grad
        ]
        trained = {id(p) for group in groups.groups for p in group["params"]}
        return found + [
            name
            for name, p in unmanaged.parameters.items()
            if id(p) in trained and unmanaged.steps[name] and p.grad is None and p.requires_grad
        ]

    def _begin_counting(self) -> None:
        """Another step's passes."""
        self.micro, self.pieces = 0, 1
        self._averaged = 0, []

    def drop_gradients(self) -> None:
        self.updates.unwanted = True
        self._begin_counting()
        self.updates.discard()
