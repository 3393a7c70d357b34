"""What a pass that is only imagined changes where the user's code keeps things is put back after it.

A forward pass and its hooks run twice where it is imagined: a list that features are appended to, a counter in a
closure, a hook that removes itself would know. So everything of that kind that can be reached is as it was before:
attributes of modules and what they hold, and what the functions of modules and hooks close over, are bound to, or name
among their globals. What is reached otherwise (a registry that a library asks for) is not.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

MOST = 100_000
"""Entries that are looked at: a hook may be bound to a trainer that has a data set."""

TENSORS = 1_000
"""Tensors that are imagined for them."""

_APART = {"torch", "ebbtide"}
"""Packages whose functions and objects are no business of the user's."""
_CONTAINERS = {dict, list, set, deque, OrderedDict, defaultdict, Counter}
"""No kinds of them, which may do more than hold when they are asked (load what they name, say)."""
_MISSING = object()


@contextmanager
def unchanged(module: nn.Module, imagined: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Tensors that the modules' attributes and the functions' closures hold are `imagined` ones meanwhile: an operator
    that is given real tensors only (a counter of batches) runs for real under a fake mode, and would write."""
    gradients = [(p, p.grad) for p in module.parameters()]
    reach = _Reach()
    for child in module.modules():
        reach.module(child)
    try:
        reach.replace(imagined)
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        reach.put_back()


class _Reach:
    """Containers that a pass may change, each with what it held."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, Any, bool]] = []
        """Container, its contents, and whether tensors in it are replaced."""
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._left = MOST

    # -- finding --------------------------------------------------------------------------------------

    def module(self, module: nn.Module) -> None:
        """Its attributes; parameters are replaced by whoever imagines, and its children are modules of their own."""
        attributes = vars(module)
        self._hold(attributes, True)
        for name in ("_buffers", "_modules"):
            self._hold(attributes[name], name == "_buffers")
        for name, value in attributes.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                self._value(value, True)
        for kind in type(module).__mro__:
            if _package(kind.__module__) not in _APART:
                for value in vars(kind).values():
                    self._code(value)

    def _hold(self, container: Any, replaced: bool) -> bool:
        """False where it is known, or too large to be."""
        if id(container) in self._seen or (count := _length(container)) > self._left:
            return False
        self._seen.add(id(container))
        self._left -= count + 1
        contents = container.cell_contents if isinstance(container, CellType) else container.copy()
        self._held.append((container, contents, replaced))
        return True

    def _value(self, value: Any, replaced: bool) -> None:
        """`replaced`: nobody else looks at it while a pass is imagined."""
        if type(value) in _CONTAINERS:
            if self._hold(value, replaced):
                for one in list(value.values() if isinstance(value, dict) else value):
                    self._value(one, replaced)
        elif isinstance(value, tuple):
            for one in value:
                self._value(one, replaced)
        elif callable(value) and not isinstance(value, type | nn.Module) and _is_code(value):
            self._code(value)
        elif _is_object(value) and self._hold(vars(value), replaced):
            for one in list(vars(value).values()):
                self._value(one, replaced)

    def _code(self, function: Any) -> None:
        """What a function changes without being given it."""
        if isinstance(function, partial):
            self._code(function.func)
            self._values((*function.args, *function.keywords.values()))
            return
        if isinstance(function, MethodType):
            self._value(function.__self__, False)
            function = function.__func__
        if not isinstance(function, FunctionType) or id(function) in self._seen:
            return
        if _package(function.__module__) in _APART:
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            if _is_bound(cell) and self._hold(cell, True):
                self._value(cell.cell_contents, True)
        self._values(function.__defaults__ or ())
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, _MISSING)
            if value is not _MISSING:
                self._global(function, name, value)

    def _values(self, values: Iterable[Any]) -> None:
        for value in values:
            self._value(value, False)

    def _global(self, function: FunctionType, name: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            if _package(value.__module__) == _package(function.__module__):
                self._code(value)
        elif not isinstance(value, type | ModuleType | nn.Module):
            self._globals.append((function.__globals__, name, value))
            if type(value) in _CONTAINERS:
                self._value(value, False)

    # -- changing and putting back --------------------------------------------------------------------

    def replace(self, imagined: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A tensor that is held twice is one tensor."""
        known: dict[int, torch.Tensor] = {}

        def other(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                return value
            if id(value) not in known:
                if len(known) == TENSORS:
                    return value
                known[id(value)] = imagined(value)
            return known[id(value)]

        for container, contents, replaced in self._held:
            if not replaced or isinstance(container, set):
                continue
            if isinstance(container, CellType):
                container.cell_contents = other(contents)
                continue
            for key, value in contents.items() if isinstance(container, dict) else enumerate(contents):
                if (found := other(value)) is not value:
                    container[key] = found

    def put_back(self) -> None:
        for container, contents, _ in self._held:
            if isinstance(container, CellType):
                container.cell_contents = contents
            elif not _same(container, contents):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(contents)
        for names, name, value in self._globals:
            if names.get(name, _MISSING) is not value:
                names[name] = value


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _length(container: Any) -> int:
    return 1 if isinstance(container, CellType) else len(container)


def _is_bound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not _MISSING
    except ValueError:
        return False


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _is_object(value: Any) -> bool:
    """One of the user's classes, with attributes."""
    if isinstance(value, type | ModuleType | nn.Module | torch.Tensor):
        return False
    package = _package(type(value).__module__)
    if package in _APART or (package in sys.stdlib_module_names and package != "types"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _same(container: Any, contents: Any) -> bool:
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return bool(container == contents)
    if isinstance(container, dict):
        return all(a is b and container[a] is contents[b] for a, b in zip(container, contents, strict=True))
    return all(a is b for a, b in zip(container, contents, strict=True))
