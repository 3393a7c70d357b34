"""`ebbtide.trace`: what an iteration of a module does, without an engine and without allocating anything."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ebbtide.errors import ConfigError
from ebbtide.layout import TensorSpec
from ebbtide.planner.record import Record
from ebbtide.tracing.device_rules import RULES
from ebbtide.tracing.estimate import Shape, estimate
from ebbtide.tracing.hooks import Interceptor, Observer, find_units
from ebbtide.tracing.hooks.block_calls import CompiledBlock, CompiledBlocks
from ebbtide.tracing.hooks.observer import gradients_together
from ebbtide.tracing.symbolic.trace import FakeParameters, scalar_loss, trace_symbolically

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Trace:
    """A record, and what it speaks of."""

    record: Record
    tensors: tuple[TensorSpec, ...]
    """The module's parameters in definition order; a moment's gradient is one of these."""
    runs: tuple[tuple[int, ...], ...]
    """The parameters of each run: what is used together."""
    note: str = ""
    """Why the record is an estimate by layer type; empty where the pass was imagined."""

    @property
    def trained(self) -> tuple[bool, ...]:
        return tuple(tensor.trained for tensor in self.tensors)


def trace(
    module: nn.Module,
    example: Any,
    dtype: torch.dtype | None = None,
    keep_outputs: bool = True,
    target: str = "cpu",
    saved: bool = False,
    blocks: Collection[nn.Module] = (),
) -> Trace:
    """Imagines forward and backward of `module` on `example` (keyword arguments as a mapping, positional ones as a
    tuple, or one tensor), under fake tensors on the CPU. Both may be on the meta device.

    `dtype`: what floating parameters and buffers are computed in, as after `module.to(dtype)`; left out, their
    own. `keep_outputs`: the loop holds all that forward gave through backward, as `out = module(...)` does; without,
    only the loss. `saved`: the record says what is saved for backward, and so could leave the device. `blocks`: modules
    that run compiled, each as one unit whose gradients come together.

    A module that no pass can be imagined of (control flow by values, an operator without a fake kernel) gets an
    estimate by layer type, and a note that says so.
    """
    args, kwargs = arguments_of(example)
    _check_arguments(module, args, kwargs)
    named = dict(module.named_parameters())
    if not named:
        raise ConfigError("the module has no parameters: there is nothing to trace")
    parameters, runs, units = find_units(module, list(named.values()), blocks)
    names = {id(parameter): name for name, parameter in named.items()}
    dtypes = [dtype if dtype and p.dtype.is_floating_point else p.dtype for p in parameters]
    run_of = [0] * len(parameters)
    for run in runs:
        for member in run.parameters:
            run_of[member] = run.index

    def gradient_bytes(member: int) -> int:
        size = parameters[member].numel() * dtypes[member].itemsize
        return size if parameters[member].requires_grad else 0

    fake = FakeParameters(
        tuple(run_of),
        tuple(tuple(p.shape) for p in parameters),
        tuple(p.stride() for p in parameters),
        tuple(dtypes),
        tuple(p.requires_grad for p in parameters),
        torch.device("cpu"),
        together=tuple(gradients_together(runs, gradient_bytes).items()),
        buffers=dtype,
    )
    fixed = _buffer_bytes(module, dtype)
    # Nothing is told to anyone outside the imagined pass, which brings an observer of its own.
    compiled = CompiledBlocks([CompiledBlock(type(block).__name__, block, None) for block in blocks])
    interceptor = Interceptor(module, parameters, runs, units, cast(Observer, None), blocks=compiled)
    note = ""
    try:
        record = trace_symbolically(
            module,
            fake,
            args,
            kwargs,
            "trace",
            fixed,
            interceptor.substituted,
            scalar_loss,
            keep_outputs,
            RULES.get(target),
            saved,
        )
    except Exception as reason:
        # Whatever a forward may raise under fake tensors, a plan needs a record.
        line = next(iter(str(reason).strip().splitlines()), "")
        note = (
            f"an estimate by layer type, for the module could not be traced: {type(reason).__name__}: {line}"
        )
        record = estimate(module, Shape(parameters, dtypes, runs, units), (args, kwargs), fixed, "trace")
    finally:
        interceptor.remove()
    tensors = tuple(
        TensorSpec(names[id(p)], tuple(p.shape), p.stride(), NAMES.get(kind, "fp32"), p.requires_grad)
        for p, kind in zip(parameters, dtypes, strict=True)
    )
    return Trace(record, tensors, tuple(run.parameters for run in runs), note)


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments as a mapping, positional ones as a tuple, or one tensor."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _check_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What a forward cannot be called with is a mistake, not a module that cannot be traced."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the example does not fit the module's forward: {error}") from None


def _buffer_bytes(module: nn.Module, dtype: torch.dtype | None) -> int:
    """Of distinct storages, in the dtype that `module.to(dtype)` gives them."""
    found: dict[int, int] = {}
    for buffer in module.buffers():
        size = dtype.itemsize if dtype and buffer.is_floating_point() else buffer.dtype.itemsize
        storage = buffer.untyped_storage()
        found[storage._cdata] = storage.nbytes() // buffer.dtype.itemsize * size
    return sum(found.values())
