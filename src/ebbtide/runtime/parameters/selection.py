"""What of a module is managed, and in which dtype it is computed: decided once, before anything is moved."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.errors import ConfigError, UnsupportedError, nearest
from ebbtide.memory.dtensors import is_split, part_of
from ebbtide.runtime.parameters.host_modules import find_hosted

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Choice:
    managed: dict[str, nn.Parameter]
    unmanaged: dict[str, nn.Parameter]
    dtypes: dict[str, torch.dtype]
    """What each parameter, managed or not, is computed in."""
    hosted: dict[str, nn.Module]
    """Modules that are computed on the host; their parameters are unmanaged, and live there."""
    buffer_dtype: torch.dtype | None
    """What floating buffers become, as with `module.to(dtype)`; None where they keep their own: in a module that mixes
    dtypes, or is in that one already, whatever its buffers are in."""


def choose(module: nn.Module, config: Config) -> Choice:
    """Splits the module's parameters into managed and unmanaged ones.

    A module in one floating dtype is converted to `precision`, as `module.to(dtype)` would; in a mixed one
    every parameter keeps its own.
    """
    named = dict(module.named_parameters())
    for pattern in config.unmanaged:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(f"unmanaged: {pattern!r} matches no parameter{nearest(pattern, named)}")
    hosted = find_hosted(module, config.host_modules)
    on_host = {id(p) for child in hosted.values() for p in child.parameters()}
    managed: dict[str, nn.Parameter] = {}
    unmanaged: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        refuse_parameter(name, parameter)
        refuse_split(name, parameter)
        part = part_of(parameter)
        by_hand = id(parameter) in on_host or any(fnmatchcase(name, pattern) for pattern in config.unmanaged)
        chunkable = parameter.dtype in COMPUTE_DTYPES and part.numel() > 0 and is_dense(part)
        if is_split(parameter) and (by_hand or not chunkable):
            raise UnsupportedError(
                f"{name} is a DTensor of which this process has {tuple(part.shape)} in {part.dtype}, and cannot be left "
                "outside the chunks; split it evenly, and take it out of `unmanaged` and `host_modules`"
            )
        (managed if chunkable and not by_hand else unmanaged)[name] = parameter
    found = {p.dtype for p in named.values() if p.dtype.is_floating_point}
    if not managed:
        raise ConfigError(
            f"the module has no parameter to manage, of {len(named)}: expected dense bfloat16, float16 or float32 "
            "parameters that `unmanaged` does not claim"
        )
    target = PRECISIONS[config.precision] if len(found) == 1 else None
    dtypes = {n: target if target and p.dtype.is_floating_point else p.dtype for n, p in named.items()}
    for name, parameter in managed.items():
        refuse_hooks(name, parameter, dtypes[name])
    converted = target if found != {target} else None
    _refuse_shared_memory(module, named, dtypes, converted)
    for name, buffer in module.named_buffers():
        if is_split(buffer):
            raise UnsupportedError(f"{name} is a buffer and a DTensor; only parameters may be split")
    return Choice(managed, unmanaged, dtypes, hosted, converted)


def _refuse_shared_memory(
    module: nn.Module,
    named: Mapping[str, nn.Parameter],
    dtypes: Mapping[str, torch.dtype],
    buffer_dtype: torch.dtype | None,
) -> None:
    """Two tensors in one memory, one of them trained. What is converted gets memory of its own, as by `module.to`."""
    there: list[tuple[str, torch.Tensor, bool]] = [
        (name, p, p.requires_grad) for name, p in named.items() if dtypes[name] == p.dtype
    ]
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point() or buffer_dtype in (None, buffer.dtype):
            there.append((name, buffer, False))
    ranges = sorted(
        (part.data_ptr(), part.data_ptr() + part.numel() * part.element_size(), name, trained)
        for name, tensor, trained in there
        if not (part := part_of(tensor)).is_meta and part.numel() and is_dense(part)
    )
    for (_, end, one, trained), (begin, _, other, also) in itertools.pairwise(ranges):
        if begin < end and (trained or also):
            raise UnsupportedError(
                f"{one} and {other} lie in the same memory and are not one parameter: an update of one would be one of "
                "the other, which chunks do not keep. Tie them (both names for one Parameter), or give one memory of "
                "its own with .clone()"
            )


def is_dense(parameter: torch.Tensor) -> bool:
    return has_no_gaps(parameter.shape, parameter.stride())


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their storage span without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse_parameter(name: str, parameter: torch.Tensor) -> None:
    """Parameters that cannot be trained in chunks, refused by name."""
    if parameter.layout != torch.strided:
        raise UnsupportedError(
            f"{name} has layout {parameter.layout}; only dense (strided) parameters can be managed"
        )
    if any(
        length > 1 and not stride for length, stride in zip(parameter.shape, parameter.stride(), strict=True)
    ):
        raise UnsupportedError(
            f"{name} is expanded: elements of its shape {tuple(parameter.shape)} share memory (strides "
            f"{parameter.stride()}), so that none can be updated by itself. Make it a tensor of its own with "
            ".contiguous(), or keep the part that is expanded as the parameter"
        )
    if parameter.requires_grad and parameter.dtype not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"{name} is trained in {parameter.dtype}; expected bfloat16, float16 or float32. "
            "Convert it before initialize(), or set requires_grad=False"
        )


def refuse_split(name: str, parameter: Any) -> None:
    """Parameters that are split in a way that chunks cannot follow."""
    if not is_split(parameter):
        return
    strange = [one for one in parameter.placements if type(one).__name__ not in ("Shard", "Replicate")]
    if strange:
        raise UnsupportedError(
            f"{name} is a DTensor with placement {strange[0]}; expected Shard and Replicate, as "
            "parallelize_module makes them"
        )
    if parameter.is_meta:
        raise UnsupportedError(
            f"{name} is a DTensor on the meta device, which has no values; build the module on the CPU before "
            "parallelize_module()"
        )


def refuse_hooks(name: str, parameter: Any, dtype: torch.dtype) -> None:
    """A DTensor in another dtype is another tensor, without the hooks of the first."""
    if not is_split(parameter) or parameter.dtype == dtype:
        return
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise UnsupportedError(
            f"{name} is a DTensor in {parameter.dtype} with gradient hooks, which {dtype} would lose; register them "
            "after initialize(), or convert the module before"
        )
