"""A record by layer type, for a module that no pass can be imagined of.

The modules that own parameters run once each, in definition order, and backward in reverse. A matrix multiplies
twice its elements for every position forward and twice that backward; what a layer puts out is kept until its
backward; in a checkpointed block only what goes into it is. What lies between (attention's scores, what a forward
does by itself) is not seen: it is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.planner.record import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    MATMUL,
    OTHER,
    Access,
    Arrival,
    Moment,
    Record,
    Work,
    event,
)
from ebbtide.tracing.hooks import ParameterRun, Unit
from ebbtide.tracing.meter import storage_bytes

BETWEEN = 1.5
"""What is kept, over what layers put out: functions between them keep something, too."""


@dataclass(frozen=True)
class Shape:
    """What is known of the module: its parameters by index, as they are computed in."""

    parameters: Sequence[nn.Parameter]
    dtypes: Sequence[torch.dtype]
    runs: Sequence[ParameterRun]
    units: Sequence[tuple[nn.Module, Unit]]


@dataclass(frozen=True)
class _Layer:
    unit: Unit
    block: str | None
    """The checkpointed module that it is part of."""
    weights: int
    """Elements that are multiplied with every position that comes here."""
    positions: int
    features: int
    """What one position becomes."""
    itemsize: int
    members: int
    """Bytes of the parameters."""

    @property
    def output(self) -> int:
        return self.positions * self.features * self.itemsize


def estimate(module: nn.Module, shape: Shape, example: Any, fixed: int, signature: str) -> Record:
    tensors = [value for value in tree_iter(example) if isinstance(value, torch.Tensor)]
    inputs = storage_bytes(tensors)
    layers = list(_layers(module, shape, positions_of(tensors)))
    writer = _Writer(shape, layers, fixed + inputs)
    writer.write()
    accesses = tuple(sorted(writer.accesses, key=lambda a: (a.first, a.run)))
    return Record(
        signature,
        tuple(writer.moments),
        accesses,
        tuple(writer.arrivals),
        fixed,
        "estimated",
        fixed + 2 * inputs,
    )


def positions_of(tensors: Iterable[torch.Tensor]) -> int:
    """Token ids count each, pixels each, rows of features each row."""
    counts = [1]
    for tensor in tensors:
        if not tensor.is_floating_point():
            counts.append(tensor.numel())
        elif tensor.dim() >= 4:
            counts.append(tensor.numel() // max(1, tensor.shape[1]))
        else:
            counts.append(tensor.numel() // max(1, tensor.shape[-1] if tensor.dim() else 1))
    return max(counts)


# -- layers ---------------------------------------------------------------------------------------


def _layers(module: nn.Module, shape: Shape, positions: int) -> Iterable[_Layer]:
    index_of = {id(parameter): index for index, parameter in enumerate(shape.parameters)}
    blocks = [
        name for name, child in module.named_modules() if getattr(child, "gradient_checkpointing", False)
    ]
    crowds = _crowds(module)
    strides = {unit.index: _stride(owner) for owner, unit in shape.units}
    first = next((index for index, stride in strides.items() if stride > 1), None)
    if first is not None:
        positions = max(1, positions // strides.pop(first))  # parameters beside the patches see patches, too
    for owner, unit in shape.units:
        own = {id(p): p for p in owner._parameters.values() if p is not None}
        indices = [index_of[key] for key in own if key in index_of]
        positions = max(1, positions // strides.get(unit.index, 1))
        crowd = next((count for prefix, count in crowds.items() if unit.name.startswith(prefix)), 1)
        here = max(1, positions // crowd)
        yield _Layer(
            unit,
            _block(unit.name, blocks),
            sum(_multiplied(owner, p) for p in own.values()),
            here,
            _features(owner, list(own.values())),
            max((shape.dtypes[i].itemsize for i in indices), default=4),
            sum(shape.parameters[i].numel() * shape.dtypes[i].itemsize for i in indices),
        )


def _stride(owner: nn.Module) -> int:
    """How many positions a convolution makes one of."""
    stride = getattr(owner, "stride", None)
    whole = isinstance(stride, tuple) and all(isinstance(step, int) for step in stride)
    return math.prod(stride) if whole and stride else 1


def _crowds(module: nn.Module) -> dict[str, int]:
    """Collections of experts: how many share the positions."""
    found = {}
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and name.endswith("experts") and len(child) > 1:
            found[f"{name}."] = len(child)
    return found


def _block(name: str, blocks: Sequence[str]) -> str | None:
    """The checkpointed block that a unit is part of. Both a block and the stack of all carry the mark; a block has a
    number."""
    around = [b for b in blocks if not b or name == b or name.startswith(f"{b}.")]
    if not around:
        return None
    inside = max(around, key=len)
    if any(part.isdecimal() for part in inside.split(".")):
        return inside
    rest = name[len(inside) :].strip(".").split(".")
    numbered = next((place for place, part in enumerate(rest) if part.isdecimal()), None)
    return None if numbered is None else ".".join([inside, *rest[: numbered + 1]]).strip(".")


def _multiplied(owner: nn.Module, parameter: torch.Tensor) -> int:
    """A matrix or a convolution's kernel; of a stack of matrices, each position meets one."""
    if parameter.dim() < 2 or isinstance(owner, nn.Embedding):
        return 0
    stacked = parameter.dim() == 3 and not hasattr(owner, "out_channels")
    return parameter.numel() // (parameter.shape[0] if stacked else 1)


