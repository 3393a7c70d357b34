"""What an observer of an execution is told, what it must answer, and of what: units, runs, saved tensors.

A *run* is a set of parameters with the same owning modules, so they are entered and left together; a tied weight is a
run of its own with two owners. A *unit* is a module as the observer sees it: the runs that it owns. Both are found
once, so that nothing per tensor happens while the model executes.

Note [what autograd leaves to hooks]: where there are hooks it neither looks at a saved tensor's version nor saves an
operator's own output without the operator. So a tensor is kept detached, which shares its version, and the version is
compared when backward wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterRun:
    index: int
    parameters: tuple[int, ...]
    """Indices into the list of managed parameters, in definition order."""
    together: bool = False
    """Whether a compiled block owns it: backward wants all of it at once, and gives its gradients together."""


def gradients_together(runs: Iterable[ParameterRun], gradient_bytes: Callable[[int], int]) -> dict[int, int]:
    """By run of a compiled block: bytes of the gradients that its backward gives at once. `gradient_bytes`: of a
    parameter; 0 where it has no gradient."""
    return {run.index: sum(map(gradient_bytes, run.parameters)) for run in runs if run.together}


@dataclass(frozen=True)
class Unit:
    index: int
    name: str
    runs: tuple[int, ...]


def find_units(
    module: nn.Module, managed: Collection[nn.Parameter], blocks: Collection[nn.Module] = ()
) -> tuple[list[nn.Parameter], list[ParameterRun], list[tuple[nn.Module, Unit]]]:
    """The managed parameters in definition order, their runs, and each owning module with its unit. A module of `blocks`
    owns what all modules inside it own."""
    wanted = {id(parameter) for parameter in managed}
    parameters: list[nn.Parameter] = []
    index_of: dict[int, int] = {}
    owners: dict[int, list[int]] = {}
    modules = [(name, child) for name, child in module.named_modules()]
    places = {id(child): position for position, (_, child) in enumerate(modules)}
    owner = {id(child): places[id(block)] for block in blocks for child in block.modules()}
    for here, (_, child) in enumerate(modules):
        position = owner.get(id(child), here)
        for parameter in child._parameters.values():
            if parameter is None or id(parameter) not in wanted:
                continue
            if id(parameter) not in index_of:
                index_of[id(parameter)] = len(parameters)
                parameters.append(parameter)
            owned = owners.setdefault(index_of[id(parameter)], [])
            if position not in owned:
                owned.append(position)
    grouped: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(parameters)):
        grouped.setdefault(tuple(owners[index]), []).append(index)
    compiled = set(owner.values())
    runs = [
        ParameterRun(i, tuple(members), together=not compiled.isdisjoint(owning))
        for i, (owning, members) in enumerate(grouped.items())
    ]
    runs_of: dict[int, list[int]] = {}
    for run, owning in zip(runs, grouped, strict=True):
        for position in owning:
            runs_of.setdefault(position, []).append(run.index)
    units = [
        (modules[position][1], Unit(i, modules[position][0], tuple(owned)))
        for i, (position, owned) in enumerate(sorted(runs_of.items()))
    ]
    return parameters, runs, units


class SavedTensor:
    """A saved tensor that is no model data."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        self.refuse_modified(tuple(self._tensor.shape))
        return self._tensor

    def refuse_modified(self, shape: tuple[int, ...]) -> None:
        """What autograd says of a tensor that was written after it was saved."""
        version = self._tensor._version
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(shape)}] is at version {version}; expected version {self._version} "
                "instead"
            )


class Observer(Protocol):
    def enter(self, unit: Unit) -> None:
        """A module that owns parameters starts: they must be readable until `leave`."""

    def leave(self, unit: Unit) -> None:
        """The module is done, or its forward raised."""

    def read(self, run: int, outside: bool) -> None:
        """A parameter of `run` was read while its module was not running.

        It stays readable until `unread`, or, where it was read outside every module (`outside`), until
        something else needs its room.
        """

    def unread(self, run: int) -> None:
        """The module that read a foreign parameter is done."""

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """Autograd saves `tensor`: a handle to find it again, or None where it is not model data."""

    def keep(self, tensor: torch.Tensor) -> SavedTensor | None:
        """Autograd saves what is no model data, and nobody computes it again: how it is kept, or None where the
        observer does not care."""

    def unpack(self, handle: Any) -> torch.Tensor:
        """Backward wants what `pack` described."""

    def reverse_block(self, unit: Unit) -> None:
        """Backward comes to a compiled block: it wants all parameters of the block, until it comes to another unit."""

    def gradient(self, parameter: int) -> None:
        """The gradient of a parameter (by index) has been accumulated into its `.grad`."""
