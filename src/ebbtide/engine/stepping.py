"""The step: whether the gradients can be applied, scaled by what, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ebbtide.checkpoint.saving import Saver
from ebbtide.engine.core import EngineCore
from ebbtide.engine.foreign import Schedulers
from ebbtide.errors import ConfigError, NonFiniteError, StateError, UnsupportedError, warn_user
from ebbtide.kernels import Decision, Guarded, Scaling
from ebbtide.memory.journal import DEVICE_WAIT, EBBTIDE
from ebbtide.runtime.distributed.agreement import STEP

NOTHING_TRAINED = (
    "engine.step(): backward brought no gradient to a parameter of the optimizer, so nothing would be trained: the loss "
    "comes from something else than this module's parameters, they are all frozen (requires_grad), or none of those "
    "that it comes from is in engine.optimizer.param_groups. Nothing was changed"
)


@dataclass(frozen=True)
class StepResult:
    updated: bool
    """False while gradients accumulate, and where the step was skipped."""
    skipped: bool = False
    """The gradients were not finite, and the config says to go on."""
    grad_norm: float | None = None
    """Global norm of the mean gradient, before clipping; None where nothing was updated, or in backward."""
    loss_scale: float = 1.0


class Stepping:
    def __init__(self, core: EngineCore, saver: Saver) -> None:
        self._core, self._session, self._saver = core, core.session, saver
        self._config = core.config
        self._schedulers = Schedulers(core.optimizer)
        self.own_call = False
        """Whether it is the engine that calls the optimizer."""
        self._called_by_optimizer = False
        """Whether the loop called `optimizer.step()`, whose hooks run around this step."""
        self._told_of_zeros = False
        self._factor = 1.0
        """What gradients are multiplied with."""
        self.last: StepResult | None = None
        """What the last step gave, whether the loop called `step` or `optimizer.step()`."""

    @property
    def loss_scale(self) -> float:
        return self._core.scaler.scale if self._core.scaler is not None else 1.0

    def step(self) -> StepResult:
        self.last = None
        with self._core.in_call(), self._session.journal.at(EBBTIDE):
            self.last = found = self._step()
        return found

    @contextmanager
    def called_by_optimizer(self) -> Iterator[None]:
        """Around a step that is `optimizer.step()`: its hooks run once."""
        before, self._called_by_optimizer = self._called_by_optimizer, True
        try:
            yield
        finally:
            self._called_by_optimizer = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        self._core.check()
        if self._config.updates == "in-backward":
            raise UnsupportedError(
                'clip_grad_norm_: updates = "in-backward" has consumed the gradients; use updates = "exact"'
            )
        if not isinstance(max_norm, int | float) or not max_norm > 0:
            raise ConfigError(f"clip_grad_norm_: expected a norm above zero, found {max_norm!r}")
        self._core.notice_dropped()
        session = self._session
        if session.micro:
            session.average_unmanaged()
            norm = self._decide(Scaling(self._unscale(), None)).norm
            self._core.clip_once = float(max_norm)
        else:
            norm = 0.0  # as in plain PyTorch, where there are no gradients
        session.updates.sink.show()
        return torch.tensor(norm, device="cpu")

    def _unscale(self) -> float:
        return 1.0 / (self.loss_scale * self._config.accumulate * self._session.pieces)

    def _step(self) -> StepResult:
        self._core.check()
        if (pending := self._saver.pending) is not None and pending.over:
            self._saver.settle()  # gives back what its copy took, and says where it could not be written
        self._schedulers.look()
        self._session.refuse_swapped()
        self._core.notice_dropped()
        session = self._session
        if self._config.updates != "in-backward":
            session.regroup(self._core.optimizer.param_groups)
        self._refuse_set_by_hand()
        if session.micro == 0:
            said = self._without_backward()
            self._core.clear()  # a loop that goes on is not to have them in its next step
            raise StateError(said)
        if session.micro < self._config.accumulate:
            return StepResult(False, loss_scale=self.loss_scale)
        self._notice_writes()
        self._core.meet_alike(STEP)
        session.average_unmanaged()
        self._refuse_nothing()
        self._warn_of_zeros()
        if self._config.updates == "in-backward":
            self._refuse_nonfinite_outside()
            self._step_optimizer()
            return StepResult(True, loss_scale=self.loss_scale)
        session.prelaunch()
        clip_once = self._core.clip_once
        scaling = Scaling(self._unscale(), self._config.clip if clip_once is None else clip_once)
        decision = self._step_guarded(scaling)
        if decision is None:
            if bad := self._nonfinite():
                return self._refuse(bad)
            decision = self._decide(scaling)
            self._take(decision)
        return StepResult(True, grad_norm=decision.norm, loss_scale=self.loss_scale)

    def _notice_writes(self) -> None:
        """Before anything is updated. Where a write hit a gradient, that is lost, and the others with it."""
        try:
            self._session.notice_writes()
        except StateError:
            self._core.clear()
            raise

    def _refuse_set_by_hand(self) -> None:
        name = self._session.set_by_hand()
        if name:
            raise StateError(
                f"engine.step(): {name} has a gradient in .grad that the engine was not given: it was set by hand, or "
                "came before the parameter was in a param group, or before the engine knew that it is trained. The "
                "engine updates with gradients that come by backward: add what it is the gradient of to the loss; a "
                "hook on the parameter (register_hook) changes one that comes. engine.zero_grad() drops it. Nothing was "
                "changed"
            )

    def _without_backward(self) -> str:
        if not any(parameter.requires_grad for parameter in self._core.module.parameters()):
            return NOTHING_TRAINED
        if self._session.brought():
            return (
                "engine.step(): gradients came, but from no output of a pass: the loss was computed from something that "
                "forward keeps and does not return, or the backward was another engine's. Return it from forward, or "
                "call engine.backward(loss)"
            )
        return (
            "engine.step() without a backward pass before it: call engine.backward(loss), or loss.backward(), on a loss "
            "that comes from engine(...) or from a call of the module. Where the gradients were set to zero since, "
            "nothing is left to apply"
        )

    def _refuse_nothing(self) -> None:
        """A backward pass was there and brought no parameter of the optimizer a gradient."""
        session, companions = self._session, self._session.companions
        if session.brought() or (companions is not None and companions.stages is not None):
            return  # another stage may have all of them
        self._core.clear()
        raise StateError(NOTHING_TRAINED)

    def _warn_of_zeros(self) -> None:
        """Where zeros were asked for in place of None, and it makes a difference."""
        missing = self._session.without_gradient() if self._core.zeros_wanted else []
        if missing and not self._told_of_zeros:
            self._told_of_zeros = True
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            warn_user(
                f"zero_grad(set_to_none=False): {missing[0]}{more} had no gradient in this step. The engine leaves such "
                "parameters as they are, as with set_to_none=True; torch's optimizer would find zeros, decay them, and "
                "move them on by their momentum"
            )

    def _refuse(self, bad: str) -> StepResult:
        """Gradients that are not finite, which says `bad`."""
        self._core.clear()
        scaler = self._core.scaler
        if scaler is not None and scaler.exhausted and self._config.nonfinite != "continue":
            raise NonFiniteError(
                f"step {self._core.number}: {bad}, though losses are scaled by no more than {scaler.scale:.1e}: all "
                f"steps since it was larger were skipped, and the weights are as before them. {self._what_is_away()}"
                'Look for values that are not finite in weights or data, train in bf16, or set nonfinite = "continue"'
            )
        if scaler is not None:
            scaler.update(True)
        elif self._config.nonfinite != "continue":
            raise NonFiniteError(
                f"step {self._core.number}: {bad}; the weights are as before the step. {self._what_is_away()}Lower the "
                'learning rate, clip gradients, or set nonfinite = "continue" to skip such steps'
            )
        return StepResult(False, True, loss_scale=self.loss_scale)

    def _decide(self, scaling: Scaling) -> Decision:
        with self._session.journal.at(DEVICE_WAIT):
            total = self._session.updates.square_sum()
        for name in sorted(squares := self._session.unmanaged.squares()):
            total += squares[name]
        return scaling.decide(
            total if self._session.companions is None else self._session.companions.total(total)
        )

    def _what_is_away(self) -> str:
        if all(self._session.data.bound):
            return ""
        return (
            "Most likely forward, or a hook, had a parameter from a list or from autograd.Function's ctx that was "
            "away, and NaN: read it as its module's attribute, keep it with save_for_backward, or name it in "
            "`unmanaged`. If not: "
        )

    def _refuse_nonfinite_outside(self) -> None:
        """With updates in backward, what is in chunks has been looked at, and updated."""
        names = self._session.unmanaged.nonfinite()
        if names:
            self._session.drop_gradients()
            self._session.unmanaged.discard()
            self._core.broken = "a gradient outside the chunks was not finite, when those within were updated"
            raise NonFiniteError(
                f"step {self._core.number}: the gradient of {names[0]} is not finite; parameters in chunks have had "
                "this step's update. Go on from a checkpoint with a lower learning rate"
            )

    def _nonfinite(self) -> str:
        """Why the step cannot be taken, the same on all processes that train the model."""
        said = (lambda text: text) if self._session.companions is None else self._session.companions.said
        bad = [loss for loss in self._session.of_all_ranks(self._core.losses) if not math.isfinite(loss)]
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
        if self._session.companions is not None or self._core.optimizer.overheard or any(unmanaged.arrived()):
            return None
        if self._session.averages or self._core.overheard:
            return None
        guarded = updates.guarded(self._core.losses, scaling)
        if guarded is None:
            return None
        with self._no_way_back():
            updates.chunks.start_prelaunched(scaling.unscale, guarded)
            with self._session.journal.at(DEVICE_WAIT):
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
        before = self._core.steps
        try:
            yield
        except BaseException:
            if self._core.steps == before:
                self._core.broken = (
                    "an exception inside the update left some parameters updated and others not"
                )
            raise

    def _step_optimizer(self) -> None:
        """Through `optimizer.step`, for schedulers count its calls, and hooks listen to it."""
        with self._core.counts_again():
            if self._called_by_optimizer:
                self.update()
            else:
                self.own_call = True
                try:
                    self._core.optimizer.step()
                finally:
                    self.own_call = False
        if self._core.optimizer.handed is not None:
            self._core.optimizer.handed._opt_called = True  # type: ignore[attr-defined]  # what a scheduler on it asks for

    def update(self) -> bool:
        """What `optimizer.step()` does where `step` calls it. Whether it was skipped."""
        session = self._session
        if session.micro == 0:  # a hook before the step has dropped them
            raise StateError(self._without_backward())
        if self._config.updates != "in-backward":
            self._notice_writes()  # of a hook before the step
        if self._core.overheard:
            self._core.meet_alike(STEP)  # a hook before the step may have set others
        if self._config.updates != "in-backward":
            session.catch_up_averages()
        with self._no_way_back(), self._core.half_done("an update"):
            if self._config.updates == "in-backward":
                session.unmanaged.apply(self._core.optimizer.param_groups, session.updates.scale)
                session.drop_gradients()
            else:
                session.apply(self._factor)
                session.unmanaged.apply(self._core.optimizer.param_groups, self._factor)
            if self._core.scaler is not None:
                self._core.scaler.update(False)
            for average in session.averages:
                average.stepped()
            self._core.steps += 1
        if session.data.live.members:  # within resident(): what is written from here on is the user's
            session.queue.drain()
            session.data.live.rebase()
        return False


def _outlast(guarded: Guarded) -> tuple[Decision | None, BaseException | None]:
    """What the device decided, and what interrupted the wait, which is most of a step: what was started comes to its end
    first."""
    try:
        return guarded.decision(), None
    except BaseException as interrupt:
        return guarded.decision(), interrupt
