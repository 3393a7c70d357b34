"""What people copy runs: each example, in small, as its head says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sampling import some
from test_integrations_trl import causal, tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = {
    "sft": {"text": "the a of to and in is it you that he was"},
    "dpo": {"prompt": "the a of", "chosen": " to and in is", "rejected": " it you"},
}


ALONE: list[str] = []
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]


def example(name: str, folder: Path, *flags: str, launcher: list[str] = ALONE) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *flags],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


LOOPS = {
    "plain_loop": ("--device", "cpu"),
    "accelerate_loop": ("--cpu",),
    "lightning_module": ("--accelerator", "cpu"),
    "pretrain_with_ssd": ("--device", "cpu"),
    "mixture_of_experts": ("--device", "cpu"),
    "generate_and_train": ("--device", "cpu"),
}


@pytest.mark.parametrize("name", some(LOOPS, 3))
def test_loops(name: str, tmp_path: Path) -> None:
    said = example(name, tmp_path, *LOOPS[name])
    assert "loss" in said or "reward" in said


def test_ranks_share_one_model(tmp_path: Path) -> None:
    said = example(
        "plain_loop", tmp_path, "--device", "cpu", "--device-memory", "3MB", "--steps", "3", launcher=TORCHRUN
    )
    assert said.count("step 2: loss") == 1
    assert [path.name for path in (tmp_path / "trained").glob("step-*")] == ["step-00000003"]
    shards = sorted(path.name for path in (tmp_path / "trained" / "step-00000003").glob("*.bin"))
    assert shards == ["rank-00000.bin", "rank-00001.bin"]


@pytest.mark.heavy
def test_accelerate_on_ranks_and_by_its_launcher(tmp_path: Path) -> None:
    """Its launcher starts several processes for GPUs, or by MPI; on a CPU there is torchrun."""
    flags = ["--cpu", "--device-memory", "8MB"]
    for launcher, ranks in ((TORCHRUN, 2), (ACCELERATE, 1)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert example("accelerate_loop", folder, *flags, launcher=launcher).count("epoch 0: loss") == 1
        shards = sorted(path.name for path in (folder / "accelerated" / "ebbtide-0").glob("step-*/*.bin"))
        assert shards == [f"rank-{rank:05}.bin" for rank in range(ranks)]


@pytest.mark.heavy
def test_lightning_on_ranks_and_as_it_starts_them_itself(tmp_path: Path) -> None:
    flags = ["--accelerator", "cpu", "--devices", "2", "--device-memory", "8MB"]
    losses = []
    for place, launcher in enumerate((TORCHRUN, ALONE)):
        folder = tmp_path / str(place)
        folder.mkdir()
        said = example("lightning_module", folder, *flags, launcher=launcher)
        losses += [line for line in said.splitlines() if line.startswith("loss ")]
    assert len(losses) == 2 and losses[0] == losses[1]


def test_a_trainer(tmp_path: Path) -> None:
    flags = ["--cpu", "--steps", "2", "--length", "16", "--out", str(tmp_path / "out")]
    assert "saved in" in example("finetune_with_trainer", tmp_path, *flags)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(("name", "lora"), some([("sft", True), ("dpo", True), ("dpo", False)], 2))
def test_tuning(name: str, lora: bool, tmp_path: Path) -> None:
    causal().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(ROWS[name])] * 16))
    flags = [
        "--model",
        "model",
        "--data",
        "rows.jsonl",
        "--cpu",
        "--steps",
        "2",
        *(["--lora"] if lora else []),
    ]
    assert "bytes of the device" in example(name, tmp_path, *flags)
    saved = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in saved


def test_each_fits_a_screen_and_says_its_flags() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert f"examples/{path.name}" in text.split('"""')[1], path
        if path.name != "plan_a_plain_loop.py":
            assert text.count("\n") < 60, path
