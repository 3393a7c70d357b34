"""`ebbtide bench lockfree`: both engines have the same memory, and wrong input is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.bench.lockfree import _kinds
from ebbtide.cli.app import run


def test_both_engines_have_the_same_memory(tmp_path: Path) -> None:
    kinds = _kinds("gpt2-tiny", 0.9, 1, 16, 4, tmp_path)
    exact, free = kinds["exact"], kinds["lock-free"]
    assert exact["device"] == free["device"] and exact["host"] == free["host"]
    assert exact["ssd"]["folder"] != free["ssd"]["folder"]
    assert (exact["updates"], free["updates"]) == ("exact", "lock-free")


def test_a_share_that_is_none_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lockfree", "--share", "0"]) == 2
    found = capfd.readouterr().err
    assert "--share:" in found and "--shares" not in found
