"""Forward and backward passes: what is looked at before one, and what becomes of a step whose backward raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.checkpoint.values import names
from ebbtide.engine.core import EngineCore
from ebbtide.errors import ConfigError, NonFiniteError, StateError, UnsupportedError, imagined_kept
from ebbtide.runtime.distributed.agreement import LOSS
from ebbtide.runtime.gradients.stand_ins import leading
from ebbtide.runtime.movement.plan_cursor import IDLE
from ebbtide.runtime.planning.calls import call_of
from ebbtide.runtime.planning.earlier_passes import ways_back


class Passes:
    def __init__(self, core: EngineCore) -> None:
        self._core, self._session, self._config = core, core.session, core.config

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        if torch._C._current_graph_task_id() >= 0 and session.interceptor.scopes:
            return function(*args, **kwargs)  # a checkpoint around the engine's call computes it again
        # Nothing is half-done in an evaluation.
        with self._core.in_pass() if torch.is_grad_enabled() else self._core.in_call():
            return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        idle = session.idle
        found = self._forward(function, args, kwargs)
        if not session.planning.roomy:
            session.outputs.add(found)
        if not session.idle and torch.is_grad_enabled():
            ways = ways_back(found)
            if idle and ways == []:
                session.abandon()  # no backward can reach it, so the pass would never end
            session.waiting.made(ways)
            self._core.own_backward.watch(found, self)
        return found

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._core.check()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured: chunks move between replays, which a graph cannot follow. Run the "
                'engine outside torch.cuda.graph(), and torch.compile without mode="reduce-overhead"'
            )
        session = self._session
        session.reclaim()
        call = call_of(self._core.module, function, args, kwargs)
        if function is not self._core.module:
            call = replace(call, function=partial(session.interceptor.around, function))
        if not torch.is_grad_enabled():
            with session.evaluating(call):
                return call.run()
        session.refuse_swapped()
        if session.interceptor.changed:
            names(session)
            session.interceptor.looked_at()
        session.begin_training(call)
        with session.running():
            return call.run()

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        self._core.check()
        _refuse_loss(loss)
        with self.reversing(loss):
            with torch.inference_mode(False), torch.enable_grad():  # the caller's mode does not matter
                scaled = loss if self._core.scaler is None else loss * self._core.scaler.scale
            with leading(scaled) as root:
                root.backward(retain_graph=retain_graph)

    @contextmanager
    def reversing(self, loss: torch.Tensor | None) -> Iterator[None]:
        """Around autograd's backward. `loss`: None where the user's code called `loss.backward()`."""
        with self._core.in_pass(), self._reversing(loss):
            yield

    @contextmanager
    def _reversing(self, loss: torch.Tensor | None) -> Iterator[None]:
        root = loss
        if loss is None:
            self._refuse_unseen_loss()
            loss = torch.zeros((), device=self._session.backend.device)  # gradients tell whether it is finite
            self._core.losses_known = False
        loss = loss.detach()
        session = self._session
        session.refuse_swapped()
        self._core.notice_dropped()
        if self._core.clip_once is not None:
            raise StateError(
                "a backward pass after engine.clip_grad_norm_(): the clip is for the gradients of the whole step. Call "
                "it after the last backward, before engine.step(); engine.zero_grad() drops them. Nothing was changed"
            )
        in_backward = self._config.updates == "in-backward"
        if in_backward:
            self._before_in_backward(loss)
        session.regroup(self._core.optimizer.param_groups)
        self._core.losses.append(loss)
        before, captured = session.updates.applied, session.updates.sink.captured
        outside = session.unmanaged.arrived()
        try:
            with session.reversing(True, root is None, root):
                yield
        except BaseException as error:
            # What arrived before the exception is part of no gradient: the step starts anew.
            if session.updates.sink.captured != captured or session.unmanaged.arrived() != outside:
                self._core.clear()
            elif self._core.losses:
                self._core.losses.pop()
            if in_backward and session.updates.applied != before:
                self._core.broken = "an exception inside backward left some parameters updated and others not"
            said = str(error) if isinstance(error, RuntimeError) else ""
            if session.updates.applied != before and "modified by an inplace operation" in said:
                raise UnsupportedError(
                    "a weight was wanted in backward after its gradient had updated it (shared by reentrant "
                    'checkpoints?), which updates = "in-backward" cannot take back; use updates = "exact"'
                ) from error
            if "backward through the graph a second time" in said:
                raise UnsupportedError(
                    "a second backward through the same graph: its tensors are gone. Run forward again, or add the "
                    "losses and call backward once, or keep the graph: backward(retain_graph=True)"
                ) from error
            raise

    # -- in pieces ------------------------------------------------------------------------------------

    def forward_of_pass(self, *args: Any, **kwargs: Any) -> Any:
        self._session.imagining.obstacle = "a pipeline's schedule runs the pass, in an order of its own"
        try:
            with self._core.in_pass():
                return self._forward(self._core.module, args, kwargs)
        except BaseException:
            self._core.clear()
            raise

    def abandon_pass(self) -> None:
        if self._session.cursor.phase != IDLE:
            self._session.abandon()
            self._core.clear()

    @contextmanager
    def backpropagating(self, last: bool) -> Iterator[None]:
        self._core.check()
        if self._config.updates == "in-backward" or self._core.scaler is not None:
            raise UnsupportedError(
                "a backward that somebody else starts brings gradients whose loss the engine does not see: expected "
                f'updates = "exact" and no loss scaling, found updates = "{self._config.updates}" and precision = '
                f'"{self._config.precision}"'
            )
        session = self._session
        session.regroup(self._core.optimizer.param_groups)
        try:
            with self._core.in_pass(), session.reversing(last):
                yield
        except BaseException:
            self._core.clear()
            raise

    # -- what is looked at ----------------------------------------------------------------------------

    def _refuse_unseen_loss(self) -> None:
        """Before a backward whose loss the engine was not given."""
        self._core.check()
        if self._core.scaler is not None:
            raise UnsupportedError(
                'loss.backward() with precision = "fp16" leaves out the scale that keeps small gradients from being 0: '
                "call engine.backward(loss) in its place. Nothing was changed"
            )

    def _before_in_backward(self, loss: torch.Tensor) -> None:
        if self._session.micro:
            raise StateError(
                'updates = "in-backward": the gradients of this step were already consumed; call engine.step() before '
                "the next backward"
            )
        self._core.meet_alike(LOSS)
        self._session.catch_up_averages()
        for value in self._session.of_all_ranks([loss]):
            if self._config.nonfinite == "stop" and not math.isfinite(value):
                self._session.abandon()  # no backward follows
                raise NonFiniteError(f"step {self._core.number}: the loss is {value}; nothing was updated")
        self._session.updates.scale = 1.0 / (self._core.scaler.scale if self._core.scaler else 1.0)

    def under_way(self) -> bool:
        """Whether a pass runs, forward or backward: then a call of the module is part of it."""
        if torch._C._current_graph_task_id() >= 0:
            return self._session.interceptor.scopes > 0
        with self._core.turn():
            self._core.own_backward.give_up()
            return self._session.interceptor.scopes > 0

    def accumulating(self) -> bool:
        """Whether the backward that autograd runs now brings gradients to parameters, rather than to what
        torch.autograd.grad was asked for."""
        data = self._session.data
        outside = self._session.unmanaged.parameters.values()
        trained = False
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            for parameter in (*data.parameters, *outside):
                trained = trained or parameter.requires_grad
                if parameter.requires_grad and _is_reached(parameter):
                    return True
        # Where all parameters are frozen the backward is for an input of the model's.
        return trained and _recomputes(torch._C._current_autograd_node())


def _recomputes(node: Any) -> bool:
    """Whether the backward that runs now comes from a node to a reentrant checkpoint: its parameters are reached by a
    backward within."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if node.name() == "CheckpointFunctionBackward" and torch._C._will_engine_execute_node(node):
            return True
        following = {other for other, _ in node.next_functions} - seen
        todo += following
        seen |= following
    return False


def _is_reached(parameter: torch.Tensor) -> bool:
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # it is what torch.autograd.grad was asked for


def _refuse_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise ConfigError(f"backward takes the loss, a tensor with one element; it was given {found}")
    if isinstance(loss, FakeTensor):
        raise imagined_kept("the loss")
    if loss.grad_fn is None:
        raise ConfigError(
            "the loss does not depend on any parameter that requires gradients: was it computed under torch.no_grad(), "
            "or from outputs that were detached? Nothing was changed"
        )
