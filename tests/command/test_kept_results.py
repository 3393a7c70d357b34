"""What a benchmark finds is kept with where it comes from, and only whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "keep_result.py"


def keep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    command = "bench loss --tokens 64 --vocabulary 100 --width 16 --repeats 1"
    done = keep(tmp_path, "loss-here", *command.split())
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert file.name == "loss-here.json"
    assert found["command"] == f"ebbtide {command} --json"
    assert {"date", "commit", "machine", "versions", "losses"} <= found.keys()
    assert found["machine"]["cpu"] and found["machine"]["cores"] >= 1


def test_one_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    before = tmp_path / "overlap-here.json"
    before.write_text("{}")
    done = keep(tmp_path, "overlap-here", "bench", "overlap", "--unit", "11")
    assert done.returncode != 0 and "expected seconds from 0.001 to 10" in done.stderr
    assert "nothing was kept" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a/b", "bench", "overlap"), "expected a file's name such as loss-xeon, found 'a/b'"),
        (("here", "train"), "expected bench and its options, found 'train'"),
        (("here",), "expected bench and its options, found ''"),
    ],
)
def test_wrong_inputs(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = keep(tmp_path, *arguments)
    assert done.returncode == 2 and said in done.stderr
    assert not list(tmp_path.iterdir())
