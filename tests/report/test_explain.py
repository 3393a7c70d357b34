"""`ebbtide.explain(engine)` says where the bytes are and why, and a notebook can show it."""

from __future__ import annotations

from typing import Any

import torch

import ebbtide
import zoo
from ebbtide.units import format_size
from harness import batch_of, config_of
from pages import BUDGETS


def explained(steps: int, **settings: Any) -> tuple[ebbtide.Engine, str, str]:
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(precision="fp32", **settings))
    for number in range(steps):
        engine.backward(engine(**batch_of("gpt2", number, torch.float32, "cpu")).loss)
        engine.step()
    found = ebbtide.explain(engine)
    return engine, str(found), found._repr_html_()


def test_under_a_budget_it_names_the_fullest_moment_and_the_margin() -> None:
    engine, said, shown = explained(3, **BUDGETS)
    stats = engine.stats()
    assert f"device: at most {format_size(stats['peak_bytes']['device'])} of {format_size(2_500_000)}" in said
    assert f"A step moves {format_size(stats['planned_traffic'])} by the plan" in said
    assert f"no plan could move less than {format_size(stats['minimum_traffic'])}" in said
    assert "The fullest moment is " in said and " are left." in said and "Optimizer state, by chunk: " in said
    assert shown.startswith("<ul>") and shown.count("<tr>") == 1 + said.count(" at the most\n") + 0
    engine.close()


def test_before_the_first_pass_and_where_everything_fits() -> None:
    engine, said, _ = explained(0, **BUDGETS)
    assert "There is no plan yet: the first pass makes one." in said
    engine.close()
    engine, said, _ = explained(2)
    assert "everything stays on the device, nothing moves" in said
    engine.close()


def test_names_are_text_in_a_notebook() -> None:
    engine, _, _ = explained(1, **BUDGETS)
    engine._session.imagining.note = "<b>"
    assert "<b>" in str(engine.explain()) and "<b>" not in engine.explain()._repr_html_()
    engine.close()
