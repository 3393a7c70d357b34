"""`ebbtide report`: shows what is there, says what is missing, and refuses where there is nothing."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.cli.app import run as command
from ebbtide.kernels import RULES
from ebbtide.planner.shape import GRAD, PARAM, WHOLE, WHOLE_GRAD
from ebbtide.report.figures import KINDS, POINTS, busy_seconds, explained, figures, flat, thinned
from ebbtide.report.page import as_text
from ebbtide.report.run_files import read_run
from pages import data_of, lines_of, page_of, small_run


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


def reported(folder: Path, capfd: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    status = command(["report", str(folder), *flags])
    return status, capfd.readouterr().err


def test_the_command_writes_a_page(run: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, said = reported(run, capfd)
    assert status == 0 and "A step takes" in said and "% of the bound" in said
    text = (run / "report.html").read_text()
    assert (
        len(text) < 3_000_000
        and "http://" not in text.replace("http://www.w3.org", "")
        and "https://" not in text
    )
    other = tmp_path / "other.html"
    assert command(["report", str(run), "--out", str(other), "--json"]) == 0
    said = capfd.readouterr().out
    assert json.loads(said)["page"] == str(other) and other.exists()


def cut_metrics(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-25])


def spoil_step(run: Path) -> None:
    path = min((run / "steps").iterdir())
    path.write_bytes(path.read_bytes()[:100])


def empty_step(run: Path) -> None:
    min((run / "steps").iterdir()).write_bytes(gzip.compress(b"[]"))


def another_format(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "format": 99}))


def not_ended(run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    del facts["ended"]
    (run / "run.json").write_text(json.dumps(facts))


DAMAGE: dict[str, tuple[Any, str]] = {
    "cut in a line": (cut_metrics, "1 of 8 lines cannot be read and are left out"),
    "no metrics": (
        lambda run: (run / "metrics.jsonl").unlink(),
        "metrics.jsonl is missing: there are no curves",
    ),
    "no facts": (lambda run: (run / "run.json").unlink(), "run.json is missing: settings and machine"),
    "facts cut": (lambda run: (run / "run.json").write_text("{"), "run.json cannot be read"),
    "facts no table": (lambda run: (run / "run.json").write_text("[]"), "run.json is no table"),
    "another version": (another_format, "has format 99, this ebbtide reads 1"),
    "killed": (not_ended, "has not ended, or was killed"),
    "a step cut": (spoil_step, "cannot be read"),
    "a step empty": (empty_step, "is not shown"),
    "no steps": (lambda run: shutil.rmtree(run / "steps"), "no step was recorded in full"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_said_and_the_rest_is_shown(
    damage: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = DAMAGE[damage]
    spoil(run)
    status, said = reported(run, capfd)
    assert status == 0 and expected in said
    assert expected in (run / "report.html").read_text()


def test_nothing_to_show_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = reported(tmp_path / "none", capfd)
    assert status == 2 and "expected the folder of a run" in said
    status, said = reported(tmp_path, capfd)
    assert status == 2 and "has no run.json, no metrics.jsonl and no recorded steps" in said
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    status, said = reported(tmp_path, capfd)
    assert status == 2


def test_a_page_that_cannot_be_written_is_refused(
    run: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, said = reported(run, capfd, "--out", str(tmp_path / "no" / "page.html"))
    assert status == 2 and "cannot be written" in said and "--out" in said
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_the_numbers_are_those_of_the_files(run: Path) -> None:
    found = data_of(page_of(run))
    lines = lines_of(run)
    assert found["curves"]["loss"] == [[line["step"], line["loss"]] for line in lines]
    for link, points in found["links"].items():
        assert points == [[line["step"], line["bytes"][link]] for line in lines]
    assert {event["event"] for event in found["events"]} == {"evaluated", "traced"}
    for step in found["recorded"]:
        line = lines[step["step"] - 1]
        assert sum(step["causes"].values()) == pytest.approx(line["seconds"])
        assert sum(step["lanes"]["thread"]["span"]) / 1e6 == pytest.approx(
            sum(line["causes"].values()), abs=2e-3
        )


@given(st.text())
def test_no_text_can_end_the_script(text: str) -> None:
    made = as_text({"name": text + "</script><!--"})
    assert "<" not in made and json.loads(made)["name"] == text + "</script><!--"


intervals = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=20,
)


@given(intervals)
def test_a_lane_is_busy_as_long_as_anything_runs_in_it(found: list[tuple[int, int]]) -> None:
    rows = [[begin, end, 0, "param", 1, 1] for begin, end in found]
    seen = {tick for begin, end in found for tick in range(begin, end)}
    assert busy_seconds("ssd_read", rows) == len(seen)


@given(st.recursive(st.integers(1, 3), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=12))
def test_nested_pieces_become_segments_side_by_side(tree: Any) -> None:
    """Each moment belongs to the innermost piece, and none is lost or counted twice."""
    spans: list[list[Any]] = []
    clock = 1

    def walk(node: Any, depth: int) -> None:
        nonlocal clock
        begin = clock
        clock += 1
        for child in node if isinstance(node, list) else ():
            walk(child, depth + 1)
        clock += node if isinstance(node, int) else 1
        spans.append([f"depth {depth}", float(begin), float(clock), depth, -1])

    walk(tree, 0)
    found = flat(spans)
    assert [row[0] for row in found[1:]] == [row[1] for row in found[:-1]]
    assert (found[0][0], found[-1][1]) == (1.0, float(clock))
    for begin, end, _, cause, *_ in found:
        inside = [span for span in spans if span[1] <= begin and end <= span[2]]
        assert max(inside, key=lambda span: span[3])[0] == cause


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [[float(n), float((n * 7919) % 1000)] for n in range(20_000)]
    points[12_345][1] = 1e6
    found = thinned(points)
    assert len(found) <= POINTS and [12_345.0, 1e6] in found and found == sorted(found)


def test_what_the_causes_leave_is_a_row_of_its_own() -> None:
    assert explained({"computing": 3.0, "mine": 1.0}, 5.0) == {
        "computing": 3.0,
        "mine": 1.0,
        "unexplained": 1.0,
    }


def test_another_rank_has_its_steps_on_the_page(run: Path, kept: Path) -> None:
    shutil.copytree(kept, run / "rank-1")
    (run / "rank-1" / "run.json").unlink()
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "ranks": 2}))
    found = read_run(run)
    assert [one.rank for one in found.everyone] == [0, 1]
    assert any(problem.startswith("rank 1: run.json is missing") for problem in found.problems)
    text = page_of(run).read_text()
    assert ", rank 0" in text and ", rank 1" in text


def test_a_forecast_has_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Planned and simulated, nothing run: its seconds and bytes are those of the JSON."""
    page, plain = tmp_path / "plan.html", tmp_path / "plan.json"
    flags = [
        "plan",
        "--model",
        "gpt:layers=4,hidden=256,heads=4",
        "--machine",
        "v100-node",
        "--gpus",
        "2",
        "--json",
    ]
    assert command([*flags, "--report", str(page)]) == 0
    answer = json.loads(capfd.readouterr().out)
    found = data_of(page)
    [step] = found["recorded"]
    assert (
        found["simulated"]
        and step["seconds"] == answer["step_seconds"]
        and step["bytes"] == answer["moved_bytes"]
    )
    assert found["verdict"]["sentence"] == answer["verdict"]
    assert sum(step["causes"].values()) == pytest.approx(answer["step_seconds"])
    assert [row[0] for row in step["moments"]] == sorted(row[0] for row in step["moments"])
    assert step["levels"] and any(row[1] == "forward" for row in step["moments"])
    assert command([*flags, "--compare", "--report", str(page)]) == 2
    assert "a page shows one forecast" in capfd.readouterr().err
    assert command([*flags, "--report", str(plain)]) == 0 and json.loads(plain.read_text())["timelines"]


