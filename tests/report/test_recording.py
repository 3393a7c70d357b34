"""`engine.record`: the folder says what the run did, byte for byte, and recording changes nothing of it."""

from __future__ import annotations

import gc
import gzip
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ebbtide
import zoo
from ebbtide.engine import recording as module
from ebbtide.errors import ConfigError, EbbtideWarning, StateError
from ebbtide.memory import journal
from ebbtide.report.run_folder import RunWriter
from group import group_of
from harness import batch_of, config_of

STEPS = 7
SMALL = {"device": {"memory": 2_500_000}, "host": {"memory": 6_000_000}}
NAME = "gpt2"


def settings_of(**settings: Any) -> dict[str, Any]:
    if settings.get("updates") == "in-backward":
        settings["clip"] = None
    return config_of(precision="fp32", **settings)


def loss_of(engine: ebbtide.Engine, number: int) -> torch.Tensor:
    return engine(**batch_of(NAME, number, torch.float32, "cpu")).loss


def train(folder: Path | None, steps: int = STEPS, **settings: Any) -> tuple[str, dict[str, Any]]:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**settings))
    try:
        recording = None if folder is None else engine.record(folder)
        for number in range(steps):
            loss = loss_of(engine, number)
            engine.backward(loss)
            engine.step()
            if recording is not None and number == 3:
                recording.add(accuracy=0.5)
                recording.mark("evaluated", valid_loss=1.5)
        return engine.weights_sha256(), engine.stats()
    finally:
        engine.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def full_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted((folder / "steps").iterdir())]


def check_folder(folder: Path, moved: dict[str, int], steps: int = STEPS) -> None:
    """What the lines say adds up to what moved; what is in full adds up to what its line says."""
    every = lines(folder)
    found = [line for line in every if "event" not in line]
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    for link in found[0]["bytes"]:
        assert sum(line["bytes"][link] for line in found) <= moved[link]
    whole = full_steps(folder)
    assert whole, "no step was recorded in full"
    for step in whole:
        line = found[step["step"] - 1]
        assert step["bytes"] == line["bytes"] and step["causes"] == line["causes"] and not step["lost"]
        for link, count in line["bytes"].items():
            rows = [row for row in step["moves"] if row[0] == link]
            assert sum(row[3] for row in rows) == count
            for _, _, _, _, issued, begin, end in rows:
                assert begin is None or (issued <= end and begin <= end)
        check_pieces(step)
        positions = [row[3] for row in step["moments"]]
        assert len(positions) == len(set(positions))
        budget = line["budget"]
        for _, tier, tags, non_model in step["levels"]:
            assert sum(tags.values()) + non_model <= budget[tier], (tier, tags, non_model)


def check_pieces(step: dict[str, Any]) -> None:
    """Pieces of one depth do not overlap, and those of a deeper one lie within one above; without what is nested in them
    they add up to the causes' seconds."""
    own: dict[str, float] = {}
    above: list[tuple[str, float, float]] = []
    for cause, begin, end, depth, _ in sorted(step["spans"], key=lambda row: (row[1], row[3])):
        assert begin <= end
        del above[depth:]
        if depth:
            assert len(above) == depth and above[-1][1] <= begin and end <= above[-1][2] + 1e-6
            own[above[-1][0]] -= end - begin
        own[cause] = own.get(cause, 0.0) + end - begin
        above.append((cause, begin, end))
    for cause, seconds in step["causes"].items():
        assert own.get(cause, 0.0) == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        SMALL,
        {**SMALL, "updates": "in-backward"},
        {**SMALL, "accumulate": 2},
        {**SMALL, "updates": "lock-free"},
        {**SMALL, "offload_activations": "all"},
    ],
    ids=["everything fits", "budget", "in backward", "accumulate", "lock-free", "activations"],
)
def test_the_folder_says_what_moved_and_the_bits_are_the_same(settings: Any, tmp_path: Path) -> None:
    steps = STEPS // settings.get("accumulate", 1)
    sha, stats = train(tmp_path / "run", **settings)
    plain, _ = train(None, **settings)
    if settings.get("updates") != "lock-free":
        assert sha == plain
    check_folder(tmp_path / "run", stats["moved_bytes"], steps)


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_on_ssd(updates: str, folder: Path, tmp_path: Path) -> None:
    ssd = {"device": {"memory": 2_500_000}, "host": {"memory": 1_800_000}}
    ssd |= {"ssd": {"folder": str(folder), "memory": "64MB"}}
    sha, stats = train(tmp_path, updates=updates, **ssd)
    assert stats["moved_bytes"]["ssd_read"] and sha == train(None, updates=updates, **ssd)[0]
    check_folder(tmp_path, stats["moved_bytes"])
    assert any(
        row[0] == "ssd_read" and row[5] is not None for step in full_steps(tmp_path) for row in step["moves"]
    )


