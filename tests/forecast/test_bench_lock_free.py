"""`ebbtide bench lockfree`: who has the same memory, who the same share on SSD; wrong input is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.bench.lock_free_steps import EXACT, FREE, _kinds
from ebbtide.bench.steps import Ours, tokens
from ebbtide.cli.app import run
from ebbtide.models import find_model


def test_an_exact_engine_has_the_same_share_on_ssd_and_one_the_same_memory(tmp_path: Path) -> None:
    kinds = _kinds("gpt2-tiny", 0.9, 1, 16, 4, "bf16", tmp_path)
    exact, ample, free = kinds.values()
    assert (exact["updates"], ample["updates"], free["updates"]) == ("exact", "exact", "lock-free")
    assert ample["device"] == free["device"] and ample["host"] == free["host"]
    assert exact["device"]["memory"] < free["device"]["memory"]
    assert len({settings["ssd"]["folder"] for settings in kinds.values()}) == 3
    assert {settings["precision"] for settings in kinds.values()} == {"bf16"}
    shares = {}
    for kind in (EXACT, FREE):
        ours = Ours(
            "gpt2-tiny", tokens("gpt2-tiny", 1, 16), kinds[kind], module=find_model("gpt2-tiny").on_meta()
        )
        try:
            for _ in range(2):
                ours.step()
            session = ours.engine._session
            shares[kind] = session.homes.streamed(session.shape) / sum(session.shape.state_bytes)
        finally:
            ours.close()
    assert 0.8 < shares[EXACT] <= 0.9 and 0.8 < shares[FREE] <= 0.9


def test_parameters_and_gradients_stay_in_memory(tmp_path: Path) -> None:
    """What is compared is where state lives, not how parameters come from the disk in every pass."""
    free = _kinds("gpt2-tiny", 0.9, 1, 16, 4, "fp32", tmp_path)[FREE]
    ours = Ours("gpt2-tiny", tokens("gpt2-tiny", 1, 16), free, module=find_model("gpt2-tiny").on_meta())
    try:
        for _ in range(3):
            ours.step()
        plan = ours.engine._session.cursor.plan
        assert plan is not None and not plan.evicted
    finally:
        ours.close()


def test_a_share_that_is_none_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lockfree", "--share", "0"]) == 2
    found = capfd.readouterr().err
    assert "--share:" in found and "--shares" not in found
