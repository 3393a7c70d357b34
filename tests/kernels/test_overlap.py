"""Resources work at the same time: with sleeps for work, a step that overlaps is shorter than one that does not."""

from __future__ import annotations

import pytest

from ebbtide.bench.overlap import CASES, run
from sampling import some


@pytest.mark.parametrize("name", some(CASES, 4))
def test_pairs_overlap(name: str) -> None:
    """A busy machine wakes sleepers late: one of five turns is to show it. Without overlap none does."""
    turns = (run(unit=0.01, repeats=2, cases=(name,))["rows"][0] for _ in range(5))
    # On demand both sleep, one after the other.
    assert any(row["on_demand"] > 1.5 and row["pipelined"] < row["on_demand"] for row in turns)
