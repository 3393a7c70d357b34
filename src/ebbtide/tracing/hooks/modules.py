"""Module and parameter events: when a module runs, and when somebody else reads its weights."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.tracing.hooks.block_calls import BlockCall, CompiledBlocks
from ebbtide.tracing.hooks.compiled import Uncompiled, as_written
from ebbtide.tracing.hooks.gradient_sums import own_parts
from ebbtide.tracing.hooks.observer import Observer, ParameterRun, Unit
from ebbtide.tracing.hooks.root_calls import refuse_backward
from ebbtide.tracing.hooks.saved_tensors import Hooks, SavedTensors, end_regions, innermost, others_save
from ebbtide.tracing.hooks.tables import ParameterTable, WatchedTable, refuse_copy


def _arrived(interceptor: weakref.ref[Interceptor], index: int, parameter: nn.Parameter) -> None:
    found = interceptor()
    if found is not None and not found.deaf:
        found.observer.gradient(index)


def _nodes(values: Any) -> set[Any]:
    """The graph's nodes that gave these tensors."""
    tensors = (value for value in tree_iter(values) if isinstance(value, torch.Tensor))
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}


def _reversed(interceptor: weakref.ref[Interceptor], unit: Unit, _: Any) -> None:
    found = interceptor()
    if found is not None:
        found.observer.reverse_block(unit)


def _coming(interceptor: weakref.ref[Interceptor], index: int, gradient: torch.Tensor) -> None:
    found = interceptor()
    if found is not None:
        found.coming(index)


class _Frame:
    """One running module: what it pinned by reading others' weights, and whether it pushed saved-tensor hooks, inside of
    which others."""

    __slots__ = ("foreign", "outer", "pushed", "unit")

    def __init__(self, unit: Unit | None, outer: Hooks | None) -> None:
        self.unit = unit
        self.outer = outer
        self.pushed = False
        self.foreign: list[int] = []


