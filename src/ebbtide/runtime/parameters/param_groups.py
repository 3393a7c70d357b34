"""How each parameter is updated next: its param group, its step, and neighbours that are updated alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.kernels import Rule, require_settings
from ebbtide.runtime.parameters.binding import ModelData


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring parameters of a chunk that are updated alike."""

    offset: int
    count: int
    coefficients: tuple[float, ...]

    def within(self, offset: int, count: int) -> Segment | None:
        """What it has in common with a range of the chunk's elements."""
        first, last = max(self.offset, offset), min(self.offset + self.count, offset + count)
        return Segment(first, last - first, self.coefficients) if first < last else None


class ParamGroups:
    def __init__(self, data: ModelData, rule: Rule) -> None:
        self.data = data
        self.rule = rule
        self.groups: Sequence[Mapping[str, Any]] = []
        self.group_of = [-1] * len(data.parameters)
        """By parameter; -1 where the optimizer does not have it."""
        self.counts = [0] * len(data.parameters)

    def grouped(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Which of the groups each parameter is in; -1: in none."""
        index = {id(p): i for i, p in enumerate(self.data.parameters)}
        found = [-1] * len(index)
        for place, group in enumerate(groups):
            require_settings(group, place, self.rule.settings)
            for parameter in group["params"]:
                if id(parameter) in index:
                    found[index[id(parameter)]] = place
        return found

    def segments(
        self, members: Sequence[int], scale: float, groups: Sequence[Mapping[str, Any]] = (), ahead: int = 0
    ) -> Iterator[Segment]:
        """Neighbouring parameters with the same settings and step become one segment. `groups`: those that were, in
        place of the optimizer's. `ahead`: of the step so many further on."""
        groups = groups or self.groups
        open_: Segment | None = None
        shares = self.data.shares
        known: dict[tuple[int, int], tuple[float, ...]] = {}
        for member in sorted(members, key=lambda m: shares[m].offset):
            place = shares[member]
            if not place.numel:
                continue  # other ranks have it
            alike = self.group_of[member], self.counts[member] + ahead
            coefficients = known.get(alike)
            if coefficients is None:
                coefficients = known[alike] = self.rule.coefficients(groups[alike[0]], alike[1], scale)
            if open_ is not None:
                gap = place.offset - (open_.offset + open_.count)
                if 0 <= gap < 1024 and coefficients == open_.coefficients:
                    count = place.offset + place.numel - open_.offset
                    open_ = Segment(open_.offset, count, coefficients)
                    continue
                yield open_
            open_ = Segment(place.offset, place.numel, coefficients)
        if open_ is not None:
            yield open_
