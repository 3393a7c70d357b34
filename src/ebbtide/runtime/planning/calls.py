"""What a pass runs: a function over the engine's module, and what it is given. It decides nothing."""

from __future__ import annotations

import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ebbtide.runtime.planning.input_shapes import SWITCHES, resized

DEPTH = 4
"""How deep objects of the user's are looked into."""
MANY = 256
"""Of a signature that is longer, nothing that is in objects: they are no batch."""
TEXTS = (str, bytes, bytearray, memoryview, range)
"""Sequences that are looked at as a whole."""
PLAIN = (*TEXTS, int, float, complex, Enum, type, type(None), torch.dtype, torch.device, torch.layout)


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
    given = signature_of(args, kwargs, module.training)
    return Call(function, args, kwargs, f"{name}{given}|{_switches(module)}")


def _name_of(function: Any) -> str:
    while hasattr(function, "func"):  # a partial
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", "")  # lambdas share a name
    return f"{named.__module__}.{named.__qualname__}{line}|"


# -- signatures --------------------------------------------------------------------------------------------


def _switches(module: nn.Module) -> str:
    """A number of what loops switch from pass to pass, by module and parameter: its mode, and where gradients are wanted
    whether it is checkpointed, and whether it is trained."""
    trains, found = torch.is_grad_enabled(), bytearray()
    seen, todo = set[int](), [module]
    while todo:
        child = todo.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        checkpointed = child.__dict__.get("gradient_checkpointing") is True
        found.append(bool(child.training) + 2 * checkpointed)
        if trains:
            found.extend(p.requires_grad for p in child._parameters.values() if p is not None)
        todo.extend(part for part in child._modules.values() if part is not None)
    return f"{zlib.crc32(found):08x}{SWITCHES}"


def signature_of(args: tuple[object, ...], kwargs: dict[str, object], training: bool) -> str:
    """What distinguishes one iteration's input from another's: shapes and dtypes, simple values."""
    parts: list[str] = ["train" if training else "eval"]
    around: list[int] = []
    """The containers and objects that a value is in, by id."""

    def add(value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            parts.append(f"{tuple(value.shape)}{value.dtype}")
        elif value is None or isinstance(value, bool | int | str | Enum):
            parts.append(repr(value).replace("|", "/"))
        elif id(value) in around:
            parts.append("...")
        elif isinstance(value, Sequence) and not isinstance(value, TEXTS):
            add_all(value, (("", item) for item in value), depth)
        elif isinstance(value, dict | UserDict):
            add_all(value, value.items(), depth)
        elif depth and (held := attributes(value)):
            parts.append(type(value).__name__)
            add_all(value, held.items(), depth - 1)
        else:
            parts.append(_named(value))

    def add_all(holder: object, items: Iterable[tuple[object, object]], depth: int) -> None:
        around.append(id(holder))
        for key, item in items:
            if depth < DEPTH and len(parts) > MANY:
                break
            if key != "":
                parts.append(str(key).replace("|", "/"))
            add(item, depth)
        around.pop()

    add(args, DEPTH)
    add(kwargs, DEPTH)
    return "|".join(parts)


def _named(value: object) -> str:
    name = type(value).__name__
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    except Exception:  # a property of the user's
        return name
    return f"{name}{shape}{dtype}" if isinstance(shape, tuple) else name  # an array


def with_sizes(call: Call, sizes: tuple[tuple[int, ...], ...], device: torch.device) -> Call | None:
    """The same call with tensors of other sizes, which have no values; None where they are within what cannot be made
    again, or not where the module computes."""
    left = iter(sizes)

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.device != device or value.requires_grad:
                raise LookupError
            size = next(left, None)
            if size is None:
                raise LookupError
            return torch.empty(size, dtype=value.dtype, device="meta")
        if type(value) is dict:
            return {key: other(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(other(item) for item in value)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
            raise LookupError
        return value

    try:
        args, kwargs = other(call.args), other(call.kwargs)
    except LookupError:
        return None
    if next(left, None) is not None:
        return None
    return Call(call.function, args, kwargs, resized(call.signature, sizes))


# -- what lies in containers and objects --------------------------------------------------------------------


def attributes(value: object) -> dict[str, Any]:
    """An object's own, by name. What can be called is not looked into: it may lead to all of a program."""
    if isinstance(value, (*PLAIN, nn.Module, ModuleType)) or callable(value):
        return {}
    try:
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        found = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
        return found | getattr(value, "__dict__", {})
    except Exception:  # a property of the user's
        return {}


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    own = kind.__name__.lstrip("_")
    return tuple(f"_{own}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names)


def leaves(found: object) -> Iterator[Any]:
    """Tensors, plain values, and whatever cannot be looked into."""
    seen: set[int] = set()
    todo = [(found, DEPTH)]
    while todo:
        value, left = todo.pop()
        if isinstance(value, (torch.Tensor, *PLAIN)):
            yield value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        held = attributes(value) if left else {}
        todo += [(one, left - 1) for one in held.values()]
        if isinstance(value, Mapping):
            todo += [(one, left) for one in value.values()]  # before attributes, which may be the same
        elif isinstance(value, Sequence | set | frozenset):
            todo += [(one, left) for one in value]
        elif not held:
            yield value


def tensors(found: object) -> Iterator[torch.Tensor]:
    """All that lie in it."""
    return (leaf for leaf in leaves(found) if isinstance(leaf, torch.Tensor))
