"""What is measured on a card comes next, runs in small without one, and is on the page of performance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUEUE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run_queue.py"


def queue(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(QUEUE), *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def store(folder: Path, name: str, **changes: object) -> None:
    facts = {"date": "2026-11-30", "commit": "abc", "source": "?", "whole": True, "parts": {"a": {}}}
    (folder / f"{name}.json").write_text(json.dumps(facts | changes))


def test_the_list_says_what_was_run(tmp_path: Path) -> None:
    store(tmp_path, "resident_8b")
    store(tmp_path, "budget_8b", whole=False, parts={"a": {"error": "no room"}, "b": {}})
    code, said = queue("list", "--out", str(tmp_path))
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert code == 0 and "2026-11-30" in lines["resident_8b"] and "cut short" not in lines["resident_8b"]
    assert "failed: a" in lines["budget_8b"] and "never" in lines["two_ranks"]


def test_next_is_the_first_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(QUEUE.parents[1]))
    monkeypatch.syspath_prepend(str(QUEUE.parent))
    import run_queue

    assert run_queue.following(tmp_path) == "resident_8b"
    store(tmp_path, "resident_8b")
    store(tmp_path, "budget_8b", whole=False)
    assert run_queue.following(tmp_path) == "budget_8b"
    for number, name in enumerate(run_queue.ORDER):
        store(tmp_path, name, date=f"2026-12-0{9 - number}")
    assert run_queue.following(tmp_path) == run_queue.ORDER[-1]


def test_wrong_inputs() -> None:
    for arguments, said in (
        (("run",), "expected one of resident_8b"),
        (("run", "resident_9b"), "invalid choice"),
        (("run", "resident_8b", "--small"), "name a folder with --out"),
    ):
        code, found = queue(*arguments)
        assert code == 2 and said in found


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["resident_8b", "budget_8b", "two_ranks"])
def test_a_script_runs_in_small(name: str, tmp_path: Path) -> None:
    code, said = queue("run", name, "--small", "--out", str(tmp_path))
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert code == 0 and found["whole"] and all(found[key] for key in ("machine", "versions", "source")), said


def test_the_page_of_performance_is_what_the_results_give() -> None:
    done = subprocess.run(
        [sys.executable, str(QUEUE.parents[1] / "performance.py"), "--check"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
