"""What the tests' own shortcut rests on: engines that differ only in budgets and policies imagine the same pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ebbtide
import zoo
from ebbtide.planner.record import Record
from ebbtide.runtime.planning import tracer
from harness import batch_of, config_of
from imagined import once
from reference import ROUND

IMAGINES = True

ALIKE: list[dict[str, Any]] = [
    {"device": {"memory": 4_000_000}},
    {"device": {"memory": "64MB"}, "host": {"memory": "1GB"}, "placement": "host", "eviction": "lru"},
]
MODES = {"gpt2": "non-reentrant", "t5": "reentrant", "vit": "none"}


@pytest.mark.parametrize("name", MODES)
def test_engines_that_share_a_pass_would_imagine_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[Record] = []
    imagine = tracer.trace_symbolically

    def note(*given: Any, **settings: Any) -> Record:
        found = imagine(*given, **settings)
        moments = tuple(replace(moment, host_seconds=0.0) for moment in found.moments)
        made.append(replace(found, moments=moments))
        return made[-1]

    for change in ALIKE:
        monkeypatch.setattr(tracer, "trace_symbolically", note)
        start(name, **change)
    assert len(made) == 2 and made[0] == made[1]
    monkeypatch.setattr(tracer, "trace_symbolically", once(note))
    for change in (*ALIKE, {**ALIKE[0], "precision": "fp32"}):
        start(name, **change)
    assert len(made) == 4 and made[2] == made[0] != made[3]


def start(name: str, **changes: Any) -> None:
    """The first pass of an engine, which imagines it."""
    engine = ebbtide.initialize(zoo.build(name, MODES[name]), config_of(**changes))
    dtype = ROUND[engine.config.precision]
    engine(**batch_of(name, 0, dtype, engine.device))
    engine.close()
