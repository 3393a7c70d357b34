"""A pass under fake tensors: what an iteration would do, before it runs and without allocating anything.

The module runs with fake parameters in place of its own, under the same hooks, so the events are those of
the real iteration. A model that cannot be imagined so (data-dependent control flow, operators without a
fake kernel) says why, and the first iteration is cautious instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from ebbtide.intercept import Unit
from ebbtide.record import BACKWARD, FORWARD, GRADIENT, Record, event
from ebbtide.tracing.live import Recorder
from ebbtide.tracing.meter import StorageMeter


@dataclass(frozen=True, slots=True)
class _Saved:
    run: int
    tensor: torch.Tensor


class SymbolicObserver:
    """Writes what it is told into a recorder; fake weights are everywhere at once."""

    def __init__(self, recorder: Recorder, run_of_storage: Mapping[int, int]) -> None:
        self._recorder = recorder
        self._run_of_storage = run_of_storage
        self._count: dict[int, int] = {}
        self._reversing: list[int] = []

    def _begin(self, run: int, phase: int) -> None:
        self._count[run] = self._count.get(run, 0) + 1
        if self._count[run] == 1:
            self._recorder.begin(run, phase)

    def _end(self, run: int, early: bool = False) -> None:
        self._count[run] -= 1
        if self._count[run] == 0:
            self._recorder.end(run, early)

    def _moment(self, what: int) -> None:
        self._recorder.moment(what)
        for run in self._reversing:
            self._end(run, early=True)
        self._reversing.clear()

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
        run = self._run_of_storage.get(tensor.untyped_storage()._cdata)
        return None if run is None else _Saved(run, tensor)

    def unpack(self, handle: _Saved) -> torch.Tensor:
        if handle.run not in self._reversing:
            self._moment(event(BACKWARD, handle.run))
            self._begin(handle.run, BACKWARD)
            self._reversing.append(handle.run)
        return handle.tensor

    def gradient(self, parameter: int) -> None:
        self._moment(event(GRADIENT, parameter))
        self._recorder.arrival(parameter)


@dataclass(frozen=True)
class FakeParameters:
    """What the fake pass must know of the managed parameters."""

    runs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    trained: tuple[bool, ...]


def trace_symbolically(
    module: nn.Module,
    parameters: FakeParameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: str,
    fixed: int,
    substituted: Callable[[Any, list[nn.Parameter]], Any],
    find_loss: Callable[[Any], torch.Tensor | None],
) -> Record:
    """The record of a forward and backward pass. `substituted` puts parameters and an observer in place of
    the real ones, for a scope."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake: list[nn.Parameter] = []
    storages: dict[int, int] = {}
    with mode:
        for run, shape, stride, dtype, trained in zip(
            parameters.runs,
            parameters.shapes,
            parameters.strides,
            parameters.dtypes,
            parameters.trained,
            strict=True,
        ):
            tensor = nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype), requires_grad=trained)
            fake.append(tensor)
            storages[tensor.untyped_storage()._cdata] = run
    meter = StorageMeter(storages.__contains__)
    recorder = Recorder(signature, meter, fixed, source="symbolic")
    observer = SymbolicObserver(recorder, storages)
    hooks = _hooked(fake, observer)
    with (
        _unchanged(module),
        substituted(observer, fake),
        hooks,
        mode,
        meter,
        torch.random.fork_rng(devices=[]),
    ):
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        meter.note((fake_args, fake_kwargs))
        out = module(*fake_args, **fake_kwargs)
        loss = find_loss(out)
        if loss is not None and loss.requires_grad:
            loss.backward()
        del out, loss
    return recorder.finish()


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Fake tensors must not stay behind: not in gradients of unmanaged parameters, nor where a forward keeps
    something on its module."""
    gradients = [(p, p.grad) for p in module.parameters()]
    attributes = [(child, dict(child.__dict__), dict(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for child, before, buffers in attributes:
            child.__dict__.clear()
            child.__dict__.update(before)
            child._buffers.clear()
            child._buffers.update(buffers)


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