def test_what_the_loop_says_is_there(tmp_path: Path) -> None:
    train(tmp_path, **SMALL)
    found = lines(tmp_path)
    assert found[3]["accuracy"] == 0.5
    assert found[4] == {"event": "evaluated", "step": 4, "valid_loss": 1.5}
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["format"] == 1 and run["ended"] >= run["started"]
    rows = {row["setting"]: row for row in run["settings"]}
    assert rows["device.memory"]["resolved"] == "2500000" and rows["device.memory"]["why"] == "as asked"
    assert rows["eviction"]["why"] == "the default"
    assert run["model"]["chunks"] and run["model"]["units"] and run["machine"]["torch"] == torch.__version__


def test_tokens_are_the_elements_of_the_first_whole_numbers() -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    assert module.tokens_in([torch.zeros(2, 2), {"a": None, "ids": ids}]) == 15
    assert module.tokens_in([torch.zeros(2, 2), 7]) == 0


def test_a_run_that_goes_on_has_its_lines_before(tmp_path: Path) -> None:
    """What a killed run left of later steps, and a line that was cut, are gone."""
    train(tmp_path, steps=6, **SMALL)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    writer = RunWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before  # nothing goes before something comes
    assert writer.begin(4) == {1, 2, 3, 4}
    writer.line({"step": 5, "loss": 0.0})
    writer.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4, 5]
    assert (tmp_path / "metrics.earlier.jsonl").read_bytes() == before
    assert all(int(path.name[:6]) <= 4 for path in (tmp_path / "steps").iterdir())


