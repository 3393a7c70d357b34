"""What an iteration must move at least: of that which it uses, and no more than memory cannot hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebbtide.bench.ssd_steps import bound_of
from ebbtide.forecasting.simulation.bound import least_streamed, least_traffic
from ebbtide.forecasting.simulation.outlook import Question
from ebbtide.forecasting.simulation.strategies import set_up
from ebbtide.planner.shape import Settings
from test_simulate import MACHINE, small_question

LAYERS, ELEMENTS = 6, 1 << 20


def question(**config: Any) -> Question:
    return small_question(LAYERS, ELEMENTS, 0, 10**9, MACHINE.with_devices(1), config)


def budgets(layers: float, host: float = 0, ssd: int = 10**9) -> Settings:
    """Room for the parameters, state and gradients of so many layers."""
    return Settings(round(16 * ELEMENTS * layers), round(16 * ELEMENTS * host), ssd=ssd)


@pytest.mark.parametrize("settings", [budgets(3), budgets(3, 20, 0)], ids=["SSD", "host"])
def test_state_that_no_gradient_comes_for_need_not_move(settings: Settings) -> None:
    asked = question()
    shape, record = set_up("ebbtide", asked.ask).shape, asked.record
    few = replace(record, arrivals=tuple(one for one in record.arrivals if one.parameter < 2))
    states = tuple(count if i < 2 else 0 for i, count in enumerate(shape.state_bytes))
    found = least_traffic(shape, few, settings)
    assert found == least_traffic(replace(shape, state_bytes=states), few, settings)
    assert found < least_traffic(shape, record, settings)


def test_what_the_host_holds_does_not_stream() -> None:
    asked = question()
    shape, record = set_up("ebbtide", asked.ask).shape, asked.record
    alone, beside = (least_streamed(shape, record, budgets(2, host)) for host in (0, 1))
    assert alone - beside == 16 * ELEMENTS
    assert least_streamed(shape, record, budgets(2, 4)) == 0
    assert least_streamed(shape, record, budgets(2, 0, 0)) == 0  # there is nothing to stream to


def test_a_disk_that_nothing_streams_to_is_not_in_the_bound() -> None:
    ceilings = {"disk_read": 1e9, "disk_write": 1e9, "disk_mixed": 1e9, "disk_cores": 1e-10, "update": 1e9}
    for streamed, resources in ((10**9, {"disk", "cores"}), (0, {"cores"})):
        facts = {"least_streamed_bytes": streamed, "update_bytes": 10**9}
        found = bound_of(1.0, 2.0, facts, ceilings, clipped=False)["resource_seconds"]
        assert found.keys() - {"cores_for_transfers"} == resources
