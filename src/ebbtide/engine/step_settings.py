"""What a step updates with, which ranks that share the chunks must have alike: each updates a part of every weight."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.runtime.distributed.ranks import Ranks

NEARLY = 1e-9
"""Processors of other makes may compute the cosine of one schedule so far apart."""


@dataclass(frozen=True)
class StepSettings:
    groups: Sequence[Mapping[str, Any]]
    read: Iterable[str]
    """What the rule reads of a group."""
    clip: float | None
    """The norm that gradients are clipped to."""
    names: Sequence[str]
    group_of: Sequence[int]
    """Each parameter's group, -1 for none."""

    @property
    def checksum(self) -> int:
        return zlib.crc32(array("i", self.group_of), zlib.crc32(repr(self._numbers()).encode()))

    def _numbers(self) -> dict[str, Any]:
        found = {
            f"param_groups[{number}][{key!r}]": _plain(group.get(key))
            for number, group in enumerate(self.groups)
            for key in self.read
        }
        return {**found, "the norm to clip to": self.clip}

    def named(self) -> dict[str, Any]:
        """By what messages call them: numbers, and tuples of numbers."""
        places = zip(self.names, self.group_of, strict=True)
        return self._numbers() | {f"the group of {name}": place for name, place in places}


def difference(ranks: Ranks, settings: StepSettings) -> str:
    """What one of the ranks, which all call this, has otherwise than the first; empty where it is rounding."""
    everywhere = ranks.objects(settings.named())
    first = everywhere[0]
    for rank, theirs in zip(ranks.members, everywhere, strict=True):
        for key in [*first, *(key for key in theirs if key not in first)]:
            one, other = first.get(key), theirs.get(key)
            if not _alike(one, other):
                return f"{key} is {one} on rank {ranks.members[0]} and {other} on rank {rank}"
    return ""


def _plain(value: Any) -> Any:
    """A number that may be a tensor, or several; anything else is refused later, by name."""
    try:
        return tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return repr(value)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=NEARLY) or repr(one) == repr(other)
    return bool(one == other)
