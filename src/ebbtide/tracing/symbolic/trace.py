"""A pass under fake tensors: what an iteration would do, before it runs and without allocating anything.

The module runs with fake parameters in place of its own, under the same hooks, so the events are those of
the real iteration. A model that cannot be imagined so (data-dependent control flow, operators without a
fake kernel) says why, and the first iteration is cautious instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from ebbtide.planner.record import BACKWARD, FORWARD, GRADIENT, Record, event
from ebbtide.tracing.device_rules import Rules
from ebbtide.tracing.hooks import Unit
from ebbtide.tracing.hooks.observer import SavedTensor
from ebbtide.tracing.hooks.saved_tensors import no_saved_hooks
from ebbtide.tracing.live_recorder import Recorder
from ebbtide.tracing.meter import StorageMeter, storage_bytes
from ebbtide.tracing.saved_storages import SavedList
from ebbtide.tracing.symbolic.corrections import CopiedGradients, ImaginedCopies
from ebbtide.tracing.symbolic.escapes import Escapes, ImaginedMode
from ebbtide.tracing.symbolic.known_values import KnownValues
from ebbtide.tracing.symbolic.muted import undrawn, unwarned
from ebbtide.tracing.symbolic.routing import even_load
from ebbtide.tracing.symbolic.user_state import unchanged


@dataclass(frozen=True, slots=True)
class _Weight:
    """A fake weight, and how many tensors share its storage when nobody uses it."""

    run: int
    storage: torch.UntypedStorage
    flat: torch.Tensor
    aliases: int


@dataclass(frozen=True, slots=True)
class _Saved:
    weight: _Weight
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class FakeParameters:
    """What the fake pass must know of the managed parameters."""

    runs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    trained: tuple[bool, ...]
    device: torch.device
    together: tuple[tuple[int, int], ...] = ()
    """Each run of a compiled block, with the bytes of the gradients that its backward gives at once."""
    buffers: torch.dtype | None = None
    """What floating buffers become; None: they are as they will be."""


class SymbolicObserver:
    """Writes what it is told into a recorder; fake weights are everywhere at once."""

    def __init__(
        self,
        recorder: Recorder,
        weights: Mapping[int, _Weight],
        parameters: FakeParameters,
        saved: SavedList | None = None,
    ) -> None:
        """`weights` by the address of their storage's object; `saved` is told of all else that is saved."""
        self._recorder = recorder
        self._weights = weights
        self._runs = parameters.runs
        self._first = {weight.run: weight for weight in reversed(list(weights.values()))}
        """By run."""
        self._together = dict(parameters.together)
        self._saved = saved
        self._forward = True
        self._count: dict[int, int] = {}
        self._reversing: dict[int, _Weight] = {}

    def _begin(self, run: int, phase: int) -> None:
        self._count[run] = self._count.get(run, 0) + 1
        if self._count[run] == 1:
            self._recorder.begin(run, phase)

    def _end(self, run: int) -> None:
        self._count[run] -= 1
        if self._count[run] == 0:
            self._recorder.end(run)

    def _sweep(self, everything: bool = False) -> None:
        for run, weight in list(self._reversing.items()):
            if everything or use_count(weight.storage) <= weight.aliases:
                del self._reversing[run]
                self._end(run)

    def finish(self) -> Record:
        """The pass is over."""
        self._sweep(everything=True)
        return self._recorder.finish()

    def _moment(self, what: int) -> None:
        self._sweep()
        self._recorder.moment(what)
        if self._saved is not None:
            self._saved.moment()

    def reverse(self) -> None:
        """Backward starts: what a region that is computed again saves is not recorded."""
        self._forward = False
        self._recorder.reverse()

    def enter(self, unit: Unit) -> None:
        self._moment(event(FORWARD, unit.index))
        for run in unit.runs:
            self._begin(run, FORWARD)

    def leave(self, unit: Unit) -> None:
        for run in unit.runs:
            self._end(run)

    def read(self, run: int, outside: bool) -> None:
        if not outside:
            self._moment(event(BACKWARD, run))
            self._begin(run, FORWARD)

    def unread(self, run: int) -> None:
        self._end(run)

    def pack(self, tensor: torch.Tensor) -> _Saved | None:
        weight = self._weights.get(tensor.untyped_storage()._cdata)
        if weight is None or tensor.dtype != weight.flat.dtype:
            return None
        return _Saved(weight, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def keep(self, tensor: torch.Tensor) -> SavedTensor | None:
        return self._saved.keep(tensor) if self._saved is not None and self._forward else None

    def unpack(self, handle: _Saved) -> torch.Tensor:
        weight = handle.weight
        if weight.run not in self._reversing:
            self._moment(event(BACKWARD, weight.run))
            self._begin(weight.run, BACKWARD)
            if weight.run in self._together:
                self._recorder.block_reversed(weight.run, self._together[weight.run])
            self._reversing[weight.run] = weight
        return weight.flat.as_strided(handle.shape, handle.stride, handle.offset)

    def reverse_block(self, unit: Unit) -> None:
        new = [run for run in unit.runs if run not in self._reversing]
        if not new:
            return
        self._moment(event(BACKWARD, unit.runs[0]))
        for run in new:
            self._begin(run, BACKWARD)
            self._recorder.block_reversed(run, self._together[run])
            self._reversing[run] = self._first[run]

    def gradient(self, parameter: int) -> None:
        run = self._runs[parameter]
        if run not in self._reversing or run not in self._together:
            self._moment(event(GRADIENT, parameter))
        self._recorder.arrival(parameter)


def trace_symbolically(
    module: nn.Module,
    parameters: FakeParameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: str,
    fixed: int,
    substituted: Callable[[Any, list[nn.Parameter]], Any],
    find_loss: Callable[[Any], torch.Tensor | None],
    keep_outputs: bool = True,
    rules: Rules | None = None,
    saved: bool = False,
    free: float = math.inf,
    function: Callable[..., Any] | None = None,
    escapes: Escapes | None = None,
) -> Record:
    """The record of a forward and backward pass. `substituted` puts parameters and an observer in place of
    the real ones, for a scope. `keep_outputs`: the loop holds all that forward gave until backward is over, not
    only the loss. `rules`: of a device that is not the one that is traced on. `saved`: the record says what is
    saved for backward, too. `free`: bytes that non-model data may take here: small values are computed. `function`: what
    is called, where that is not the module itself. `escapes`: is told of the pass, to find what it left behind."""
    inputs = storage_bytes(value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor))
    imagine = partial(
        _trace,
        module,
        parameters,
        args,
        kwargs,
        signature,
        fixed,
        inputs,
        substituted,
        find_loss,
        keep_outputs,
        rules,
        saved,
        function or module,
        escapes,
    )
    known = KnownValues(free - fixed - inputs)
    try:
        # What the user's code sets in its context, it sets in this copy.
        return copy_context().run(imagine, known)
    except Exception:
        if not known.count:
            raise
    # Something wrote what is imagined into what is known.
    return copy_context().run(imagine, KnownValues(free - fixed - inputs, look=False))