def test_where_a_machine_is_named_the_forecast_is_beside_what_came(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('machine = "laptop"\nprecision = "fp32"\n')
    flags = ["--model", "gpt2-tiny", "--steps", "3", "--seq", "32", "--batch", "1", "--config", str(config)]
    assert command(["train", *flags, "--out", str(tmp_path / "run"), "--json"]) == 0
    found = read_run(tmp_path / "run")
    told = found.facts["forecast"]
    assert told["fits"] and told["step_seconds"] > 0 and told["machine"] == "laptop"
    rows = {name: (forecast, came) for name, _, forecast, came in figures(found)["forecast"]}
    assert rows["seconds a step"][0] == told["step_seconds"] and rows["seconds a step"][1] > 0
    peak = found.steps[-1]["peak"]["device"]
    assert rows["most bytes on device"] == (told["peak_bytes"]["device"], peak)
    assert data_of(page_of(tmp_path / "run"))["forecast"]


def test_whatever_the_loop_wrote_the_page_opens(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((run / "run.json").read_text())
    facts |= {"task": "finetune", "result": [1], "machine": 3, "forecast": "none"}
    (run / "run.json").write_text(json.dumps(facts))
    with (run / "metrics.jsonl").open("a") as file:
        for line in (
            {"step": 8, "seconds": "3 s", "bytes": 7, "causes": [1], "tokens": None},
            {"step": 9, "event": 4},
        ):
            file.write(json.dumps(line) + "\n")
    status, said = reported(run, capfd)
    assert status == 0 and "A step takes" in said


def test_what_comes_between_steps_is_in_no_rate(run: Path) -> None:
    """A recorded step with an evaluation beside it is judged without it."""
    path = max((run / "steps").iterdir())
    step = json.loads(gzip.decompress(path.read_bytes()))
    was = data_of(page_of(run))
    for cause, spent in (("evaluation", 100.0), ("recording", 50.0)):
        step["causes"][cause] = step["causes"].get(cause, 0.0) + spent
        step["seconds"] += spent
    path.write_bytes(gzip.compress(json.dumps(step).encode()))
    found = data_of(page_of(run))
    assert found["verdict"]["sentence"].partition(";")[0] == was["verdict"]["sentence"].partition(";")[0]
    assert "evaluation" not in found["verdict"]["sentence"]


def test_events_that_were_lost_are_said(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = max((run / "steps").iterdir())
    step = json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(gzip.compress(json.dumps({**step, "lost": 36}).encode()))
    status, said = reported(run, capfd)
    assert status == 0 and "36 events were too many to be kept" in said


def test_ranks_that_an_earlier_run_had_are_not_shown(run: Path, kept: Path) -> None:
    shutil.copytree(kept, run / "rank-1")
    assert [one.rank for one in read_run(run).everyone] == [0]


def test_every_kind_of_chunk_has_a_category() -> None:
    assert {
        PARAM,
        GRAD,
        WHOLE,
        WHOLE_GRAD,
        *(kind for rule in RULES.values() for kind in rule.states),
    } <= KINDS.keys()
