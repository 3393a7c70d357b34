"""What a step updates with, which ranks that share the chunks must have alike: each updates a part of every weight."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ebbtide.errors import StateError
from ebbtide.runtime.distributed.ranks import Ranks

Settings = dict[str, Any]
"""By what messages call them: numbers, and tuples of numbers."""
NEARLY = 1e-9
"""Processors of other makes may compute the cosine of one schedule so far apart."""


def step_settings(
    groups: Sequence[Mapping[str, Any]], read: Iterable[str], clip: float | None, place: Mapping[str, int]
) -> Settings:
    """`read`: what the rule reads of a group. `clip`: the norm that gradients are clipped to. `place`: each parameter's
    group, -1 for none."""
    found = {
        f"param_groups[{number}][{key!r}]": _plain(group.get(key))
        for number, group in enumerate(groups)
        for key in read
    }
    return {**found, "the norm to clip to": clip} | {f"the group of {name}": at for name, at in place.items()}


def checksum(settings: Settings) -> int:
    return zlib.crc32(repr(settings).encode())


def require_alike(ranks: Ranks, settings: Settings, step: int) -> None:
    """Raises on all ranks where one has others."""
    everywhere = ranks.objects(settings)
    first = everywhere[0]
    for rank, theirs in enumerate(everywhere):
        for key in [*first, *(key for key in theirs if key not in first)]:
            one, other = first.get(key), theirs.get(key)
            if not _alike(one, other):
                raise StateError(
                    f"step {step}: ranks would update their parts of the weights with different settings: {key} is "
                    f"{one} on rank 0 and {other} on rank {rank}. Most likely a schedule follows a loss that "
                    "is one rank's alone: give it the mean of all ranks', or set the same on each. Nothing was updated"
                )


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