def _trace(
    module: nn.Module,
    parameters: FakeParameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: str,
    fixed: int,
    inputs: int,
    substituted: Callable[[Any, list[nn.Parameter]], Any],
    find_loss: Callable[[Any], torch.Tensor | None],
    keep_outputs: bool,
    rules: Rules | None,
    saved: bool,
    function: Callable[..., Any],
    escapes: Escapes | None,
    known: KnownValues,
) -> Record:
    mode = ImaginedMode()
    fake, weights = _fakes(mode, parameters)
    # Held as long as the pass: where forward puts another tensor in a buffer's place, its address is not anybody's next.
    kept: dict[int, torch.UntypedStorage] = {}
    meter = StorageMeter(lambda storage: storage in weights or storage in kept, rules=rules)
    if escapes is not None:
        escapes.watch(mode, meter)
    recorder = Recorder(signature, meter, fixed, inputs, source="symbolic")
    observer = SymbolicObserver(
        recorder, weights, parameters, SavedList(recorder, parameters.device) if saved else None
    )
    hooks = _hooked(fake, observer)

    def kept_beside(value: torch.Tensor) -> torch.Tensor:
        found = _imagined(mode, parameters, value)
        storage = found.untyped_storage()
        kept[storage._cdata] = storage
        return found

    with (
        no_saved_hooks(),
        _unlogged(),
        undrawn(),
        unchanged(module, kept_beside, function),
        even_load(module),
        substituted(observer, fake),
        hooks,
        CopiedGradients() if torch.is_grad_enabled() else nullcontext(),
        unwarned(),
        mode,
        ImaginedCopies(),
        known,
        meter,
    ):
        given = partial(_imagined, mode, replace(parameters, buffers=None))
        fake_args, fake_kwargs = _once(given, (args, kwargs))
        meter.note((fake_args, fake_kwargs))
        out = function(*fake_args, **fake_kwargs)
        loss = find_loss(out)
        if not keep_outputs:
            out = None
        observer.reverse()
        if loss is not None and loss.requires_grad:
            loss.backward()
        # While the loop holds its loss, what hangs on the graph stays: leaves that forward made, with their gradients.
        return observer.finish()


