"""User code's own state is put back after an imagined pass: a forward pass and its hooks run twice where it is
imagined.

What they can reach is held and restored: attributes of modules and what those hold, what functions and hooks close
over, are bound to, or name among their globals. What is reached otherwise (a registry that a library asks for) is not.
"""

from __future__ import annotations

import io
import math
import sys
import sysconfig
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import _lru_cache_wrapper, cache, partial
from itertools import count
from pathlib import Path
from queue import Queue
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.nn.utils import parametrize

from ebbtide.tracing.symbolic.holdings import Cell, ClassAttributes, Holding, Mapping, Names, holding
from ebbtide.tracing.symbolic.muted import aside, muted

MOST = 100_000
"""Entries that are looked at beside modules' attributes: a hook may be bound to a trainer that has a data set."""

TENSORS = 1_000
"""Tensors that are imagined for what is not itself an attribute or a buffer."""

_APART = {"torch", "ebbtide"}
"""Packages whose functions and objects are no business of the user's."""
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict, Counter)
"""What is looked into among a library's globals."""
_ELSEWHERE = ("_parameters", "_buffers", "_modules")
_HOLDERS = (SimpleNamespace, threading.local)
"""Kinds of Python's own that have attributes for others."""


class Reach:
    """`held`: what may change, and up to how many tensors in it are imagined: none where others may look at it while a
    pass is imagined. `files`: those that are open for writing; `bars`: of progress."""

    def __init__(self) -> None:
        self.held: list[tuple[Holding, float]] = []
        self.files: list[Any] = []
        self.queues: list[Queue[Any]] = []
        self.bars: list[Any] = []
        self.gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._seen: set[int] = set()
        self._left = MOST
        self._todo: list[tuple[Any, float]] = []

    def module(self, module: nn.Module) -> None:
        """All that it and its children have."""
        self._module(module, math.inf)
        self._walk()

    def function(self, function: Callable[..., Any]) -> None:
        """What it changes, and the objects of those."""
        self._value(function, 0)
        self._walk()

    def _walk(self) -> None:
        while self._todo:
            self._value(*self._todo.pop())

    def _hold(self, found: Holding, most: float) -> None:
        self.held.append((found, most))
        self._todo += [(one, most) for one in found.values()]

    def _is_new(self, value: Any, entries: int = 1) -> bool:
        if id(value) in self._seen or entries > self._left:
            return False
        self._seen.add(id(value))
        self._left -= entries
        return True

    # -- values ---------------------------------------------------------------------------------------

    def _value(self, value: Any, most: float) -> None:
        if isinstance(value, nn.Module):
            self._module(value, most)
        elif isinstance(value, torch.Tensor | ModuleType):
            return
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, tuple):
            if self._is_new(value, tuple.__len__(value)):
                self._todo += [(one, most) for one in tuple.__iter__(value)]
        elif isinstance(value, FunctionType | MethodType | partial):
            self._code(value)
        elif isinstance(value, io.IOBase):
            if self._is_new(value) and not value.closed and value.writable():
                self.files.append(value)
        elif isinstance(value, Queue):
            if self._is_new(value):
                self.queues.append(value)
        elif isinstance(value, WeakKeyDictionary | WeakValueDictionary):
            self._value(value.data, 0)  # type: ignore[union-attr]
        else:
            self._object(value, most)

    def _object(self, value: Any, most: float) -> None:
        """What it holds itself, and what it has as attributes."""
        kinds: tuple[Any, ...] = (dict, list, set, deque)
        entries = next((kind.__len__(value) for kind in kinds if isinstance(value, kind)), 1)
        if id(value) in self._seen:
            return
        if (found := self._holding(value, entries)) is not None:
            self._hold(found, most)
        if isinstance(value, _lru_cache_wrapper):
            self._code(value.__wrapped__)
        elif _is_object(value) and self._is_new(vars(value), len(vars(value))):
            if not isinstance(value, _HOLDERS) and not is_dataclass(value):
                most = 0  # a trainer, say, whose loader has threads
            self._hold(Mapping(vars(value)), most)
            if _package(type(value)) == "tqdm" and "disable" in vars(value):
                self.bars.append(value)
            if _is_users(type(value).__module__):
                self._class(type(value))

    def _holding(self, value: Any, entries: int) -> Holding | None:
        return holding(value) if self._is_new(value, entries) else None

    # -- modules and classes --------------------------------------------------------------------------

    def _module(self, module: nn.Module, most: float) -> None:
        """Parameters are replaced by what imagines, where they are managed; their gradients are put back anyhow."""
        for child in module.modules():
            if id(child) in self._seen:
                continue
            self._seen.add(id(child))
            attributes = vars(child)
            self.held += [
                (Mapping(attributes), most),
                (Mapping(child._buffers), most),
                (Mapping(child._modules), 0),
            ]
            self.gradients += [(p, p.grad) for p in child._parameters.values() if type(p) is nn.Parameter]
            self._todo += [
                (attributes[name], min(most, TENSORS)) for name in attributes if name not in _ELSEWHERE
            ]
            self._class(type(child))

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if (
                id(one) in self._seen
                or _package(one) in _APART
                or not isinstance(one.__dict__.get("__module__"), str)
            ):
                continue
            self._seen.add(id(one))
            for value in list(vars(one).values()):
                self._code(value)
            if _is_users(one.__module__):
                self._hold(ClassAttributes(one), 0)

    # -- code -----------------------------------------------------------------------------------------

    def _code(self, function: Any) -> None:
        """What a function changes without being given it."""
        while isinstance(function, partial | MethodType | staticmethod | classmethod | property):
            if isinstance(function, partial):
                self._todo += [(one, 0) for one in (*function.args, *function.keywords.values())]
                function = function.func
            elif isinstance(function, MethodType):
                self._todo.append((function.__self__, 0))
                function = function.__func__
            else:
                function = function.fget if isinstance(function, property) else function.__func__
        if isinstance(function, _lru_cache_wrapper):
            self._todo.append((function, 0))
            return
        if (
            not isinstance(function, FunctionType)
            or id(function) in self._seen
            or _package(function) in _APART
        ):
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen and _is_bound(cell):
                self._seen.add(id(cell))
                self._hold(Cell(cell), TENSORS)
        self._todo += [(one, 0) for one in function.__defaults__ or ()]
        self._names(function)

    def _names(self, function: FunctionType) -> None:
        """What it mentions among its globals; what the user's own mentions of the user's own modules, too."""
        mentioned, places = _mentioned(function.__code__), [function.__globals__]
        own = _is_users(function.__module__)
        if own:
            found = [function.__globals__.get(name) for name in mentioned]
            places += [vars(one) for one in found if isinstance(one, ModuleType) and _is_users(one.__name__)]
        for place in places:
            names = mentioned if place is function.__globals__ else mentioned & place.keys()
            self.held.append((Names(place, names), 0))
            for value in [place[name] for name in names if name in place]:
                if isinstance(value, FunctionType):
                    follow = _package(value) == _package(function) or _is_users(value.__module__)
                elif isinstance(value, type):
                    follow = _is_users(value.__module__)
                else:
                    follow = own or type(value) in _CONTAINERS or isinstance(value, _lru_cache_wrapper)
                if follow:
                    self._todo.append((value, 0))


