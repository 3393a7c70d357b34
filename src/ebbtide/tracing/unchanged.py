"""What a pass that is only imagined changes where the user's code keeps things is put back after it.

A forward pass and its hooks run twice where it is imagined: a list that features are appended to, a counter in a
closure, a hook that removes itself would know. So everything of that kind that can be reached is as it was before:
attributes of modules and what they hold, and what the functions of modules and hooks close over, are bound to, or name
among their globals. What is reached otherwise (a registry that a library asks for) is not.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MOST = 100_000
"""Entries that are looked at beside modules' attributes: a hook may be bound to a trainer that has a data set."""

TENSORS = 1_000
"""Tensors that are imagined for what is not itself an attribute or a buffer."""

_APART = {"torch", "ebbtide"}
"""Packages whose functions and objects are no business of the user's."""
_CONTAINERS = {dict, list, set, deque, OrderedDict, defaultdict, Counter}
"""No kinds of them, which may do more than hold when they are asked (load what they name, say)."""
_ELSEWHERE = ("_parameters", "_buffers", "_modules")
_MISSING = object()


@contextmanager
def unchanged(
    module: nn.Module, imagined: Callable[[torch.Tensor], torch.Tensor], function: Callable[..., Any]
) -> Iterator[None]:
    """Tensors that the modules' attributes and the functions' closures hold are `imagined` ones meanwhile: an operator
    that is given real tensors only (a counter of batches) runs for real under a fake mode, and would write.
    `function`: what is called, the module or what works with it."""
    gradients = [(p, p.grad) for p in module.parameters()]
    reach = _Reach()
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    for one in {module, owner} if isinstance(owner, nn.Module) else {module}:
        for child in one.modules():
            reach.module(child)
    if function is not module:
        reach.function(function)
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
        self._held: list[tuple[Any, Any, float]] = []
        """Container, its contents, and up to how many replaced tensors those in it are."""
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._left = MOST
        self._todo: list[tuple[Any, float]] = []

    # -- finding --------------------------------------------------------------------------------------

    def module(self, module: nn.Module) -> None:
        """Its attributes; parameters are replaced by whoever imagines, and its children are modules of their own."""
        attributes = vars(module)
        for container in (attributes, module._buffers):
            self._hold(container, math.inf)
        self._hold(module._modules, 0)
        self._todo += [(attributes[name], TENSORS) for name in attributes if name not in _ELSEWHERE]
        for kind in type(module).__mro__:
            if id(kind) not in self._seen and _package(kind) not in _APART:
                self._seen.add(id(kind))
                for value in vars(kind).values():
                    self._code(value)
        while self._todo:
            self._value(*self._todo.pop())

    def function(self, function: Callable[..., Any]) -> None:
        """What it changes, and the objects of those."""
        self._code(function)
        while self._todo:
            self._value(*self._todo.pop())

    def _hold(self, container: Any, replaced: float) -> None:
        self._seen.add(id(container))
        contents = container.cell_contents if isinstance(container, CellType) else container.copy()
        self._held.append((container, contents, replaced))

    def _is_new(self, container: Any) -> bool:
        if id(container) in self._seen or len(container) > self._left:
            return False
        self._left -= len(container)
        return True

    def _value(self, value: Any, replaced: float) -> None:
        """`replaced`: none where others may look at it while a pass is imagined."""
        if type(value) in _CONTAINERS:
            if self._is_new(value):
                self._hold(value, replaced)
                self._todo += [
                    (one, replaced) for one in (value.values() if isinstance(value, dict) else value)
                ]
        elif isinstance(value, tuple):
            self._todo += [(one, replaced) for one in value]
        elif isinstance(value, FunctionType | MethodType | partial):
            self._code(value)
        elif _is_object(value) and self._is_new(vars(value)):
            if not isinstance(value, SimpleNamespace) and not is_dataclass(value):
                replaced = 0  # a trainer, say, whose loader has threads
            self._hold(vars(value), replaced)
            self._todo += [(one, replaced) for one in vars(value).values()]

    def _code(self, function: Any) -> None:
        """What a function changes without being given it."""
        while isinstance(function, partial | MethodType):
            if isinstance(function, partial):
                self._todo += [(one, 0) for one in (*function.args, *function.keywords.values())]
                function = function.func
            else:
                self._todo.append((function.__self__, 0))
                function = function.__func__
        if (
            not isinstance(function, FunctionType)
            or id(function) in self._seen
            or _package(function) in _APART
        ):
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen and _is_bound(cell):
                self._hold(cell, TENSORS)
                self._todo.append((cell.cell_contents, TENSORS))
        self._todo += [(one, 0) for one in function.__defaults__ or ()]
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, _MISSING)
            if isinstance(value, FunctionType):
                if _package(value) == _package(function):
                    self._todo.append((value, 0))
            elif value is not _MISSING and not isinstance(value, type | ModuleType | nn.Module):
                self._globals.append((function.__globals__, name, value))
                if type(value) in _CONTAINERS:
                    self._todo.append((value, 0))

    # -- changing and putting back --------------------------------------------------------------------

    def replace(self, imagined: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A tensor that is held twice is one tensor."""
        known: dict[int, torch.Tensor] = {}

        def other(value: Any, most: float) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                return value
            if id(value) not in known:
                if len(known) >= most:
                    return value
                known[id(value)] = imagined(value)
            return known[id(value)]

        for container, contents, most in self._held:
            if isinstance(container, CellType):
                container.cell_contents = other(contents, most)
            elif most and not isinstance(container, set):
                for key, value in contents.items() if isinstance(container, dict) else enumerate(contents):
                    if (found := other(value, most)) is not value:
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


def _package(value: Any) -> str:
    """Where a class or a function is from."""
    return (value.__module__ or "").partition(".")[0]


def _is_bound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not _MISSING
    except ValueError:
        return False


def _is_object(value: Any) -> bool:
    """One of the user's classes, with attributes."""
    kind = type(value)
    if issubclass(kind, type | ModuleType | nn.Module | torch.Tensor) or _package(kind) in _APART:
        return False
    if _package(kind) in sys.stdlib_module_names and kind is not SimpleNamespace:
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