def test_a_run_without_a_step_leaves_the_one_before_as_it_was(tmp_path: Path) -> None:
    """Its settings may have been refused, or it was killed while it was planned."""
    train(tmp_path, **SMALL)
    (tmp_path / "run.json").write_text('{"format": 1, "started": "on an earlier day"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    recording = engine.record(tmp_path)
    recording.add_earlier([])
    recording.describe(task="another")
    engine.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    train(tmp_path, steps=2, **SMALL)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "run.json").read_text()) != json.loads(before[tmp_path / "run.json"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_closes_nothing_has_all_its_steps(fails: bool, tmp_path: Path) -> None:
    script = f"""
import torch, ebbtide
module = torch.nn.Linear(4, 4)
engine = ebbtide.initialize(module, {{"precision": "fp32", "device": {{"kind": "cpu"}}}})
engine.record({str(tmp_path)!r})
for _ in range(3):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
{"raise KeyError(1)" if fails else ""}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == fails, done.stderr
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert ("ended" in json.loads((tmp_path / "run.json").read_text())) is not fails


def test_a_function_that_closes_nothing_has_all_its_steps(tmp_path: Path) -> None:
    def run() -> None:
        engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
        engine.record(tmp_path)
        for number in range(3):
            engine.backward(loss_of(engine, number))
            engine.step()

    run()
    for _ in range(500):  # a thread of the engine's may just be at work
        gc.collect()
        if "ended" in json.loads((tmp_path / "run.json").read_text()):
            break
        time.sleep(0.02)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    RunWriter(tmp_path).close()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    with pytest.raises(ConfigError, match=r"another run writes to .* now; wait for its end"):
        engine.record(tmp_path)
    writer.close()
    engine.record(tmp_path)
    engine.record(tmp_path)  # the same engine again: the recording before it ends
    engine.close()
    RunWriter(tmp_path).close()


@pytest.mark.parametrize("background", [False, True])
def test_one_folder_takes_recordings_and_checkpoints(background: bool, tmp_path: Path) -> None:
    """In either order, and in turn; nobody waits for the other's lock."""
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.save(tmp_path)
    engine.record(tmp_path)
    for step in range(2):
        engine.backward(loss_of(engine, step))
        engine.step()
        engine.save(tmp_path, background=background)
        engine.wait_for_save()
    engine.close()
    assert [line["step"] for line in lines(tmp_path) if "event" not in line] == [1, 2]
    again = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    again.record(tmp_path)
    again.load(tmp_path)
    again.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        RunWriter(tmp_path / "file")


def test_not_in_the_middle_of_a_step(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.backward(loss_of(engine, 0))
    with pytest.raises(StateError, match="before the first pass, or after step"):
        engine.record(tmp_path)
    engine.close()


def test_a_full_disk_ends_the_recording_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever bytes of a line the disk still took."""
    begin = RunWriter.begin

    def on_a_full_disk(self: RunWriter, after: int) -> set[int]:
        found = begin(self, after)
        os.dup2(os.open("/dev/full", os.O_WRONLY), self._metrics)
        return found

    plain, _ = train(None, **SMALL)
    monkeypatch.setattr(RunWriter, "begin", on_a_full_disk)
    with pytest.warns(EbbtideWarning, match="cannot be written to any more .No space left on device"):
        sha, _ = train(tmp_path, **SMALL)
    assert sha == plain and lines(tmp_path) == []
    monkeypatch.undo()
    RunWriter(tmp_path).close()  # nobody holds it


def test_whatever_goes_wrong_in_recording_ends_it_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(module, "plain_step", wrong)
    plain, _ = train(None, **SMALL)
    with pytest.warns(EbbtideWarning, match="ZeroDivisionError: of ours"):
        sha, _ = train(tmp_path, **SMALL)
    assert sha == plain and len(lines(tmp_path)) >= 3
    monkeypatch.undo()
    with pytest.warns(EbbtideWarning, match="the last lines"):
        engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
        recording = engine.record(tmp_path / "other")
        monkeypatch.setattr(type(recording), "close", wrong)
        engine.close()
    assert engine.closed and not any(engine._tiers.backend.held().values())


def test_loading_a_checkpoint_after_record_keeps_the_lines_before_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for again in (False, True):
        engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
        engine.record(run)
        if again:
            engine.load(tmp_path / "kept")
        for number in range(engine.steps, engine.steps + 4):
            engine.backward(loss_of(engine, number))
            engine.step()
            if not again and number == 1:
                engine.save(tmp_path / "kept")
        engine.close()
    found = [line.get("event", line["step"]) for line in lines(run)]
    assert found == [1, 2, "resumed", 3, 4, 5, 6]


def test_numbers_of_tensors_and_anything_else_are_kept_and_own_names_refused(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    recording = engine.record(tmp_path)
    engine.backward(loss_of(engine, 0))
    engine.step()
    with pytest.raises(ConfigError, match="'peak' is a name of ebbtide's own"):
        recording.add(peak=0.9)
    with pytest.raises(ConfigError, match="'model' is a name of ebbtide's own"):
        recording.describe(model="mine")
    recording.add(accuracy=torch.tensor(0.5), where=tmp_path, worst=float("nan"))
    recording.mark("evaluated", step=7, event="x", loss=torch.tensor([1.0]))
    recording.describe(note=tmp_path)
    recording.describe(note="again")
    engine.close()
    step, event = lines(tmp_path)
    assert step["accuracy"] == 0.5 and step["where"] == str(tmp_path) and step["worst"] is None
    assert event == {"step": 1, "event": "evaluated", "loss": 1.0}
    assert json.loads((tmp_path / "run.json").read_text())["note"] == "again"


def test_what_is_added_is_in_the_steps_line_or_is_told_to_be_lost(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    recording = engine.record(tmp_path)
    with pytest.warns(EbbtideWarning, match=r"recording\.add\(early\): no step has ended yet, so it is lost"):
        recording.add(early=1)
    for number in range(2):
        engine.backward(loss_of(engine, number))
        engine.step()
        recording.add(first=number)
        recording.add(second=number)
    recording.mark("evaluated")
    with pytest.warns(
        EbbtideWarning, match=r"recording\.add\(late\): the last step's line is written already"
    ):
        recording.add(late=1)
    engine.close()
    one, two, event = lines(tmp_path)
    assert [(line["first"], line["second"]) for line in (one, two)] == [(0, 0), (1, 1)]
    assert event["event"] == "evaluated"
    assert not any({"early", "late"} & line.keys() for line in (one, two, event))


def test_a_resumed_run_goes_on_with_the_loops_numbers(tmp_path: Path) -> None:
    """Of six steps two were skipped: the checkpoint has four updates, the loop goes on with the seventh step."""
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    writer = RunWriter(tmp_path)
    writer.begin(0)
    for step in range(1, 7):
        writer.line({"step": step})
    writer.close()
    engine._core.steps = 4
    engine.record(tmp_path).add_earlier({"step": step} for step in range(1, 7))
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.close()
    assert [line["step"] for line in lines(tmp_path) if "event" not in line] == [1, 2, 3, 4, 5, 6, 7]


def test_an_engine_that_nobody_holds_gives_its_folder_back(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    with pytest.raises(ConfigError, match="another run writes"):
        RunWriter(tmp_path)
    del writer
    gc.collect()
    RunWriter(tmp_path).close()


def test_skipped_steps_have_lines_of_their_own(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL, nonfinite="continue"))
    engine.record(tmp_path)
    for number in range(4):
        engine.backward(loss_of(engine, number) * (float("nan") if number == 1 else 1.0))
        engine.step()
    engine.close()
    assert [(line["step"], line["skipped"]) for line in lines(tmp_path)] == [
        (1, False),
        (2, True),
        (3, False),
        (4, False),
    ]


def test_evaluations_and_what_follows_a_save_have_their_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them is unexplained, and no step with one beside it is kept in full."""
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.record(tmp_path / "run")
    for number in range(8):
        engine.backward(loss_of(engine, number))
        engine.step()
        if number in (1, 4):
            with torch.no_grad():
                loss_of(engine, 0)
        if number == 5:
            engine.save(tmp_path / "kept")
            assert engine._session.journal._outside == journal.LOOP
    engine.close()
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found if "evaluation" in line["causes"]] == [3, 6]
    assert [line["step"] for line in found if "saving" in line["causes"]] == [7]
    assert [step["step"] for step in full_steps(tmp_path / "run")] == [4, 8]


def test_many_plans_leave_few_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 2)
    monkeypatch.setattr(journal, "MOST", 60)
    train(tmp_path, steps=9, **SMALL)
    found = full_steps(tmp_path)
    assert len(found) == 2
    for step in found:
        assert all(len(step[rows]) <= 60 for rows in ("moments", "spans", "moves", "updates", "levels"))
        assert step["lost"] > 0 and len(step["spans"]) == 60


def test_a_loss_that_the_engine_was_not_given_is_not_made_up(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.record(tmp_path)
    for number in range(2):
        loss = loss_of(engine, number)
        loss.backward() if number else engine.backward(loss)
        engine.step()
    engine.close()
    assert ["loss" in line for line in lines(tmp_path)] == [True, False]


def _on_ranks(folder: str) -> int:
    rank = dist.get_rank()
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.record(folder)
    for number in range(STEPS):
        engine.backward(loss_of(engine, 2 * number + rank))
        engine.step()
    moved = dict(engine.stats()["moved_bytes"])
    engine.close()
    own = Path(folder) if rank == 0 else Path(folder) / f"rank-{rank}"
    check_folder(own, moved)
    found: int = json.loads((own / "run.json").read_text())["rank"]
    return found


def test_each_rank_has_a_folder(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert group_of(2).run(_on_ranks, str(tmp_path)) == [0, 1]


def test_the_loss_is_that_of_the_gradients(tmp_path: Path) -> None:
    """Of micro-batches that the engine averages the mean; of those that the loop has divided itself, the sum."""
    found = {}
    for accumulate in (1, 2):
        engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL, accumulate=accumulate))
        engine.record(tmp_path / str(accumulate))
        for number in range(2):
            engine.backward(loss_of(engine, number) / (2 if accumulate == 1 else 1))
            if accumulate == 2 or number:
                engine.step()
        engine.close()
        [line] = lines(tmp_path / str(accumulate))
        found[accumulate] = line["loss"]
    assert found[1] == pytest.approx(found[2], rel=1e-6)


def test_a_second_recording_of_an_engine_begins_anew(tmp_path: Path) -> None:
    """What the first one charged and counted is none of its steps'."""
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.record(tmp_path / "first")
    for number in range(4):
        if number == 2:
            engine.record(tmp_path / "second")
        engine.backward(loss_of(engine, number))
        engine.step()
    moved = engine.stats()["moved_bytes"]
    engine.close()
    first, second = lines(tmp_path / "first"), lines(tmp_path / "second")
    assert [line["step"] for line in first] == [1, 2]
    assert [line.get("event", line["step"]) for line in second] == ["resumed", 3, 4]
    for line in second[1:]:
        assert sum(line["causes"].values()) <= line["seconds"] * 1.001
    for link, count in moved.items():
        assert sum(line["bytes"][link] for line in [*first, *second[1:]]) == count


def test_what_happens_before_the_first_step_is_kept(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build(NAME), settings_of(**SMALL))
    engine.record(tmp_path).mark("evaluated", loss=2.0)
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.close()
    assert [line.get("event", line["step"]) for line in lines(tmp_path)] == ["evaluated", 1]