@contextmanager
def _unlogged() -> Iterator[None]:
    """Why a pass cannot be imagined is an exception; torch prints its stack besides, before the real pass raises."""
    log, nobody = logging.getLogger(fake_tensor.__name__), logging.Filter("nobody")
    log.addFilter(nobody)
    try:
        yield
    finally:
        log.removeFilter(nobody)


def _fakes(mode: FakeTensorMode, parameters: FakeParameters) -> tuple[list[nn.Parameter], dict[int, _Weight]]:
    """The fake parameters, and what is to be known of each by the address of its storage's object."""
    fake: list[nn.Parameter] = []
    weights: dict[int, _Weight] = {}
    with mode:
        for run, shape, stride, dtype, trained in zip(
            parameters.runs,
            parameters.shapes,
            parameters.strides,
            parameters.dtypes,
            parameters.trained,
            strict=True,
        ):
            tensor = nn.Parameter(
                torch.empty_strided(shape, stride, dtype=dtype, device=parameters.device),
                requires_grad=trained,
            )
            fake.append(tensor)
            storage, flat = tensor.untyped_storage(), tensor.detach()
            weights[storage._cdata] = _Weight(run, storage, flat, use_count(storage))
    return fake, weights


def _once(imagined: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """A tensor that is given twice (tokens and labels, say) is one tensor."""
    found: dict[int, torch.Tensor] = {}
    return tree_map_only(torch.Tensor, lambda v: found.setdefault(id(v), imagined(v)), values)


def use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects share a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def _imagined(mode: FakeTensorMode, parameters: FakeParameters, value: torch.Tensor) -> torch.Tensor:
    """A tensor's fake; what is on the meta device is imagined where the module will compute."""
    dtype = (parameters.buffers if value.is_floating_point() else None) or value.dtype
    if value.is_meta or dtype != value.dtype:
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=parameters.device)
    return mode.from_tensor(value)


class _hooked:
    """Gradient hooks on the fake parameters, for the interceptor's sit on the real ones."""

    def __init__(self, parameters: Iterable[torch.Tensor], observer: SymbolicObserver) -> None:
        self._handles = [
            p.register_post_accumulate_grad_hook(_Arrived(observer, i))
            for i, p in enumerate(parameters)
            if p.requires_grad
        ]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


class _Arrived:
    def __init__(self, observer: SymbolicObserver, index: int) -> None:
        self._observer = observer
        self._index = index

    def __call__(self, parameter: torch.Tensor) -> None:
        self._observer.gradient(self._index)
        parameter.grad = None


def scalar_loss(out: Any) -> torch.Tensor | None:
    """The loss in a module's output: `.loss`, else the first scalar, else the sum of what is differentiable."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [t for t in tree_iter(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    for tensor in tensors:
        if tensor.numel() == 1:
            return tensor
    return sum((t.float().sum() for t in tensors[1:]), tensors[0].float().sum()) if tensors else None
