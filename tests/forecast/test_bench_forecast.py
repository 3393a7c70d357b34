"""What the forecast's benchmark makes of many measurements of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.bench import forecast_accuracy
from ebbtide.errors import ConfigError
from ebbtide.forecasting.simulation.machine import Machine

CASE = forecast_accuracy.ForecastCase("gpt2-tiny", 64, "all on the device", 10**9, 0)


def test_the_middle_of_machines_is_taken_number_by_number() -> None:
    found = [
        {"name": "a", "device": {"flops": flops, "matmul": curve}}
        for flops, curve in (
            (1.0, [[10, 1.0], [20, 5.0]]),
            (9.0, [[10, 3.0], [20, 4.0], [40, 8.0]]),
            (2.0, [[10, 2.0], [20, 9.0]]),
        )
    ]
    # A point that most measurements lack says nothing.
    assert forecast_accuracy._middle(found) == {
        "name": "a",
        "device": {"flops": 2.0, "matmul": [[10, 2.0], [20, 5.0]]},
    }


def test_a_row_is_measured_again_where_its_visits_differ() -> None:
    assert not forecast_accuracy._apart([{"step_seconds": 1.0}, {"step_seconds": 1.04}])
    assert forecast_accuracy._apart([{"step_seconds": 1.2}, {"step_seconds": 1.0}])


def test_a_journal_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    kept = forecast_accuracy._Journal(path)
    machine = Machine.read("laptop")
    kept.add_machine(machine)
    kept.add_visit(CASE, {"step_seconds": 1.5})
    again = forecast_accuracy._Journal(path)
    assert again.machines == [machine] and again.visits[CASE] == [{"step_seconds": 1.5}]
    with path.open("a") as file:
        file.write('{"case": {"mod')
    with pytest.raises(ConfigError, match="line 3 is no measurement"):
        forecast_accuracy._Journal(path)
