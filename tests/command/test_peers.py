"""The comparison with others: the same work, turns, and what becomes of who cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PEERS.parent))
    monkeypatch.syspath_prepend(str(PEERS))
    import run_peers

    return run_peers


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS / "run_peers.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def one(seconds: list[float], losses: list[float], peak: int = 100) -> dict[str, Any]:
    facts = {"cpu_seconds": 1.0, "peak": peak, "whole_peak": peak, "before": 10, "disk_read": 0}
    return facts | {"seconds": seconds, "losses": losses, "disk_written": 0}


def test_a_row_is_held_against_the_process_of_the_same_round(runner: Any) -> None:
    theirs = [one([2.0, 2.0, 2.0], [3.0], 300), one([8.0, 8.0, 9.0], [3.0], 300), one([3.0], [3.0], 300)]
    ours = [one([1.0], [3.0]), one([4.0], [3.0]), one([1.0], [3.0])]
    row = runner.row("plain", theirs, ours)
    assert row["time_over_ours"] == 2.0 and row["rss_over_ours"] == 3.0
    assert row["seconds"] == 3.0 and row["net_peak_rss"] == 290
    assert "time_over_ours" not in runner.row("ebbtide", ours, [])


def test_other_losses_are_told(runner: Any) -> None:
    runs = {"plain": [one([1.0], [4.0, 3.0, 2.0])], "ebbtide": [one([1.0], [4.0, 3.01, 2.0])]}
    assert runner.different_work(runs) == []
    runs["zero-3"] = [one([1.0], [4.0, 4.0, 4.0])]
    [said] = runner.different_work(runs)
    assert said.startswith("zero-3's first losses [4.0, 4.0, 4.0] are not those of plain PyTorch")


def test_where_a_result_goes_is_no_part_of_its_command(runner: Any) -> None:
    asked = ["ram", "--out", "here.json", "--steps", "4", "--out=there.json"]
    assert runner.without_out(asked) == ["ram", "--steps", "4"]


def test_wrong_inputs() -> None:
    for arguments, said in (
        (("ram", "--peers", "zero-4"), "expected some of plain,"),
        (("ram", "--warm-up", "2"), "their losses are compared"),
        (("ram", "--sequence", "1"), "sequence at least 2"),
        (("tape",), "invalid choice"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.heavy
def test_the_same_work_in_small(tmp_path: Path) -> None:
    small = ("--model", "gpt2-tiny", "--batch", "1", "--sequence", "16", "--precision", "fp32")
    once = ("--repeats", "1", "--steps", "2", "--warm-up", "3", "--folder", str(tmp_path))
    peers = ("--peers", "plain,fsdp2,fsdp2-offload,ebbtide")
    out = tmp_path / "peers.json"
    done = run("ram", *small, *once, *peers, "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = {row["peer"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["plain"]["losses"][:3] == pytest.approx(rows["ebbtide"]["losses"][:3], rel=1e-4)
    assert rows["plain"]["time_over_ours"] > 0 and rows["fsdp2"]["rss_over_ours"] > 0
    assert "ended with" in rows["fsdp2-offload"]["error"] or rows["fsdp2-offload"]["seconds"] > 0
