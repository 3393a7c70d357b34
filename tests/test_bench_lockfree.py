"""`ebbtide bench lockfree`: both engines have the same memory, and wrong input is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.bench.lockfree import _kinds
from ebbtide.bench.steps import Ours, tokens
from ebbtide.cli.app import run
from ebbtide.models import find_model


def test_both_engines_have_the_same_memory(tmp_path: Path) -> None:
    kinds = _kinds("gpt2-tiny", 0.9, 1, 16, 4, "bf16", tmp_path)
    exact, free = kinds["exact"], kinds["lock-free"]
    assert exact["device"] == free["device"] and exact["host"] == free["host"]
    assert exact["ssd"]["folder"] != free["ssd"]["folder"]
    assert (exact["updates"], free["updates"]) == ("exact", "lock-free")
    assert (exact["precision"], free["precision"]) == ("bf16", "bf16")


def test_parameters_and_gradients_stay_in_memory(tmp_path: Path) -> None:
    """What is compared is where state lives, not how parameters come from the disk in every pass."""
    free = _kinds("gpt2-tiny", 0.9, 1, 16, 4, "fp32", tmp_path)["lock-free"]
    ours = Ours("gpt2-tiny", tokens("gpt2-tiny", 1, 16), free, module=find_model("gpt2-tiny").on_meta())
    try:
        for _ in range(3):
            ours.step()
        plan = ours.engine._session.course.plan
        assert plan is not None and not plan.evicted
    finally:
        ours.close()


def test_a_share_that_is_none_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lockfree", "--share", "0"]) == 2
    found = capfd.readouterr().err
    assert "--share:" in found and "--shares" not in found
