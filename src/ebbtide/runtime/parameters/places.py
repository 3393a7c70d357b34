"""Where parameters lie in their chunks, and saved views of them, as plain data.

Nothing here follows a value: binding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from ebbtide.layout import Layout, Slicing, TensorSpec
from ebbtide.memory.chunk import TORCH_DTYPES
from ebbtide.memory.dtensors import Split, part_of

SHORT_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies: elements [offset, offset + numel) of a chunk."""

    name: str
    chunk: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedWeight(NamedTuple):
    """A saved view of model data, by place instead of by address."""

    chunk: int
    run: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    split: Split | None
    """How the whole is spread over processes, where what was saved is a part of it."""
    member: int
    version: int
    """The parameter's, when it was saved."""


def specs_of(
    names: Sequence[str], parameters: Sequence[nn.Parameter], dtypes: Sequence[torch.dtype]
) -> list[TensorSpec]:
    return [
        TensorSpec(name, tuple(p.shape), tuple(p.stride()), SHORT_DTYPES[dtype], parameter.requires_grad)
        for name, parameter, p, dtype in zip(names, parameters, map(part_of, parameters), dtypes, strict=True)
    ]


def computed_part(place: Place, layout: Layout, slicing: Slicing) -> Place | None:
    """Where a parameter lies in what its module computes with; None where other ranks do that (experts)."""
    if place.chunk not in layout.spread:
        return place
    crew = slicing.crew(layout.spread[place.chunk])
    share = crew.share(place.offset, place.numel, layout.chunks[place.chunk].size)
    if not share.numel:
        return None
    shape = place.shape
    if share.numel < place.numel:
        shape = (shape[0] * share.numel // place.numel, *shape[1:])
    return replace(place, offset=share.offset, numel=share.numel, shape=shape)
