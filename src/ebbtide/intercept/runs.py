"""Which parameters are used together: the runs that states are kept for.

A *run* is a set of parameters with the same owning modules, so they are always entered and left together; a
tied weight is a run of its own with two owners. A *unit* is a module as the observer sees it: the runs it
owns directly. Both are found once, so that nothing per tensor happens while the model executes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterRun:
    index: int
    parameters: tuple[int, ...]
    """Indices into the list of managed parameters, in definition order."""


@dataclass(frozen=True)
class Unit:
    index: int
    name: str
    runs: tuple[int, ...]


def find_units(
    module: nn.Module, managed: Collection[nn.Parameter]
) -> tuple[list[nn.Parameter], list[ParameterRun], list[tuple[nn.Module, Unit]]]:
    """The managed parameters in definition order, their runs, and each owning module with its unit."""
    wanted = {id(parameter) for parameter in managed}
    parameters: list[nn.Parameter] = []
    index_of: dict[int, int] = {}
    owners: dict[int, list[int]] = {}
    modules = [(name, child) for name, child in module.named_modules()]
    for position, (_, child) in enumerate(modules):
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
    runs = [ParameterRun(i, tuple(members)) for i, members in enumerate(grouped.values())]
    runs_of: dict[int, list[int]] = {}
    for run, owning in zip(runs, grouped, strict=True):
        for position in owning:
            runs_of.setdefault(position, []).append(run.index)
    units = [
        (modules[position][1], Unit(i, modules[position][0], tuple(owned)))
        for i, (position, owned) in enumerate(sorted(runs_of.items()))
    ]
    return parameters, runs, units
