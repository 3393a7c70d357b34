"""The trace for Perfetto has a slice for each event and a count for each level, in the format that it reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.app import run as command
from ebbtide.report.perfetto import TRACKS
from pages import small_run

NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""Of the trace event format: what an event of each phase must have."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The recorded steps, and the trace's events."""
    folder = small_run(tmp_path_factory.mktemp("run"))
    path = folder / "trace.json.gz"
    assert command(["report", str(folder), "--perfetto", str(path)]) == 0
    found = json.loads(gzip.decompress(path.read_bytes()))
    steps = [json.loads(gzip.decompress(one.read_bytes())) for one in sorted((folder / "steps").iterdir())]
    return steps, found["traceEvents"]


def test_each_event_has_what_the_format_asks_for(traced: Any) -> None:
    _, events = traced
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())


def test_there_are_as_many_as_there_were(traced: Any) -> None:
    steps, events = traced
    for process, step in enumerate(steps, 1):
        mine = [event for event in events if event["pid"] == process]
        slices = [event for event in mine if event["ph"] == "X"]
        beside = sum(row[4] for row in step["updates"])
        assert len(slices) == len(step["moments"]) + len(step["spans"]) + len(step["moves"]) + beside
        assert sum(event["ph"] == "C" for event in mine) == len(step["levels"])
        for link, count in step["bytes"].items():
            track = [event for event in slices if event["tid"] == TRACKS.index(link)]
            assert sum(event["args"]["bytes"] for event in track) == count


def test_tracks_have_names_and_slices_of_one_thread_nest(traced: Any) -> None:
    _, events = traced
    names = [
        event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1
    ]
    assert names[:3] == ["moments", "the thread that trains", "updates"] and len(names) == len(TRACKS)
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == TRACKS.index("thread")]
    above: list[float] = []
    for one in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
        while above and above[-1] <= one["ts"] + 1e-3:
            above.pop()
        assert not above or one["ts"] + one["dur"] <= above[-1] + 2e-3
        above.append(one["ts"] + one["dur"])


def test_an_arrow_goes_from_an_arrival_to_a_later_use(traced: Any) -> None:
    _, events = traced
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins and begins.keys() == ends.keys()
    for key, begin in begins.items():
        assert begin["ts"] <= ends[key]["ts"] and begin["pid"] == ends[key]["pid"]
        assert ends[key]["tid"] == TRACKS.index("moments")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = small_run(tmp_path / "run", steps=3)
    assert command(["report", str(folder), "--perfetto", str(tmp_path / "no" / "trace.json")]) == 2
    assert "--perfetto" in capfd.readouterr().err
