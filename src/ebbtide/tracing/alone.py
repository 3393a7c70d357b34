"""`ebbtide.trace`: what an iteration of a module does, without an engine and without allocating anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ebbtide.errors import ConfigError
from ebbtide.intercept import Interceptor, Observer, find_units
from ebbtide.layout import TensorSpec
from ebbtide.record import Record
from ebbtide.tracing.symbolic import FakeParameters, scalar_loss, trace_symbolically

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Trace:
    """A record, and what it speaks of."""

    record: Record
    tensors: tuple[TensorSpec, ...]
    """The module's parameters in definition order; a moment's gradient is one of these."""
    trained: tuple[bool, ...]
    runs: tuple[tuple[int, ...], ...]
    """The parameters of each run: what is used together."""


def trace(module: nn.Module, example: Any, dtype: torch.dtype | None = None) -> Trace:
    """Imagines forward and backward of `module` on `example` (keyword arguments as a mapping, positional ones as a
    tuple, or one tensor), under fake tensors on the CPU. Both may be on the meta device.

    `dtype`: what floating parameters and buffers are computed in, as after `module.to(dtype)`; left out, their
    own.
    """
    named = dict(module.named_parameters())
    if not named:
        raise ConfigError("the module has no parameters: there is nothing to trace")
    parameters, runs, units = find_units(module, list(named.values()))
    names = {id(parameter): name for name, parameter in named.items()}
    dtypes = [dtype if dtype and p.dtype.is_floating_point else p.dtype for p in parameters]
    run_of = [0] * len(parameters)
    for run in runs:
        for member in run.parameters:
            run_of[member] = run.index
    fake = FakeParameters(
        tuple(run_of),
        tuple(tuple(p.shape) for p in parameters),
        tuple(p.stride() for p in parameters),
        tuple(dtypes),
        tuple(p.requires_grad for p in parameters),
        torch.device("cpu"),
        dtype,
    )
    args, kwargs = _arguments(example)
    # Nothing is told to anyone outside the imagined pass, which brings an observer of its own.
    interceptor = Interceptor(module, parameters, runs, units, cast(Observer, None))
    try:
        record = trace_symbolically(
            module, fake, args, kwargs, "trace", 0, interceptor.substituted, scalar_loss
        )
    finally:
        interceptor.remove()
    tensors = tuple(
        TensorSpec(names[id(p)], tuple(p.shape), p.stride(), NAMES.get(kind, "fp32"))
        for p, kind in zip(parameters, dtypes, strict=True)
    )
    trained = tuple(p.requires_grad for p in parameters)
    return Trace(record, tensors, trained, tuple(run.parameters for run in runs))


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}
