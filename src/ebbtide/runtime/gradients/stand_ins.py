"""What `.grad` shows between backward and the step, where the engine holds the gradients.

A parameter's gradient is in a chunk, or consumed. Were `.grad` None, torch's clip_grad_norm_ would find a norm of 0 and
another optimizer nothing to do, both without a word. So a stand-in is there, as large as the gradient: it says its
shape and dtype, and raises where its values are wanted. Setting `.grad` to None drops the gradient, as in plain
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ebbtide.errors import StateError
from ebbtide.runtime.parameters.parameter_classes import answers, name_of, plainly

_tasks: set[int] = set()
"""autograd's numbers of them, from when each has begun."""


@contextmanager
def leading(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Around such a one: gives what to go back from. Its node is the first that runs, before any of the graph's."""
    with torch.inference_mode(False), torch.enable_grad():
        root, begun = loss.view_as(loss), set[int]()

    def begin(_: object) -> None:
        begun.add(torch._C._current_graph_task_id())
        _tasks.update(begun)

    assert root.grad_fn is not None
    root.grad_fn.register_prehook(begin)
    try:
        yield root
    finally:
        _tasks.difference_update(begun)


def is_led() -> bool:
    """Whether the backward that runs now is one."""
    return torch._C._current_graph_task_id() in _tasks


_LEFT_ALONE = (torch.Tensor.detach_, torch.Tensor.requires_grad_)


class HeldGradient(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in answers():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _LEFT_ALONE:
            return args[0]
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return f"HeldGradient(size={tuple(args[0].shape)}, dtype={args[0].dtype})"
        raise StateError(
            f"{name_of(func)} wants the gradient of a parameter whose gradients the engine holds. To clip: "
            "engine.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_, or the setting `clip`; by "
            "value: the setting `clip_value`. To look at it: with engine.gradients(name). To change it: a hook "
            "(parameter.register_hook). To drop all: engine.optimizer.zero_grad(). To update: engine.step(); another "
            "optimizer or a GradScaler finds nothing to do "
            '(precision = "fp16" has a loss scale of its own). Nothing was changed'
        )


class StandIns:
    """The stand-ins of an engine's parameters."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names, self._parameters = names, parameters
        self._made: dict[int, HeldGradient] = {}
        self._scalars: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._shown: set[int] = set()

    def show(self, members: Iterable[int]) -> None:
        """From now on, for parameters whose gradient is held."""
        with plainly():
            for member in members:
                parameter = self._parameters[member]
                if member in self._shown or parameter.grad is not None:
                    continue
                found = self._made.get(member)
                if found is None or found.dtype != parameter.dtype:
                    found = self._made[member] = self._make(parameter)
                parameter.grad = found
                self._shown.add(member)

    def _make(self, parameter: nn.Parameter) -> HeldGradient:
        kind = parameter.dtype, parameter.device
        if kind not in self._scalars:
            self._scalars[kind] = torch.full((), float("nan"), dtype=kind[0], device=kind[1])
        return self._scalars[kind].expand(parameter.shape).as_subclass(HeldGradient)

    def cover(self, member: int) -> None:
        """Before a gradient comes that the engine did not wait for: it is added to what is held, not to this."""
        if member in self._shown:
            self._shown.discard(member)
            self._parameters[member].grad = None

    def forget(self) -> None:
        """The gradients are dropped, or applied."""
        shown, self._shown = self._shown, set()
        with plainly():
            for member in shown:
                if self._parameters[member].grad is self._made[member]:
                    self._parameters[member].grad = None

    def set_by_hand(self, members: Iterable[int]) -> str:
        """Of these, whose stand-ins are hidden, the first that has a gradient all the same; empty where none has."""
        with plainly():
            for member in members:
                parameter = self._parameters[member]
                if parameter.grad is not None and parameter.requires_grad:
                    return self._names[member]
        return ""

    def hide(self) -> set[int]:
        """None is shown any more. Of which parameters the user's code has dropped the gradient meanwhile."""
        if not self._shown:
            return set()
        with plainly():
            found = {member: self._parameters[member].grad for member in self._shown}
        strange = [m for m, one in found.items() if one is not None and one is not self._made[m]]
        if strange:
            raise StateError(
                f"{self._names[strange[0]]}.grad was set by hand, and the engine holds the gradient: that is the one of "
                "the step. engine.gradients(name) shows it; a hook on the parameter (register_hook) changes it; to drop "
                "all call engine.optimizer.zero_grad()"
            )
        self.forget()
        return {member for member, one in found.items() if one is None}
