"""Backward passes: what is looked at before one, and what becomes of a step whose backward raises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.engine.held import EngineCore, alone
from ebbtide.engine.optimizer import EngineOptimizer
from ebbtide.engine.own_backward import OwnBackward
from ebbtide.errors import ConfigError, NonFiniteError, StateError, UnsupportedError
from ebbtide.runtime.distributed.agreement import LOSS
from ebbtide.runtime.gradients.stand_ins import leading
from ebbtide.runtime.updates.loss_scale import LossScaler


class Backpropagation(EngineCore):
    optimizer: EngineOptimizer
    _scaler: LossScaler | None
    _own_backward: OwnBackward

    @alone
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backpropagates; gradients are held until `step` (or consumed at once: `updates = "in-backward"`)."""
        self._check()
        _refuse_loss(loss)
        with self._reversing(loss):
            with torch.inference_mode(False), torch.enable_grad():  # the caller's mode does not matter
                scaled = loss if self._scaler is None else loss * self._scaler.scale
            with leading(scaled) as root:
                root.backward(retain_graph=retain_graph)

    @contextmanager
    def _reversing(self, loss: torch.Tensor | None) -> Iterator[None]:
        """Around autograd's backward. `loss`: None where the user's code called `loss.backward()`."""
        root = loss
        if loss is None:
            self._refuse_unseen_loss()
            loss = torch.zeros((), device=self._session.backend.device)  # gradients tell whether it is finite
        loss = loss.detach()
        session = self._session
        session.refuse_swapped()
        self._notice_dropped()
        if self._clip_once is not None:
            raise StateError(
                "a backward pass after engine.clip_grad_norm_(): the clip is for the gradients of the whole step. Call "
                "it after the last backward, before engine.step(); engine.zero_grad() drops them. Nothing was changed"
            )
        in_backward = self.config.updates == "in-backward"
        if in_backward:
            self._before_in_backward(loss)
        session.updates.regroup(self.optimizer.param_groups)
        self._losses.append(loss)
        before, captured = session.updates.applied, session.updates.sink.captured
        outside = session.unmanaged.arrived()
        try:
            with session.reversing(True, root is None, root):
                yield
        except BaseException as error:
            # What arrived before the exception is part of no gradient: the step starts anew.
            if session.updates.sink.captured != captured or session.unmanaged.arrived() != outside:
                self._clear()
            elif self._losses:
                self._losses.pop()
            if in_backward and session.updates.applied != before:
                self._broken = "an exception inside backward left some parameters updated and others not"
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

    def _refuse_unseen_loss(self) -> None:
        """Before a backward whose loss the engine was not given."""
        self._check()
        if self._scaler is not None:
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
        self._session.meet(LOSS, self.steps)
        self._session.catch_up_averages()
        for value in self._session.of_all_ranks([loss]):
            if self.config.nonfinite == "stop" and not math.isfinite(value):
                self._session.abandon()  # nobody goes back from it
                raise NonFiniteError(f"step {self.steps + 1}: the loss is {value}; nothing was updated")
        self._session.updates.scale = 1.0 / (self._scaler.scale if self._scaler else 1.0)

    def _under_way(self) -> bool:
        """Whether a pass runs, forward or backward: then a call of the module is part of it."""
        if torch._C._current_graph_task_id() >= 0:
            return self._session.interceptor.scopes > 0
        with self._alone():
            self._own_backward.give_up()
            return self._session.interceptor.scopes > 0

    def _accumulating(self) -> bool:
        """Whether the backward that autograd runs now brings gradients to parameters, rather than to what
        torch.autograd.grad was asked for."""
        data = self._session.data
        outside = self._session.unmanaged.parameters.values()
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            for parameter in (*data.parameters, *outside):
                if parameter.requires_grad and _is_reached(parameter):
                    return True
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
        raise StateError(
            "the loss hangs on a tensor of a pass that was only imagined: forward, or a hook, keeps what it "
            "computes where neither its module's attributes nor its own closure and globals lead. Keep it there"
        )
    if loss.grad_fn is None:
        raise ConfigError(
            "the loss does not depend on any parameter that requires gradients: was it computed under torch.no_grad(), "
            "or from outputs that were detached? Nothing was changed"
        )
