"""The step: whether the gradients can be applied, scaled by what, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ebbtide.engine.held import Held, alone
from ebbtide.errors import NonFiniteError, StateError
from ebbtide.kernels import Decision, Guarded, Scaling
from ebbtide.optimizer import EngineOptimizer
from ebbtide.run.scaler import LossScaler
from ebbtide.run.wishes import STEP
from ebbtide.state.saving import Saver


@dataclass(frozen=True)
class StepResult:
    updated: bool
    """False while gradients accumulate, and where the step was skipped."""
    skipped: bool = False
    """The gradients were not finite, and the config says to go on."""
    grad_norm: float | None = None
    """Global norm of the mean gradient, before clipping; only with clipping or loss scaling."""
    loss_scale: float = 1.0


class Stepping(Held):
    optimizer: EngineOptimizer
    _scaler: LossScaler | None
    _saver: Saver
    _stepping: bool
    """Whether it is the engine that calls the optimizer."""
    _factor: float
    """What gradients are multiplied with."""

    @property
    def loss_scale(self) -> float:
        return self._scaler.scale if self._scaler is not None else 1.0

    @alone
    def step(self) -> StepResult:
        """Updates the weights, on every `accumulate`-th call."""
        self._check()
        self._saver.look()
        session = self._session
        if session.micro == 0:
            raise StateError(
                "engine.step() without a backward pass before it: call engine.backward(loss) first, in place of "
                "loss.backward()"
            )
        if session.micro < self.config.accumulate:
            return StepResult(False, loss_scale=self.loss_scale)
        if self.config.updates != "in-backward":
            session.updates.regroup(self.optimizer.param_groups)
        session.meet(STEP, self.steps)
        session.average_unmanaged()
        if self.config.updates == "in-backward":
            self._refuse_nonfinite_outside()
            self._step_optimizer()
            return StepResult(True, loss_scale=self.loss_scale)
        session.foresee()
        unscale = 1.0 / (self.loss_scale * self.config.accumulate * session.pieces)
        scaling = Scaling(unscale, self.config.clip)
        decision = self._step_guarded(scaling)
        if decision is None:
            if bad := self._nonfinite():
                return self._refuse(bad)
            decision = self._decide(scaling)
            self._take(decision)
        norm = decision.norm if self._norm_matters else None
        return StepResult(True, grad_norm=norm, loss_scale=self.loss_scale)

    def _refuse(self, bad: str) -> StepResult:
        """Gradients that are not finite, which says `bad`."""
        self._losses = []
        self._session.drop_gradients()
        self._session.unmanaged.discard()
        if self._scaler is not None:
            self._scaler.update(True)
        elif self.config.nonfinite != "continue":
            raise NonFiniteError(
                f"step {self.steps + 1}: {bad}; the weights are as before the step. Lower the learning rate, clip "
                'gradients, or set nonfinite = "continue" to skip such steps' + self._what_is_away()
            )
        return StepResult(False, True, loss_scale=self.loss_scale)

    @property
    def _norm_matters(self) -> bool:
        return self.config.clip is not None or self._scaler is not None

    def _decide(self, scaling: Scaling) -> Decision:
        if not self._norm_matters:
            return scaling.decide(0.0)
        total = self._session.updates.square_sum()
        for name in sorted(squares := self._session.unmanaged.squares()):
            total += squares[name]
        return scaling.decide(total if self._companions is None else self._companions.total(total))

    def _what_is_away(self) -> str:
        if all(self._session.data.bound):
            return ""
        return (
            ". Or forward, or a hook, reads a parameter that is away, and NaN, past its module (through parameters(), "
            "from a list, from autograd.Function's ctx): read it as its module's attribute, keep it with "
            "save_for_backward, or name it in `unmanaged`"
        )

    def _refuse_nonfinite_outside(self) -> None:
        """With updates in backward, what is in chunks has been looked at, and updated."""
        names = self._session.unmanaged.nonfinite()
        if names:
            self._session.drop_gradients()
            self._session.unmanaged.discard()
            self._broken = "a gradient outside the chunks was not finite, when those within were updated"
            raise NonFiniteError(
                f"step {self.steps + 1}: the gradient of {names[0]} is not finite; parameters in chunks have had this "
                "step's update. Go on from a checkpoint with a lower learning rate"
            )

    def _nonfinite(self) -> str:
        """Why the step cannot be taken, the same on all processes that train the model."""
        said = (lambda text: text) if self._companions is None else self._companions.said
        bad = [loss for loss in self._session.of_all_ranks(self._losses) if not math.isfinite(loss)]
        if found := said(f"the loss is {bad[0]}" if bad else ""):
            return found
        names = self._session.updates.nonfinite() + self._session.unmanaged.nonfinite()
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return said(f"the gradient of {names[0]}{more} is not finite" if names else "")

    def _take(self, decision: Decision) -> None:
        self._factor = decision.factor
        self._step_optimizer()

    def _step_guarded(self, scaling: Scaling) -> Decision | None:
        """Where the host has nothing to decide, a GPU is given the update before it has come to the gradients, and waits
        for nobody. None where the host has to look: nothing has been changed."""
        unmanaged, updates = self._session.unmanaged, self._session.updates
        if self._companions is not None or self.optimizer.overheard or any(unmanaged.arrived()):
            return None
        guarded = updates.guarded(self._losses, scaling)
        if guarded is None:
            return None
        with self._no_way_back():
            updates.chunks.start_foreseen(scaling.unscale, guarded)
            decision, interrupt = _outlast(guarded)
            if decision is not None:
                self._take(decision)
        if decision is None:
            updates.chunks.forget()
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt  # it holds this frame
        return decision

    @contextmanager
    def _no_way_back(self) -> Iterator[None]:
        """Around an update that has begun, until the step counts."""
        before = self.steps
        try:
            yield
        except BaseException:
            if self.steps == before:
                self._broken = "an exception inside the update left some parameters updated and others not"
            raise

    def _step_optimizer(self) -> None:
        """Through `optimizer.step`, for schedulers count its calls."""
        self._losses = []
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False

    def _update(self) -> None:
        """What `optimizer.step()` does; called by the user it is `engine.step()`."""
        if not self._stepping:
            self.step()
            return
        session = self._session
        if session.micro == 0:
            raise StateError(
                "optimizer.step() without gradients: call engine.backward(loss), then engine.step()"
            )
        with self._no_way_back():
            if self.config.updates == "in-backward":
                session.unmanaged.apply(self.optimizer.param_groups, session.updates.scale)
                session.drop_gradients()
            else:
                session.apply(self._factor)
                session.unmanaged.apply(self.optimizer.param_groups, self._factor)
            if self._scaler is not None:
                self._scaler.update(False)
            self.steps += 1


def _outlast(guarded: Guarded) -> tuple[Decision | None, BaseException | None]:
    """What the device decided, and what interrupted the wait, which is most of a step: what was started comes to its end
    first."""
    try:
        return guarded.decision(), None
    except BaseException as interrupt:
        return guarded.decision(), interrupt
