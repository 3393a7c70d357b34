"""The planner asked again about a recorded step: the same question gives the same plan, a change what it is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planner.offloaded_plan import plan_afloat
from ebbtide.report.figures import figures
from ebbtide.report.run_files import read_run
from ebbtide.report.run_verdict import run_verdict
from ebbtide.report.what_if import MEASURED, Problem, Together, _timed, measured_machine, what_if
from pages import last_full_step, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def with_state_on_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Though the device has room for some."""
    return small_run(tmp_path_factory.mktemp("host"), placement="host", device={"memory": 4_000_000})


def moving(step: dict[str, Any], seconds: float) -> dict[str, Any]:
    """As if moves came one after the other and each took so long, everything else a thousandth of its time, and the
    update of each chunk a microsecond: updates run beside the loop, and a recorded step may end before any of them."""
    moves = [[*row[:5], place * seconds, (place + 1) * seconds] for place, row in enumerate(step["moves"])]
    spans = [
        [cause, begin / 1e3, end / 1e3, depth, chunk] for cause, begin, end, depth, chunk in step["spans"]
    ]
    moments = [[begin / 1e3, *rest] for begin, *rest in step["moments"]]
    chunks = Problem.from_plain(step["problem"]).shape.chunks
    updates = [[chunk, "host", chunk * 1e-6, (chunk + 1) * 1e-6, False] for chunk in range(chunks)]
    return {**step, "moves": moves, "spans": spans, "moments": moments, "updates": updates}


def test_what_the_planner_was_asked_is_kept_as_it_was(run: Path) -> None:
    step = last_full_step(run)
    asked = Problem.from_plain(step["problem"])
    assert asked == Problem.from_plain(json.loads(json.dumps(asked.plain())))
    plan = plan_afloat(asked.shape, asked.record, asked.settings, asked.offload)
    assert plan.traffic == step["plan"]["traffic"] and plan.highest == step["plan"]["highest"]
    assert list(plan.levels) == step["plan"]["levels"]


def test_rates_are_bytes_over_the_seconds_in_which_they_flowed(run: Path) -> None:
    step = last_full_step(run)
    asked = Problem.from_plain(step["problem"])
    step["bytes"] = {"host_to_device": 300}
    step["moves"] = [
        ["host_to_device", 0, "param", 100, 0.0, 1.0, 2.0],
        ["host_to_device", 1, "param", 100, 0.0, 1.5, 2.0],
        ["host_to_device", 2, "param", 100, 0.0, 5.0, 6.0],
        ["host_to_device", 3, "param", 100, 0.0, None, None],
    ]
    found = measured_machine(step, asked, "cpu", 1)
    assert found.name == MEASURED and found.links.host_device == 150.0


def test_more_memory_is_worth_the_more_the_slower_moves_are(run: Path) -> None:
    step = last_full_step(run)
    found = [what_if(moving(step, seconds), "cpu", 1) for seconds in (1e-6, 10.0)]
    worth = [dict(one.lifts)["a quarter more device.memory"] for one in found if one is not None]
    assert len(worth) == 2 and worth[1] > worth[0] >= 0.99
    assert found[1] is not None and found[0] is not None and found[1].seconds > found[0].seconds


def test_a_setting_that_costs_more_than_it_brings_is_named(with_state_on_host: Path) -> None:
    step = moving(last_full_step(with_state_on_host), 10.0)
    found = what_if(step, "cpu", 1)
    assert found is not None
    [(setting, instead, factor)] = found.costly
    assert (setting, instead) == ('placement = "host"', 'placement = "auto"') and factor > 1.03
    files = read_run(with_state_on_host)
    said = run_verdict(files, figures(files)["recorded"], found).sentence
    assert (
        f"{setting} costs more than it brings: {instead} would make a step {factor:.2f} times as fast" in said
    )


def test_without_a_plan_nothing_is_asked(run: Path) -> None:
    assert what_if({**last_full_step(run), "problem": None}, "cpu", 1) is None


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=8),
    st.integers(0, 50),
    st.integers(0, 20),
)
def test_time_together_is_counted_once(spans: list[tuple[int, int]], begin: int, length: int) -> None:
    found = Together([(first, first + count) for first, count in spans])
    ticks = {tick for first, count in spans for tick in range(first, first + count)}
    assert found.within(begin, begin + length) == len(ticks & {*range(begin, begin + length)})


def test_what_updates_took_of_the_cores_is_not_the_computations(run: Path) -> None:
    """A step in which updates ran all the time: by itself the computation takes half as long, and so do they."""
    step = last_full_step(run)
    step["spans"] = [["computing", 0.0, 8.0, 0, -1]]
    step["updates"] = [[0, "host", 0.0, 8.0, True]]
    asked = Problem.from_plain(step["problem"])
    alone = {**step, "updates": [[0, "host", 8.0, 12.0, True]]}
    for kind, same in (("cpu", True), ("cuda", False)):
        seconds = [
            sum(moment.work[0].flops for moment in _timed(asked.record, one, 1, kind).moments) / 1e9
            for one in (step, {**alone, "spans": [["computing", 0.0, 4.0, 0, -1]]})
        ]
        assert (seconds[0] == pytest.approx(seconds[1], rel=1e-3)) == same
    assert (
        measured_machine(step, asked, "cpu", 1).host.update
        == measured_machine(alone, asked, "cpu", 1).host.update
    )
