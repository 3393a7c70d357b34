"""Passes of small models, imagined once a process instead of once an engine.

A symbolic trace is a function of the module, of what the engine knows of its parameters and of the batch's shapes;
budgets, eviction and what a disk does have no part in it. Tests about those make many engines (each refused budget is
one), and took a third of their time to imagine the same pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any

import torch
from torch import nn

import zoo
from ebbtide.planner.record import Record
from ebbtide.tracing.meter import storage_bytes
from ebbtide.tracing.operator_cost import tensors_in

PLAIN = (bool, int, float, str, type(None))

AMPLE = 1 << 17
"""More bytes than what such a pass computes for real takes: with as many free, it does not matter how many are."""


def once(
    imagine: Callable[..., Record], found: dict[Hashable, Record] | None = None
) -> Callable[..., Record]:
    """`found`: what has been imagined before; others may share it."""
    found = {} if found is None else found

    def remembered(
        module: nn.Module, *given: Any, saved: bool, free: float, function: Any, **others: Any
    ) -> Record:
        parameters, args, kwargs, signature, fixed, *_ = given
        what = zoo.built(module) or _made_like(module)
        if (
            what is None
            or _hooked(module)
            or function is not module
            or free - fixed - storage_bytes(tensors_in((args, kwargs))) < AMPLE
        ):
            return imagine(module, *given, saved=saved, free=free, function=function, **others)
        key = (what, parameters, signature, fixed, saved, torch.is_grad_enabled())
        if key not in found:
            found[key] = imagine(module, *given, saved=saved, free=free, function=function, **others)
        return found[key]

    return remembered


def _made_like(module: nn.Module) -> Hashable:
    """What a module is but for its values: two that agree in it compute alike. None where it has more than numbers and
    words to compute by."""
    found = []
    for name, part in module.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(part).items() if key not in _EMPTY and not _is_ours(value)}
        if not all(isinstance(value, PLAIN) for value in own.values()):
            return None
        parameters = tuple(id(value) for _, value in part.named_parameters(recurse=False))
        buffers = tuple((key, value.shape, value.dtype) for key, value in part.named_buffers(recurse=False))
        found.append((name, type(part), tuple(own.items()), parameters, buffers))
    places: dict[int, int] = {}
    return tuple(
        (*rest, tuple(places.setdefault(one, len(places)) for one in parameters), buffers)
        for *rest, parameters, buffers in found
    )


def _hooked(module: nn.Module) -> bool:
    """Whether a test has put hooks on it, which may do anything."""
    hooks = (
        hook
        for part in module.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )
    names = (getattr(hook, "__module__", "ebbtide").partition(".")[0] for hook in hooks)
    return any(name not in ("ebbtide", "functools", "torch", "transformers") for name in names)


def _is_ours(value: Any) -> bool:
    """Whether the engine has set it."""
    return isinstance(value, MethodType) or type(value).__module__.startswith("ebbtide.")


_EMPTY = frozenset(vars(nn.Module())) - {"training"}
