"""Tensors of which this process has a part: DTensors, as tensor parallelism makes them of a module's parameters.

The engine keeps the part in its chunks, an ordinary tensor; the module computes with the DTensor around it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ORDINARY = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Split:
    """How a whole tensor is spread over processes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def around(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, of which this process has `part`, on whatever device that is: from_local would bring it to the
        mesh's."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(self.shape, self.stride, part.dtype)
        return DTensor(part, DTensorSpec(self.mesh, self.placements, tensor_meta=meta), requires_grad=False)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This process's part of what all have."""
        from torch.distributed.tensor import distribute_tensor

        return part_of(distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """All of it, on the host: a collective."""
        found = self.around(part.to(self.mesh.device_type))
        return found.full_tensor().cpu()  # type: ignore[attr-defined]


def kind_of_parts() -> type | None:
    """DTensor; None where nobody has imported it, so that there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_split(tensor: torch.Tensor) -> bool:
    if type(tensor) in _ORDINARY:
        return False
    kind = kind_of_parts()
    return kind is not None and isinstance(tensor, kind)


def split_of(tensor: Any) -> Split | None:
    if not is_split(tensor):
        return None
    return Split(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


def part_of(tensor: Any) -> torch.Tensor:
    """The memory behind a tensor: of a DTensor this process's part."""
    found: torch.Tensor = tensor._local_tensor if is_split(tensor) else tensor
    return found


def part_like(value: Any, like: torch.Tensor) -> torch.Tensor:
    """What of a value belongs to this process where it is split as `like` is: a gradient may come in other pieces."""
    if type(value) is torch.Tensor and type(like) in _ORDINARY:
        return value
    split = split_of(like)
    if split is None:
        return part_of(value)
    if not is_split(value):
        return split.cut(value) if value.shape == split.shape else value
    if value.device_mesh != split.mesh or tuple(value.placements) != split.placements:
        value = value.redistribute(split.mesh, split.placements)
    part = value._local_tensor
    return part.wait() if hasattr(part, "wait") else part  # a collective may still be under way