class Interceptor:
    """Installs the hooks on a module and reports to `observer`, which may be exchanged between iterations."""

    __deepcopy__ = refuse_copy
    __reduce_ex__ = refuse_copy

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        runs: Sequence[ParameterRun],
        units: Sequence[tuple[nn.Module, Unit]],
        observer: Observer,
        coming: Callable[[int], None] = lambda index: None,
        blocks: CompiledBlocks | None = None,
    ) -> None:
        """`coming`: told of a gradient before it is accumulated into a parameter's `.grad`. `blocks`: what runs
        compiled."""
        self.observer = observer
        self.coming = coming
        self.active = [0] * len(runs)
        self._parameters = list(parameters)
        self._arrivals: dict[int, Any] = {}
        """Handles of the hooks that take gradients, by parameter."""
        self._frames: list[_Frame] = []
        self._saved = SavedTensors(lambda: self.observer)
        self._blocks = CompiledBlocks(()) if blocks is None else blocks
        self._uncompiled = Uncompiled(module, self._blocks)
        self._handles: list[Any] = []
        self._tables: list[tuple[nn.Module, ParameterTable]] = []
        self._watched_tables: list[tuple[nn.Module, str]] = []
        self._changed = False
        owned = Counter(run for _, unit in units for run in unit.runs)
        self.resting = False
        self.deaf = False
        """Gradients arrive of which the observer need not be told."""
        self.scopes = 0
        """How many passes, forward or backward, are under way within each other."""
        self.unnoticed = 0
        """How many units have started of which the observer was not told."""
        self._tied = frozenset(run for run, owners in owned.items() if owners > 1)
        self._calls: list[BlockCall] = []
        self._install(module, runs, {id(owner): unit for owner, unit in units})

    # -- installation ---------------------------------------------------------------------------------

    def _install(self, module: nn.Module, runs: Sequence[ParameterRun], units: dict[int, Unit]) -> None:
        run_of = {id(self._parameters[p]): run.index for run in runs for p in run.parameters}
        for block in self._blocks.all:
            around = partial(self._compiled, units.get(id(block.module)), block.module)
            self._calls.append(BlockCall(block, self._blocks, around))
        for child in list(module.modules()):
            if id(child) in self._blocks.inside:
                continue
            self._watch(child, "_modules", WatchedTable(child._modules, self.change))
            if id(child) not in units:
                self._watch(child, "_parameters", WatchedTable(child._parameters, self.change))
            unit = units.get(id(child))
            inside = unit is not None or any(id(p) in run_of for p in child.parameters())
            if not inside:
                continue
            pre = child.register_forward_pre_hook(partial(self._enter, unit), prepend=True)
            post = child.register_forward_hook(partial(self._leave, unit), always_call=True)
            self._handles += [pre, post]
            if unit is not None:
                table = ParameterTable(
                    child._parameters,
                    {
                        n: run_of[id(p)]
                        for n, p in child._parameters.items()
                        if p is not None and id(p) in run_of
                    },
                    self,
                )
                child._parameters = table
                self._tables.append((child, table))

    def _watch(self, child: nn.Module, name: str, table: WatchedTable) -> None:
        vars(child)[name] = table
        self._watched_tables.append((child, name))

    def change(self) -> None:
        """A table was changed."""
        self._changed = True

    @property
    def changed(self) -> bool:
        """Whether some module has had a parameter or a child put in or taken out since that was looked at."""
        return self._changed or (bool(self._calls) and self._blocks.changed)

    def looked_at(self) -> None:
        """Modules are known as they are now."""
        self._changed = False
        if self._calls:
            self._blocks.looked_at()

    def watch_gradients(self) -> None:
        """Gradient hooks for parameters that require gradients; called each iteration, for `requires_grad` may be
        switched on later. The one that takes a gradient comes after the user's."""
        # Weak: the collector does not look into autograd, so a cycle through it would never be freed.
        here = weakref.ref(self)
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self._parameters):
                arrival = self._arrivals.get(index)
                if arrival is None:
                    if not parameter.requires_grad:
                        continue
                    self._handles.append(parameter.register_hook(partial(_coming, here, index)))
                elif next(reversed(parameter._post_accumulate_grad_hooks)) == arrival.id:
                    continue
                else:
                    arrival.remove()  # a hook of the user's came since: it is to have the gradient first
                self._arrivals[index] = parameter.register_post_accumulate_grad_hook(
                    partial(_arrived, here, index)
                )

    def keep(self, handle: Any) -> None:
        """A further hook's handle, removed with ours."""
        self._handles.append(handle)

    def remove(self) -> None:
        for handle in (*self._handles, *self._calls, *self._arrivals.values()):
            handle.remove()
        for module, table in self._tables:
            module._parameters = dict(table)
        for module, name in self._watched_tables:
            vars(module)[name] = dict(vars(module)[name])
        self._handles.clear()
        self._calls.clear()
        self._arrivals.clear()
        self._tables.clear()
        self._watched_tables.clear()

    # -- events ---------------------------------------------------------------------------------------

    @property
    def compiles(self) -> bool:
        """Whether some block runs compiled."""
        return bool(self._calls)

    @property
    def others_listen(self) -> bool:
        """Whether there are hooks besides ours that would see what ours have left out: counts of what is saved for
        backward, as checkpoints have them, or gradients that are sums already."""
        return self._saved.beside_others or any(
            len(parameter._post_accumulate_grad_hooks or ()) > (index in self._arrivals)
            for index, parameter in enumerate(self._parameters)
        )

    def rest(self, resting: bool) -> None:
        """Whether the observer need not be told of anything: every weight stays where it is, and may be read."""
        self.resting = resting

    def _enter(self, unit: Unit | None, module: nn.Module, args: Any) -> None:
        if self.resting:
            self.unnoticed += unit is not None
            return
        frame = _Frame(unit, innermost())
        if unit is not None:
            # The observer may refuse (no room): then the frame does not exist and nothing is left pinned.
            self.observer.enter(unit)
            for run in unit.runs:
                self.active[run] += 1
            frame.pushed = self._saved.push()
        self._frames.append(frame)

    def _leave(self, unit: Unit | None, module: nn.Module, args: Any, output: Any) -> None:
        if unit is not None and not self._tied.isdisjoint(unit.runs) and torch.is_grad_enabled():
            outputs = [value for value in tree_iter(output) if isinstance(value, torch.Tensor)]
            whole = id(module) in self._blocks.inside
            own_parts(outputs, [p for p in module.parameters(recurse=whole) if p is not None])
        # An always-called hook also fires where our own `enter` refused: then there is no frame of this unit.
        if self._frames and self._frames[-1].unit is unit:
            self._close(self._frames.pop())
        if not self.scopes and not self._frames:
            refuse_backward(module, output)

    def _compiled(
        self, unit: Unit | None, module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a compiled block, a unit like others."""
        self._enter(unit, module, args)
        found = None
        try:
            watches = unit is not None and not self.resting and torch.is_grad_enabled()
            given = _nodes((args, kwargs)) if watches else set()
            found = function(*args, **kwargs)
            if unit is not None and watches:
                self._await_backward(unit, _nodes(found) - given)
        finally:
            self._leave(unit, module, args, found)
        return found

    def _await_backward(self, unit: Unit, nodes: set[Any]) -> None:
        """Backward comes to a block through what it gave; what it was given and hands on is not its own."""
        for node in nodes:
            node.register_prehook(partial(_reversed, weakref.ref(self), unit))

    def around(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function as if it were a module's forward: parameters that it reads stay there until its end."""
        frame = _Frame(None, innermost())
        if not self.resting:
            self._frames.append(frame)
        found = function(*args, **kwargs)
        if self._frames and self._frames[-1] is frame:
            self._close(self._frames.pop())
        return found

    def _close(self, frame: _Frame) -> None:
        if frame.pushed:
            self._saved.pop()
        for run in frame.foreign:
            self.active[run] -= 1
            self.observer.unread(run)
        if frame.unit is not None:
            for run in frame.unit.runs:
                self.active[run] -= 1
            self.observer.leave(frame.unit)

    def foreign_read(self, run: int, parameter: nn.Parameter) -> torch.Tensor:
        """What a reader gets who is not the parameter's module."""
        if self._frames:
            frame = self._frames[-1]
            self.observer.read(run, outside=False)
            self.active[run] += 1
            frame.foreign.append(run)
            if not frame.pushed and frame.outer == innermost():
                frame.pushed = self._saved.push()
        else:
            self.observer.read(run, outside=True)
        # A checkpoint that computes again keeps what is not trained as the tensor that it is: one that holds the values,
        # then, for a parameter has them only as long as it is in its place.
        kept_as_it_is = not parameter.requires_grad and others_save() and torch.is_grad_enabled()
        return parameter.detach() if kept_as_it_is else parameter

    @contextmanager
    def substituted(self, observer: Observer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Other parameters in place of the managed ones, and another observer: for an imagined pass. They stay
        until backward is over, for checkpoints read them again there."""
        resting = self.resting
        self.rest(False)
        stand_in = {id(real): other for real, other in zip(self._parameters, parameters, strict=True)}
        previous, self.observer = self.observer, observer
        tables = [table for _, table in self._tables] + self._blocks.tables
        originals = [(table, name, p) for table in tables for name, p in table.items()]
        try:
            for table, name, parameter in originals:
                if id(parameter) in stand_in:
                    dict.__setitem__(table, name, stand_in[id(parameter)])
            with as_written(), self.scope():
                yield
        finally:
            for table, name, parameter in originals:
                dict.__setitem__(table, name, parameter)
            self.observer = previous
            self.rest(resting)

    # -- scopes ---------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around a forward or backward pass of the whole model: hooks outermost, and no frame left behind."""
        depth, top, active = len(self._frames), self._saved.top(), list(self.active)
        self.scopes += 1
        try:
            if not self.resting:
                self._saved.push()
            for call in self._calls:
                call.stay()
            with self._uncompiled.scope(look=not self.resting):
                yield
        except BaseException as error:
            self._close_down_to(depth)
            self.active = active  # an interrupt may have come between `_enter` and its frame
            end_regions(error)
            raise
        finally:
            self.scopes -= 1
            self._close_down_to(depth)
            self._saved.pop_to(top)

    def _close_down_to(self, depth: int) -> None:
        while len(self._frames) > depth:
            self._close(self._frames.pop())