def _mentioned(code: CodeType) -> set[str]:
    """Names of a function and of those within it."""
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _mentioned(inner)
    return found


def _package(value: Any) -> str:
    """Where a class or a function is from."""
    return (value.__module__ or "").partition(".")[0]


@cache
def _is_users(name: str | None) -> bool:
    """Whether a module is the user's own: neither Python's, nor installed, nor ours."""
    package = (name or "").partition(".")[0]
    if name not in sys.modules or package in sys.stdlib_module_names or package in _APART:
        return False
    where = getattr(sys.modules[name], "__file__", None)
    if where is None:
        return package == "__main__"  # a notebook
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    return not any(Path(where).resolve().is_relative_to(one) for one in installed)


def _is_bound(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_object(value: Any) -> bool:
    """One with attributes, of the user's classes or of a library's."""
    kind = type(value)
    if issubclass(kind, type | ModuleType | nn.Module | torch.Tensor) or _package(kind) in _APART:
        return False
    if _package(kind) in sys.stdlib_module_names and not issubclass(kind, _HOLDERS):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def again(value: Any) -> Any:
    """A copy of what is used up by being asked; the value itself where it is no such thing."""
    if isinstance(value, count):
        return count(*value.__reduce__()[1])
    return value


@contextmanager
def unchanged(
    module: nn.Module, imagined: Callable[[torch.Tensor], torch.Tensor], function: Callable[..., Any]
) -> Iterator[None]:
    """Tensors that the modules' attributes and the functions' closures hold are `imagined` ones meanwhile: an operator
    that is given real tensors only (a counter of batches) runs for real under a fake mode, and would write.
    `function`: what is called, the module or what works with it."""
    gradients = [(p, p.grad) for p in module.parameters()]
    reach = Reach()
    reach.module(module)
    if function is not module:
        reach.function(function)
    try:
        with muted(reach.files), aside(reach.queues, reach.bars), _torchs_caches_aside():
            _replace(reach, imagined)
            yield
    finally:
        _put_back(reach, gradients)


@contextmanager
def _torchs_caches_aside() -> Iterator[None]:
    """Where torch keeps tensors of a pass for that pass: `parametrize.cached()`, and weights that autocast has cast."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before
        torch.clear_autocast_cache()


def _put_back(reach: Reach, gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    """All of it, whatever some of it raises."""
    failed: Exception | None = None
    for parameter, gradient in gradients + reach.gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient
    for held, _ in reach.held:
        try:
            held.put_back()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _replace(reach: Reach, imagined: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A tensor that is held twice is one tensor."""
    known: dict[int, torch.Tensor] = {}

    def other(most: float, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            return again(value)
        if id(value) not in known:
            if len(known) >= most:
                return value
            known[id(value)] = imagined(value)
        return known[id(value)]

    for held, most in reach.held:
        if most:
            held.replace(partial(other, most))
