"""What TensorBoard and torch.profiler get to see of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ebbtide
import zoo
from ebbtide.cli.app import run as command
from ebbtide.report.run_files import read_run
from ebbtide.report.tensorboard import scalars
from harness import batch_of, config_of
from pages import BUDGETS, lines_of, small_run


def test_scalars_are_the_numbers_of_the_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, board = small_run(tmp_path / "run"), tmp_path / "board"
    assert command(["report", str(run), "--tensorboard", str(board)]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(board), size_guidance={"scalars": 0})
    found.Reload()
    lines = lines_of(run)
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines
    ]
    for link, count in lines[-1]["bytes"].items():
        assert found.Scalars(f"bytes/{link}")[-1].value == pytest.approx(count)
    assert found.Scalars("evaluated/valid_loss")[0].step == 4
    total = sum(len(found.Scalars(tag)) for tag in found.Tags()["scalars"])
    assert total == len(list(scalars(read_run(run)))) and f"{total:,} scalars" in capfd.readouterr().err


def test_in_a_profile_our_work_has_names(tmp_path: Path) -> None:
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(precision="fp32", **BUDGETS))

    def step(number: int) -> None:
        engine.backward(engine(**batch_of("gpt2", number, torch.float32, "cpu")).loss)
        engine.step()

    for number in range(3):
        step(number)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(3)
    names = {event.key for event in profile.key_averages() if event.key.startswith("ebbtide: ")}
    engine.close()
    modules = {name for name, _ in zoo.build("gpt2").named_modules()}
    entered = {name.removeprefix("ebbtide: enter ") for name in names if name.startswith("ebbtide: enter ")}
    assert entered and entered <= modules
    assert any(name.startswith("ebbtide: gradient ") for name in names)
    assert any(name.startswith("ebbtide: host_to_device, param ") for name in names)