def _features(owner: nn.Module, own: Sequence[torch.Tensor]) -> int:
    for name in ("out_features", "nf", "out_channels", "embedding_dim"):
        found = getattr(owner, name, None)
        if isinstance(found, int) and found > 0:
            return found
    matrices = [max(p.shape[-2:]) for p in own if p.dim() >= 2]
    return sum(matrices) or max((p.numel() for p in own), default=1)


# -- moments --------------------------------------------------------------------------------------


@dataclass
class _Writer:
    shape: Shape
    layers: Sequence[_Layer]
    base: int
    """Bytes that are there in every moment."""
    kept: int = 0
    moments: list[Moment] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def write(self) -> None:
        trained = [i for i, p in enumerate(self.shape.parameters) if p.requires_grad]
        segments = [
            list(group) for _, group in groupby(self.layers, key=lambda layer: layer.block or id(layer))
        ]
        before = 0
        entries: list[int] = []
        for segment in segments:
            entries.append(self.kept)
            for layer in segment:
                self._forward(layer)
            if segment[0].block is not None:
                self.kept = entries[-1] + before
            before = segment[-1].output
        if not trained:
            return
        self._loss(self.layers[-1])
        last = self._last_uses(trained)
        for segment, entry in zip(reversed(segments), reversed(entries), strict=True):
            if segment[0].block is not None:
                for layer in segment:
                    self._forward(layer)
            for layer in reversed(segment):
                self._backward(layer, last.pop(layer.unit.index, []))
            self.kept = entry
            if not last:
                return

    def _last_uses(self, trained: Sequence[int]) -> dict[int, list[int]]:
        """By unit, the parameters whose gradients are complete after its backward: a shared one's arrives with the
        first of its owners."""
        found: dict[int, list[int]] = {}
        seen: set[int] = set()
        wanted = set(trained)
        for layer in self.layers:
            for run in layer.unit.runs:
                for parameter in self.shape.runs[run].parameters:
                    if parameter in wanted and parameter not in seen:
                        seen.add(parameter)
                        found.setdefault(layer.unit.index, []).append(parameter)
        return found

    def _moment(self, what: int, extra: int = 0, work: tuple[Work, ...] = ()) -> int:
        level = self.base + self.kept
        self.moments.append(Moment(what, level + extra, 0.0, work, level))
        return len(self.moments) - 1

    def _forward(self, layer: _Layer) -> None:
        self.kept += int(BETWEEN * layer.output)
        j = self._moment(event(FORWARD, layer.unit.index), 0, _work(layer, 1))
        self.accesses += [Access(run, j, j, FORWARD) for run in layer.unit.runs]

    def _loss(self, last: _Layer) -> None:
        """In fp32: what the last layer put out, and its logarithm."""
        moment = self.moments[-1]
        taken = 2 * 4 * last.positions * last.features
        self.moments[-1] = replace(moment, peak=moment.peak + taken, alive=moment.alive + taken // 2)

    def _backward(self, layer: _Layer, complete: Sequence[int]) -> None:
        extra = 2 * layer.output + layer.members
        work = _work(layer, 2)
        for run in layer.unit.runs:
            j = self._moment(event(BACKWARD, run), extra, work)
            self.accesses.append(Access(run, j, j, BACKWARD))
            work = ()
        for parameter in complete:
            j = self._moment(event(GRADIENT, parameter), extra)
            self.arrivals.append(Arrival(parameter, j))
        self.kept = max(0, self.kept - int(BETWEEN * layer.output))


def _work(layer: _Layer, passes: int) -> tuple[Work, ...]:
    touched = passes * (layer.members + 2 * layer.output)
    if not layer.weights:
        return (Work(OTHER, 0, touched),)
    return (Work(MATMUL, passes * 2 * layer.weights * layer.positions, touched),)
