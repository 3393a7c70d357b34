"""Budgets of RAM that leave a share of the optimizer state to SSD: found by the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide.bench.steps import tokens
from ebbtide.config import Config
from ebbtide.errors import BudgetError
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.strategies import Ask, Model, set_up
from ebbtide.models import find_model
from ebbtide.planner.placement import make_plan
from ebbtide.runtime.parameters.selection import PRECISIONS

GB = 10**9
FINE = 500
"""The budget is found to such a part of the state."""


def for_share(
    settings: Mapping[str, Any],
    model: str,
    share: float,
    batch: int,
    seq: int,
    folder: Path | None = None,
    state_alone: bool = False,
) -> dict[str, Any]:
    """RAM as one tier, and SSD in abundance: the least with at most that share of the state there. `state_alone`:
    parameters and gradients never leave RAM."""
    from ebbtide.tracing.standalone import trace

    module = find_model(model).on_meta()
    given = {key: value.to("meta") for key, value in tokens(model, batch, seq).items()}
    config = Config.read(settings)
    seen = trace(module, given, PRECISIONS[config.precision])
    ask = Ask(Model(seen.tensors, seen.runs), Machine.read("laptop"), config)
    setup = set_up("ebbtide", ask)
    states = sum(setup.shape.state_bytes)
    low = seen.record.peak
    high = low + sum(setup.shape.parameter_bytes) + sum(setup.shape.gradient_bytes) + 4 * states
    ssd = 2 * states + 4 * GB
    while high - low > states // FINE:
        middle = (low + high) // 2
        try:
            plan = make_plan(
                setup.shape, seen.record, replace(setup.settings, device=middle, host=0, ssd=ssd)
            )
        except BudgetError:
            low = middle
            continue
        streamed = sum(plan.host.streamed(setup.shape, index) for index in plan.host.ssd)
        enough = streamed <= share * states and not (state_alone and plan.evicted)
        low, high = (low, middle) if enough else (middle, high)
    return {
        "device": {"kind": "cpu", "memory": high},
        "host": {"memory": 0},
        "ssd": {"memory": ssd, **({"folder": str(folder)} if folder else {})},
    }
