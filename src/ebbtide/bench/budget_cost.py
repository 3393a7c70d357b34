"""What ever smaller device budgets cost, against the resident run, and what each mechanism is worth.

A budget is the non-model peak plus a share of the model data. The rows' `ratio` is taken against a resident step
made in the same round, when nothing that the other engine left to be done goes on beside it. The other placements
and evictions run under the same budget and are fields of its row. A budget that is too small is a row that says so.
"""

from __future__ import annotations

import statistics
from typing import Any

from ebbtide.bench.progress import BenchProgress, Report, silent
from ebbtide.bench.steps import Ours, median_ratio, suited, tokens
from ebbtide.errors import BudgetError

WARM_UP = 3
"""Steps that are imagined, traced and planned before any counts."""

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
    precision: str = "auto",
    report: Report = silent,
) -> dict[str, Any]:
    """One row a budget; every config makes its steps in turn with a resident engine that has its own memory."""
    data = tokens(model, batch, seq)
    common = {"clip": 1.0, "precision": suited(precision)}
    resident = Ours(model, data, common)
    try:
        for _ in range(WARM_UP):
            resident.step()
        facts = resident.engine.stats()
        peak, model_data = facts["non_model_peak"], sum(facts["tags"]["device"].values())
        budgets = {share: {"device": {"memory": peak + model_data // share}} for share in shares}
        progress = BenchProgress(len(budgets) * (1 + len(OTHERS)), report)
        rows = [
            _row(model, data, n, common | budget, repeats, resident, progress)
            for n, budget in budgets.items()
        ]
    finally:
        resident.close()
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "repeats": repeats,
        "precision": common["precision"],
        "non_model_peak": peak,
        "model_data_bytes": model_data,
        "rows": rows,
    }


def _row(
    model: str,
    data: Any,
    share: int,
    config: dict[str, Any],
    repeats: int,
    resident: Ours,
    progress: BenchProgress,
) -> dict[str, Any]:
    row = {"share": f"1/{share}", "budget_bytes": config["device"]["memory"]}
    try:
        row |= _measure(model, data, config, repeats, resident)
    except BudgetError as error:
        progress.done(f"{row['share']} of model data: does not fit", 1 + len(OTHERS))
        return row | {"refused": str(error)}
    progress.done(f"{row['share']} of model data: {row['ratio']:.2f} times the resident step")
    for name, change in OTHERS.items():
        try:
            row[name] = _measure(model, data, config | change, max(1, repeats // 3), resident)
        except BudgetError as error:
            row[name] = {"refused": str(error)}
        found = row[name].get("ratio")
        progress.done(f"  {name}: " + ("does not fit" if found is None else f"{found:.2f}"))
    return row


def _measure(model: str, data: Any, config: dict[str, Any], repeats: int, resident: Ours) -> dict[str, Any]:
    budget = Ours(model, data, config)
    try:
        for _ in range(WARM_UP):
            budget.step()
        before = budget.engine.stats()
        pairs = [(budget.step_in_a_row()[0], resident.step_in_a_row()[0]) for _ in range(repeats)]
        after = budget.engine.stats()
    finally:
        budget.close()
    ours, residents = zip(*pairs, strict=True)
    steps = 2 * repeats
    links = {link: _change(before, after, "moved_bytes", link) // steps for link in after["moved_bytes"]}
    moved = sum(links.values())
    return {
        "ratio": median_ratio(ours, residents),
        "step_seconds": statistics.median(ours),
        "resident_seconds": statistics.median(residents),
        "moved_bytes": moved,
        "moved_by_link": links,
        "minimum_bytes": after["minimum_traffic"],
        "over_minimum": moved / after["minimum_traffic"] if after["minimum_traffic"] else None,
        "evictions": (after["evictions"] - before["evictions"]) // steps,
        "stall_seconds": {
            k: _change(before, after, "stall_seconds", k) / steps for k in after["stall_seconds"]
        },
        "device_state_chunks": after["device_state_chunks"],
        "chunks": after["chunks"],
    }


def _change(before: dict[str, Any], after: dict[str, Any], field: str, link: str) -> Any:
    return after[field][link] - before[field][link]
