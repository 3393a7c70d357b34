"""The planner asked again about a recorded step: the same question gives the same plan, a change what it is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.planner.offloaded_plan import plan_afloat
from ebbtide.report.figures import figures
from ebbtide.report.run_files import read_run
from ebbtide.report.run_verdict import run_verdict
from ebbtide.report.what_if import MEASURED, Problem, measured_machine, what_if
from pages import last_full_step, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def with_state_on_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Though the device has room for some."""
    return small_run(tmp_path_factory.mktemp("host"), placement="host", device={"memory": 4_000_000})


def slower(step: dict[str, Any], factor: float) -> dict[str, Any]:
    """As if each move had taken so much longer."""
    moves = [[*row[:5], row[5], row[5] + factor * (row[6] - row[5])] for row in step["moves"]]
    return {**step, "moves": moves}


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
    found = [what_if(slower(step, factor), "cpu", 1) for factor in (1, 1e5)]
    worth = [dict(one.lifts)["a quarter more device.memory"] for one in found if one is not None]
    assert len(worth) == 2 and worth[1] > worth[0] >= 0.99
    assert found[1] is not None and found[0] is not None and found[1].seconds > found[0].seconds


def test_a_setting_that_costs_more_than_it_brings_is_named(with_state_on_host: Path) -> None:
    step = slower(last_full_step(with_state_on_host), 1e5)
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
