"""The user's module keeps its contract: its `state_dict()` gives real weights, or raises, never placeholders."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ebbtide.checkpoint import values
from ebbtide.errors import BudgetError, ConfigError, StateError, UnsupportedError
from ebbtide.runtime.distributed.ranks import all_or_none, neighbours
from ebbtide.runtime.parameters.parameter_classes import closed, released
from ebbtide.runtime.parameters.plain_copy import PlainCopy
from ebbtide.runtime.parameters.unmanaged import HALVES
from ebbtide.runtime.session import Session
from ebbtide.units import format_size

_held: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules whose parameters an engine has, or had: what is said to whoever wants them."""


def refuse_held(module: nn.Module) -> None:
    for child in module.modules():
        if child in _held:
            raise ConfigError(f"the module {_held[child]}")


def retire(module: nn.Module) -> None:
    """The engine is closed, and the weights went with it: the module raises instead of giving NaN."""

    def refuse(*_: Any) -> NoReturn:
        raise StateError(f"the module {_held[module]}")

    _held[module] = (
        "had its weights in an engine that is closed; build it again, or load it from a checkpoint"
    )
    for parameter in module.parameters():
        closed(parameter, _held[module])
    module.register_forward_pre_hook(refuse, prepend=True)
    for child in module.modules():
        if child._parameters:
            child.register_state_dict_pre_hook(refuse)


def own_values(session: Session) -> dict[str, torch.Tensor]:
    """By name: what a module's parameters would hold without an engine, in the dtypes that they came with."""
    names = values.names(session)
    data, unmanaged = session.data, session.unmanaged
    dtypes = dict(zip(data.names, data.originals, strict=True)) | unmanaged.originals
    ranks = session.ranks
    beside = 1 if ranks is None else neighbours(ranks)[1]
    needed = beside * sum(p.numel() * dtypes[name].itemsize for name, p in session.module.named_parameters())
    with all_or_none(ranks):
        room = session.store.backend.available()["host"]
        if needed > room:
            raise BudgetError(
                f"release: the module's own weights take {format_size(needed)} of this machine's RAM, and "
                f"{format_size(room)} are free",
                tier="host",
                short=needed - room,
                advice="save() and export() write them without holding all of them, and close() ends the engine",
            )
    return {name: _in_full(session, name, dtypes[name]) for name in names}


def _in_full(session: Session, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A value in its dtype; of one that tensor parallelism has split, this process's part."""
    value = values.load(session, name)
    return _rounded(session, value, dtype) if dtype in HALVES and value.dtype != dtype else value.to(dtype)


def hand_back(session: Session, own: Mapping[str, torch.Tensor]) -> None:
    """The engine is closed, and the module an ordinary one: its weights are its own, in RAM like its buffers."""
    data = session.data
    for member, parameter in enumerate(data.parameters):
        parameter.grad = None
        data.give_memory(member, own[data.names[member]])
        released(parameter)
    session.unmanaged.hand_back(own)
    _held.pop(session.module, None)


class _Conversion:
    """In place of a managed module's `_apply`, which `to`, `half` and `cuda` go through, for the whole and for its
    children: it would change placeholders. What changes neither dtype nor device is let through, for trainers call `to`
    freely; so is what forward itself converts (Switch's router does), which computes with what comes of it."""

    def __init__(self, module: nn.Module, sample: torch.Tensor, in_pass: Callable[[], bool]) -> None:
        """`sample`: a parameter of the module's that the engine manages."""
        self._sample, self._module, self._in_pass = sample, module, in_pass
        module._apply = self  # type: ignore[method-assign, assignment]

    def __call__(
        self, function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
    ) -> nn.Module:
        if self._in_pass():
            return type(self._module)._apply(self._module, function, *args, **kwargs)
        before = torch.empty(0, dtype=self._sample.dtype, device=self._sample.device)
        after = function(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise UnsupportedError(
                f"a managed {type(self._module).__name__} cannot be converted from {before.dtype} on {before.device} "
                f"to {after.dtype} on {after.device}: choose precision and device in the config, or convert it before "
                "initialize()"
            )
        return self._module

    def remove(self) -> None:
        self._module.__dict__.pop("_apply", None)


class _Forgetting:
    """In place of a managed module's `zero_grad`: gradients that are held elsewhere go with those in `.grad`."""

    def __init__(self, module: nn.Module, clear: Callable[[bool], None]) -> None:
        self._module, self._own, self._clear = module, module.zero_grad, clear
        module.zero_grad = self  # type: ignore[method-assign]

    def __call__(self, set_to_none: bool = True) -> None:
        self._clear(set_to_none)
        self._own(set_to_none)

    def remove(self) -> None:
        self._module.__dict__.pop("zero_grad", None)


def guard(session: Session, clear: Callable[[bool], None]) -> None:
    """Hooks on every module that owns managed parameters; removed with the interceptor's. `clear` drops gradients."""
    session.interceptor.keep(_Forgetting(session.module, clear))
    _held[session.module] = "is managed by another engine: use that one, or call its release() first"
    member_of = {id(p): i for i, p in enumerate(session.data.parameters)}
    for child in session.module.modules():
        session.interceptor.keep(PlainCopy(child, session.places.all_reside))
        sample = next((p for p in child.parameters() if id(p) in member_of), None)
        if sample is not None:
            session.interceptor.keep(_Conversion(child, sample, lambda: session.interceptor.scopes > 0))

    tied = _Tied(session.module)

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        session.reclaim()
        for name, parameter in module._parameters.items():
            member = member_of.get(id(parameter))
            if member is not None and prefix + name in state:
                value = tied.given(parameter, state)
                if value is None:
                    value = _value(session, member)
                    tied.give(parameter, value)
                state[prefix + name] = value

    def refuse(module: nn.Module, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "load_state_dict() of a managed module would write into placeholders: use engine.load_state_dict(), or "
            "engine.release() first (as before PEFT's load_adapter)"
        )

    for module in session.module.modules():
        if any(id(p) in member_of for p in module._parameters.values()):
            session.interceptor.keep(module.register_state_dict_post_hook(fill))
        if any(id(p) in member_of for p in module.parameters()):  # before anything of it is written
            session.interceptor.keep(module.register_load_state_dict_pre_hook(refuse))


def _value(session: Session, member: int) -> torch.Tensor:
    """A parameter's, in its dtype."""
    name = session.data.names[member]
    value = values.load(session, name)
    dtype = session.data.parameter_chunk(session.data.places[member].chunk).dtype
    return values.whole(session, name, value if dtype == torch.float32 else _rounded(session, value, dtype))


class _Tied:
    """Parameters with several names: in one state_dict they are one tensor, so that who saves it writes it once."""

    def __init__(self, module: nn.Module) -> None:
        count = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        self._given: dict[int, weakref.ref[torch.Tensor] | None] = {
            one: None for one, names in count.items() if names > 1
        }

    def given(self, parameter: Any, state: dict[str, Any]) -> torch.Tensor | None:
        """What `state` has of it already."""
        there = self._given.get(id(parameter))
        value = None if there is None else there()
        return value if value is not None and any(one is value for one in state.values()) else None

    def give(self, parameter: Any, value: torch.Tensor) -> None:
        if id(parameter) in self._given:
            self._given[id(parameter)] = weakref.ref(value)


def _rounded(session: Session, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter that a master stands for."""
    flat = value.as_strided((value.numel(),), (1,))
    out = torch.empty_like(flat, dtype=dtype)
    session.updates.kernels["host"].split(flat, out, flat)
    return out.as_strided(value.shape, value.stride())
