"""A model that goes from one adapter to the next, as it goes from one stock Trainer to another.

No framework says that its Trainer is done with a model. So the engine keeps the model, and gives it back, with its
weights, when the next adapter takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.engine import Engine
from ebbtide.engine.tracebacks import show_users_lines
from ebbtide.errors import warn_user

PREPARED = "_is_accelerate_prepared"
"""The mark by which Accelerator.prepare leaves a module or an optimizer as it is."""


class HeldEngine(Engine):
    """The engine of an adapter: `release()` gives a bare module back, whether the adapter or the user calls it."""

    def save_as_stock(self, folder: Path, keep: int = 1) -> Path:
        """Also in the midst of a step, where frameworks save as well: when they are told to end, or evaluate there."""
        with self._core.turn():
            if self.gradients_held:
                warn_user(
                    "a checkpoint is saved in the midst of a step: the gradients of its first micro-batches are not in "
                    "it, as in those of stock; a run that resumes from it goes on without them"
                )
            return self._checkpoints.save(folder, None, keep, background=False, within_step=True)

    def release(self) -> nn.Module:
        module = super().release()
        hold = _holds.pop(module, None)
        if hold is not None:
            _thaw(hold.thawed)
        vars(module).pop(PREPARED, None)
        return module


@dataclass(frozen=True)
class _Hold:
    engine: weakref.ref[HeldEngine]
    thawed: list[nn.Parameter]
    """Parameters that required gradients before a model without an optimizer was frozen."""


_holds: weakref.WeakKeyDictionary[nn.Module, _Hold] = weakref.WeakKeyDictionary()


def holder(module: nn.Module) -> HeldEngine | None:
    """The engine in which an adapter has the module now."""
    hold = _holds.get(module)
    engine = None if hold is None else hold.engine()
    return engine if engine is not None and not engine.closed else None


def take(
    module: nn.Module,
    settings: Config,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    frozen: bool = False,
) -> HeldEngine:
    """An engine for the module, which another adapter may have until now. A frozen one has no moments."""
    give_back(module)
    thawed = [one for one in module.parameters() if frozen and one.requires_grad]
    try:
        for parameter in thawed:
            parameter.requires_grad_(False)
        show_users_lines()
        engine = HeldEngine(module, settings, optimizer)
    except BaseException:
        _thaw(thawed)
        raise
    _holds[module] = _Hold(weakref.ref(engine), thawed)
    return engine


def give_back(module: nn.Module) -> None:
    """If an adapter has the module, or a part of it, that is an ordinary one from now on."""
    for child in module.modules():
        FirstCall.none_of(child)
        engine = holder(child)
        if engine is not None:
            engine.release()


def mark_prepared(*objects: Any) -> None:
    for one in objects:
        setattr(one, PREPARED, True)


def _thaw(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)


class FirstCall:
    """A module tells at its first call what it is for: `begin` hears of it, and then the call goes on.

    It waits where torch looks before it runs anything of a module, hooks included.
    """

    _waiting: weakref.WeakKeyDictionary[nn.Module, FirstCall] = weakref.WeakKeyDictionary()

    def __init__(self, module: nn.Module, begin: Callable[[nn.Module], None]) -> None:
        self._module, self._begin = weakref.ref(module), begin
        self._compiled = module._compiled_call_impl
        module._compiled_call_impl = self
        self._waiting[module] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        self._begin(module)
        self.none_of(module)
        return module(*args, **kwargs)

    @classmethod
    def awaited(cls, module: nn.Module) -> bool:
        return module in cls._waiting

    @classmethod
    def none_of(cls, module: nn.Module) -> None:
        """The module's first call is one like any other from now on."""
        waiting = cls._waiting.pop(module, None)
        if waiting is not None:
            module._compiled_call_impl = waiting._compiled
