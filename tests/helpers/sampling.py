"""How many of its cases a test takes.

`make test-all` takes all of them. `make test` takes a few, spread so that each value of each axis is among them: what
breaks for one model or one budget breaks for its neighbours, too, and nobody waits an hour for that to be said twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

_all = True


def take(all_cases: bool) -> None:
    """What the tests of this run take."""
    global _all
    _all = all_cases


def everything() -> bool:
    return _all


def few(cases: Iterable[Any], count: int) -> list[Any]:
    """For a loop in a test: so many of them, evenly spread, the first and the last among them."""
    cases = list(cases)
    return cases if _all else [cases[place] for place in _spread(len(cases), count)]


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """For the cases of a test: all but so many, evenly spread, are left to `make test-all`."""
    cases = list(cases)
    daily = _spread(len(cases), count)
    return [
        _case(list(one) if isinstance(one, tuple) else [one], place in daily)
        for place, one in enumerate(cases)
    ]


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """For the cases of a test: each value of one axis with each of the others. Those beside the diagonal, which has each
    value once, are left to `make test-all`."""
    values = [list(axis) for axis in axes]
    daily = {tuple(turn % len(axis) for axis in values) for turn in range(max(map(len, values)))}
    places = product(*(range(len(axis)) for axis in values))
    return [
        _case([axis[i] for axis, i in zip(values, place, strict=True)], place in daily) for place in places
    ]


def _spread(length: int, count: int) -> list[int]:
    if count >= length:
        return list(range(length))
    return [round(number * (length - 1) / max(1, count - 1)) for number in range(count)]


def _case(parts: list[Any], daily: bool) -> Any:
    """Values may have names: `pytest.param(value, id="name")`."""
    values = [value for part in parts for value in (part.values if isinstance(part, _Named) else [part])]
    named = any(isinstance(part, _Named) for part in parts)
    name = "-".join(str(part.id if isinstance(part, _Named) else part) for part in parts) if named else None
    return pytest.param(*values, id=name, marks=() if daily else pytest.mark.heavy)


_Named = type(pytest.param(0))
