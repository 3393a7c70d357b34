"""What ever smaller device budgets cost, against the resident run, and what each mechanism is worth.

A budget is the non-model peak plus a share of the model data. The rows' `ratio` is taken against a resident step
made in the same round. The other placements and evictions run under the same budget and are fields of its row.
"""

from __future__ import annotations

import statistics
from typing import Any

from ebbtide.bench.steps import Ours, median_ratio, race, tokens
from ebbtide.errors import BudgetError

OTHERS: dict[str, dict[str, Any]] = {
    "placement=host": {"placement": "host"},
    "placement=static": {"placement": "static"},
    "eviction=lru": {"eviction": "lru"},
    "eviction=list-order": {"eviction": "list-order"},
    "prefetch=off": {"prefetch": False},
}


def run(
    model: str = "gpt2-124m",
    batch: int = 2,
    seq: int = 256,
    repeats: int = 7,
    shares: tuple[int, ...] = (2, 4, 8),
) -> dict[str, Any]:
    data = tokens(model, batch, seq)
    resident = Ours(model, data, {"clip": 1.0})
    for _ in range(3):
        resident.step()
    facts = resident.engine.stats()
    peak = facts["non_model_peak"]
    model_data = sum(facts["tags"]["device"].values())
    budgets = {share: peak + model_data // share for share in shares}
    resident.close()
    rows = []
    for share, budget in budgets.items():
        rows.append(_row(model, data, share, budget, repeats))
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "non_model_peak": peak,
        "model_data_bytes": model_data,
        "rows": rows,
    }


def _row(model: str, data: Any, share: int, budget: int, repeats: int) -> dict[str, Any]:
    config = {"clip": 1.0, "device": {"memory": budget}}
    row: dict[str, Any] = {"share": f"1/{share}", "budget_bytes": budget}
    with _Pair(model, data, config) as pair:
        seconds = race({"budget": pair.budget.step, "resident": pair.resident.step}, repeats)
        before = pair.budget.engine.stats()
        pair.budget.step()
        after = pair.budget.engine.stats()
    row["ratio"] = median_ratio(seconds["budget"], seconds["resident"])
    row["step_seconds"] = statistics.median(seconds["budget"])
    row["resident_seconds"] = statistics.median(seconds["resident"])
    row |= _moved(before, after)
    row["minimum_bytes"] = after["minimum_traffic"]
    row["over_minimum"] = row["moved_bytes"] / after["minimum_traffic"] if after["minimum_traffic"] else None
    for name, change in OTHERS.items():
        row[name] = _other(model, data, config | change, repeats)
    return row


def _other(model: str, data: Any, config: dict[str, Any], repeats: int) -> dict[str, Any]:
    try:
        with _Pair(model, data, config) as pair:
            seconds = race({"budget": pair.budget.step, "resident": pair.resident.step}, max(2, repeats // 2))
            before = pair.budget.engine.stats()
            pair.budget.step()
            after = pair.budget.engine.stats()
    except BudgetError as error:
        return {"refused": str(error)}
    return {"ratio": median_ratio(seconds["budget"], seconds["resident"]), **_moved(before, after)}


def _moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    links = {link: after["moved_bytes"][link] - before["moved_bytes"][link] for link in after["moved_bytes"]}
    stalls = {
        link: after["stall_seconds"][link] - before["stall_seconds"][link] for link in after["stall_seconds"]
    }
    return {
        "moved_bytes": sum(links.values()),
        "moved_by_link": links,
        "evictions": after["evictions"] - before["evictions"],
        "stall_seconds": stalls,
    }


class _Pair:
    """A budgeted engine and a resident one, each with tiers of its own."""

    def __init__(self, model: str, data: Any, config: dict[str, Any]) -> None:
        self._arguments = (model, data, config)

    def __enter__(self) -> _Pair:
        model, data, config = self._arguments
        self.budget = Ours(model, data, config)
        try:
            self.resident = Ours(model, data, {"clip": 1.0})
        except BaseException:
            self.budget.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.budget.close()
        self.resident.close()
