"""`ebbtide bench lockfree`: both engines have the same memory, and wrong input is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import ebbtide
from ebbtide.bench.lockfree import _kinds
from ebbtide.bench.steps import tokens
from ebbtide.cli.app import run
from ebbtide.models import find_model


def test_both_engines_have_the_same_memory(tmp_path: Path) -> None:
    kinds = _kinds("gpt2-tiny", 0.9, 1, 16, 4, "bf16", tmp_path)
    exact, free = kinds["exact"], kinds["lock-free"]
    assert exact["device"] == free["device"] and exact["host"] == free["host"]
    assert exact["ssd"]["folder"] != free["ssd"]["folder"]
    assert (exact["updates"], free["updates"]) == ("exact", "lock-free")
    assert (exact["precision"], free["precision"]) == ("bf16", "bf16")


def test_parameters_and_waiting_gradients_stay_in_memory(tmp_path: Path) -> None:
    """What is compared is where state lives, not how parameters come from the disk in every pass."""
    seen = ebbtide.trace(
        find_model("gpt2-tiny").on_meta(), {k: v.to("meta") for k, v in tokens("gpt2-tiny", 1, 16).items()}
    )
    parameters = 4 * sum(spec.numel for spec in seen.tensors)
    free = _kinds("gpt2-tiny", 0.9, 1, 16, 4, "fp32", tmp_path)["lock-free"]
    assert free["device"]["memory"] >= 2 * parameters + seen.record.peak // 2


def test_a_share_that_is_none_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lockfree", "--share", "0"]) == 2
    found = capfd.readouterr().err
    assert "--share:" in found and "--shares" not in found
