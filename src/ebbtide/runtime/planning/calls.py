"""What a pass runs: a function over the engine's module, and what it is given. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ebbtide.runtime.planning.input_shapes import resized


@dataclass(frozen=True, eq=False)
class Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: str
    """Passes with the same one have the same plan."""

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)


def call_of(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """A call of `function`, which is the engine's module or works with it."""
    name = "" if function is module else _name_of(function)
    return Call(function, args, kwargs, name + signature_of(args, kwargs, module.training))


def _name_of(function: Any) -> str:
    while hasattr(function, "func"):  # a partial
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}|"


def signature_of(args: tuple[object, ...], kwargs: dict[str, object], training: bool) -> str:
    """What distinguishes one iteration's input from another's: shapes and dtypes, simple values."""
    parts: list[str] = ["train" if training else "eval"]

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            parts.append(f"{tuple(value.shape)}{value.dtype}")
        elif isinstance(value, dict):
            for key, item in value.items():
                parts.append(str(key))
                add(item)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for item in value:
                add(item)
        elif value is None or isinstance(value, (bool, int, str)):
            parts.append(repr(value))
        else:
            parts.append(type(value).__name__)

    add(args)
    add(kwargs)
    return "|".join(parts)


def with_sizes(call: Call, sizes: tuple[tuple[int, ...], ...], device: torch.device) -> Call | None:
    """The same call with tensors of other sizes, which have no values; None where they are within what cannot be made
    again, or not where the module computes."""
    left = iter(sizes)

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.device != device or value.requires_grad:
                raise LookupError
            return torch.empty(next(left), dtype=value.dtype, device="meta")
        if type(value) is dict:
            return {key: other(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(other(item) for item in value)
        if isinstance(value, Sequence | dict) and not isinstance(value, str):
            raise LookupError
        return value

    try:
        args, kwargs = other(call.args), other(call.kwargs)
    except LookupError:
        return None
    return Call(call.function, args, kwargs, resized(call.signature, sizes))
