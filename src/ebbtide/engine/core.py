"""What an engine's parts share: the session, whether it may be used, and the step under way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch

from ebbtide.engine.optimizer import EngineOptimizer
from ebbtide.engine.own_backward import OwnBackward
from ebbtide.engine.step_settings import StepSettings, difference
from ebbtide.engine.tracebacks import trim
from ebbtide.errors import EbbtideError, StateError
from ebbtide.memory.journal import LOOP, RANKS
from ebbtide.runtime.distributed.agreement import STEP
from ebbtide.runtime.distributed.ranks import Ranks
from ebbtide.runtime.distributed.shared_buffers import SharedBuffers
from ebbtide.runtime.parameters.parameter_classes import plainly
from ebbtide.runtime.session import Session
from ebbtide.runtime.updates.loss_scale import LossScaler
from ebbtide.tracing.hooks.compiled import has_compiler

Method = TypeVar("Method", bound=Callable[..., Any])


class _HasCore(Protocol):
    _core: EngineCore


def alone(method: Method) -> Method:
    """Refused to who comes while another thread is inside. A training loop that is compiled compiles nothing of it."""
    left_alone: list[Any] = []

    @wraps(method)
    def called(self: _HasCore, *args: Any, **kwargs: Any) -> Any:
        if not left_alone and has_compiler():
            left_alone.append(torch.compiler.disable(method))
        try:
            with self._core.turn():
                return (left_alone[0] if left_alone else method)(self, *args, **kwargs)
        except EbbtideError as error:
            raise trim(error)  # noqa: B904  (the same error)

    return called  # type: ignore[return-value]


class EngineCore:
    """One for an engine, which hands it to its parts."""

    def __init__(self, session: Session, optimizer: EngineOptimizer) -> None:
        self.session, self.optimizer = session, optimizer
        self.module, self.config = session.module, session.config
        self.scaler = LossScaler() if self.config.precision == "fp16" else None
        self.own_backward = OwnBackward(session)
        self.steps = 0
        self.closed = False
        self.broken = ""
        """Why some parameters are updated and others are not, until all of them are written."""
        self.losses: list[torch.Tensor] = []
        """Of this step, so far."""
        self.losses_known = True
        """Whether they are what the loop computed: of a backward that the user's code starts nobody is told the loss."""
        self.clip_once: float | None = None
        """What `clip_grad_norm_` has asked of the step to come, in place of the config's `clip`."""
        sharing = session.sharing
        self._buffers = None if sharing is None else SharedBuffers(session.module, sharing.ranks)
        self.overheard = False
        """Whether on some rank a hook of the user's runs as a step begins, and may change its settings."""
        self.zeros_wanted = False
        """Whether the loop's last zero_grad() asked for zeros."""
        self.process = os.getpid()
        """The one that has the engine's threads; a forked child of it does not."""
        self._calls = 0
        """Passes and steps that are under way, one within another."""
        self._half_done: list[list[str]] = []
        """What is under way, of which a checkpoint would have half; a backward pass that raised until it is given up."""
        self._turn = threading.RLock()

    def open(self) -> Session:
        """The session, for reading and writing values."""
        if self.closed:
            raise StateError("the engine is closed; initialize() another one")
        if os.getpid() != self.process:
            raise StateError(
                f"the engine was made by process {self.process} and is used by {os.getpid()}, a forked child, which "
                "has none of its threads; give the child the values that it needs, or a module and an engine of its own"
            )
        with self.turn():
            self.own_backward.give_up()
            return self.session

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time."""
        if not self._turn.acquire(blocking=False):
            raise StateError(
                "another thread is in a pass, a step, a save or a load of this engine, and the two would mix what they "
                "read and write: use it from one thread at a time (engine.save(folder, background=True) writes beside "
                "training), or give each an engine of its own"
            )
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Around a pass or a step: what the thread does between them is the loop's own."""
        journal, outermost = self.session.journal, not self._calls
        self._calls += 1
        journal.turn_to("")
        try:
            yield
        finally:
            self._calls -= 1
            if outermost:
                journal.settle()
            journal.turn_to(LOOP)

    @contextmanager
    def half_done(self, what: str) -> Iterator[None]:
        mine = [what]
        self._half_done.append(mine)
        try:
            yield
        finally:
            self._half_done = [one for one in self._half_done if one is not mine]

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        with self.in_call(), self.half_done("a forward or backward pass"):
            yield

    def require_whole(self, method: str) -> None:
        """Before what writes or replaces all values."""
        if self._half_done:
            raise StateError(
                f"engine.{method}() while {self._half_done[-1][0]} is under way, of which it would have half. Most "
                "likely a signal handler, or a hook, calls it: note there that it is wanted, and call it after "
                "engine.step()"
            )

    def check(self) -> None:
        broken = self.broken or self.open().queue.failed
        if broken:
            raise StateError(
                f"the engine is partially stepped: {broken}. Load a checkpoint, or weights with load_state_dict()"
            )

    @property
    def number(self) -> int:
        """The step's that is to come, as messages count."""
        return self.steps + 1

    def forget_counts(self) -> None:
        """What was counted for this step: its losses, and how to clip it."""
        self.losses, self.losses_known, self.clip_once = [], True, None

    @contextmanager
    def counts_again(self) -> Iterator[None]:
        """Around an update: what was counted is forgotten, unless the step was not taken."""
        before = self.steps, self.session.micro
        counts = self.losses, self.losses_known, self.clip_once
        self.forget_counts()
        try:
            yield
        except BaseException:
            if (self.steps, self.session.micro) == before and not self.broken:
                self.losses, self.losses_known, self.clip_once = counts
            raise

    def clear(self) -> None:
        """Drops gradients that were held, and what was counted for this step."""
        self.session.drop_gradients()
        self.session.unmanaged.discard()
        self.forget_counts()

    def notice_dropped(self) -> None:
        """Gradients that the user's code has set to None are dropped."""
        if self.session.notice_dropped():
            self.forget_counts()

    def meet_alike(self, deed: int) -> None:
        """Where ranks share the chunks, all of them are there, to update with the same settings; so are those that have
        other parts of the same tensors. From a step on, buffers are the first rank's."""
        session, shared = self.session, self._buffers
        companions = session.companions
        if shared is None and companions is None:
            return
        settings, written = self._step_settings(), False
        heard: list[tuple[Ranks, Sequence[int]]] = []
        self.overheard = self.optimizer.overheard
        if shared is not None:
            own = deed == STEP and shared.written
            said = session.meet(deed, self.steps, 4 * settings.checksum + 2 * self.overheard + own)
            heard.append((shared.ranks, [one // 4 for one in said]))
            self.overheard, written = any(one // 2 % 2 for one in said), any(one % 2 for one in said)
        with session.journal.at(RANKS):
            for ranks in [] if companions is None else companions.parts:
                heard.append((ranks, [row[0] for row in ranks.numbers([settings.checksum])]))
            self._refuse_differing(heard, settings, deed)
            if shared is not None and written:
                shared.align()

    def _refuse_differing(
        self, heard: Sequence[tuple[Ranks, Sequence[int]]], settings: StepSettings, deed: int
    ) -> None:
        """Raises on all processes that train the model, those that see no difference among them."""
        seen = [
            found
            for ranks, checks in heard
            if len(set(checks)) > 1 and (found := difference(ranks, settings))
        ]
        found, companions = "; ".join(seen), self.session.companions
        if companions is not None:
            sharing = None if self._buffers is None else self._buffers.ranks
            found, self.overheard = companions.hear(found, self.overheard, settings.clip, sharing)
        if found:
            in_backward = self.config.updates == "in-backward" and deed == STEP
            raise StateError(
                f"step {self.number}: ranks would update their parts of the weights with different settings: {found}. "
                "Most likely a schedule follows a loss that is one rank's alone: give it the mean of all ranks', or set "
                "the same on each. "
                + (
                    "Parameters in chunks had this step's update in backward, with what was set then"
                    if in_backward
                    else "Nothing was updated"
                )
            )

    def _step_settings(self) -> StepSettings:
        session, groups = self.session, self.optimizer.param_groups
        place = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        outside = session.unmanaged.parameters
        return StepSettings(
            groups=groups,
            read=session.updates.rule.settings,
            clip=self.config.clip if self.clip_once is None else self.clip_once,
            names=[*session.data.names, *outside],
            group_of=[place.get(id(p), -1) for p in (*session.data.parameters, *outside.values())],
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """What the user's zero_grad does."""
        self.own_backward.give_up()
        self.zeros_wanted = not set_to_none
        if self.config.updates == "in-backward" and self.session.micro:
            raise StateError(
                'zero_grad: updates = "in-backward" has applied the gradients of this backward already; call '
                'engine.step(), or use updates = "exact" to drop what a batch brought'
            )
        self.clear()
        with plainly():  # of parameters that are in the groups by now, too
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def end_pending(self) -> None:
        """Before all weights are written. What an engine that is broken has pending may never be done: it goes."""
        self.session.queue.drop()
        if self.broken and self.session.lock_free is not None:
            self.session.lock_free.give_up()

    def mend(self) -> None:
        """All weights were written: what was half-done is gone."""
        self.broken = ""
        self.session.queue.mend()
        self.session.data.changed(range(len(self.session.data.names)))
