"""The command, called as a user calls it: flags in, exit status, one message or one line of JSON out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import ebbtide
from ebbtide.cli.app import app, run, said_plainly
from ebbtide.cli.data import load_text
from ebbtide.errors import DiskError

TINY = ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "vit-tiny"]
FLAGS = """
--model --data --steps --batch --seq --accumulate --clip --lr --schedule --seed --eval-every --precision --master
--layout --chunk-size --placement --eviction --prefetch --updates --max-staleness --checkpoint-activations
--offload-activations --device --device-memory --host-memory --ssd-memory --ssd-dir --config --out --log-moves
--save-every --keep --resume --verbose --json
"""
PROMISED = {
    "steps", "losses", "final_loss", "weights_sha256", "tokens_per_second", "tflops", "step_seconds", "seconds",
    "peak_bytes", "moved_bytes", "offloaded_bytes", "bound_seconds", "achieved_over_bound", "params", "budget_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"the moon lifts the sea for the {n}th time\n" for n in range(500)))
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model's config file, small enough for runs that are not about the model."""
    path = tmp_path / "small.json"
    fields = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 256,
        "n_positions": 64,
    }
    path.write_text(json.dumps(fields | {"bos_token_id": None, "eos_token_id": None}))
    return str(path)


class Command:
    """`ebbtide train` with short steps on a short text, in this process."""

    def __init__(self, text: str, capfd: pytest.CaptureFixture[str]) -> None:
        self._text, self._capfd = text, capfd

    def __call__(self, *flags: str) -> tuple[int, str, str]:
        self._capfd.readouterr()
        status = run(["train", "--data", self._text, "--steps", "2", "--batch", "1", "--seq", "16", *flags])
        captured = self._capfd.readouterr()
        return status, captured.out, captured.err

    def json(self, *flags: str) -> dict[str, Any]:
        status, out, err = self("--json", *flags)
        assert status == 0, err
        assert len(out.splitlines()) == 1
        return json.loads(out)


@pytest.fixture
def train(text: str, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(text, capfd)


def test_flags_are_frozen() -> None:
    """A flag is a promise: adding or removing one is a change of this list, of the docs and the changelog."""
    command = get_command(app).commands["train"]  # type: ignore[attr-defined]
    assert [option for parameter in command.params for option in parameter.opts] == FLAGS.split()


@pytest.mark.parametrize("model", TINY)
def test_every_tiny_preset_trains(train: Command, model: str) -> None:
    result = train.json("--model", model)
    assert result["steps"] == len(result["losses"]) == 2
    assert result.keys() >= PROMISED
    assert 4.5e6 < result["params"] < 5.7e6
    assert result["tokens_per_second"] > 0 and result["tflops"] > 0
    assert result["peak_bytes"]["device"] <= result["budget_bytes"]["device"]


def test_same_weights_within_any_budget(train: Command) -> None:
    runs = [
        train.json("--steps", "3"),
        train.json("--steps", "3", "--device-memory", "24MB"),
        train.json("--steps", "3", "--device-memory", "40MB", "--layout", "page", "--chunk-size", "1MiB"),
        train.json("--steps", "3", "--device-memory", "24MB", "--layout", "tensor", "--prefetch", "off"),
        train.json("--steps", "3", "--device-memory", "24MB", "--placement", "host", "--eviction", "lru"),
    ]
    assert len({result["weights_sha256"] for result in runs}) == 1
    assert all(result["losses"] == runs[0]["losses"] for result in runs)
    assert runs[0]["moved_bytes"]["host_to_device"] == 0
    for result in runs[1:]:
        assert result["moved_bytes"]["host_to_device"] > 0
        assert result["peak_bytes"]["device"] <= result["budget_bytes"]["device"] <= 40e6


def test_lock_free_updates(train: Command, tmp_path: Path) -> None:
    """With state on SSD weights depend on timing, losses of the first step do not."""
    ssd = [
        "--ssd-dir",
        str(tmp_path),
        "--ssd-memory",
        "200MB",
        "--host-memory",
        "0",
        "--device-memory",
        "45MB",
    ]
    plain = train.json("--steps", "3")
    free = train.json("--steps", "3", *ssd, "--updates", "lock-free", "--max-staleness", "2", "--clip", "1")
    assert plain["losses"][0] == free["losses"][0]
    assert free["moved_bytes"]["ssd_write"] > 0 and "lock_free" not in plain
    facts = free["lock_free"]
    assert facts["gradients_applied"] == facts["gradients_produced"] > 0
    assert facts["staleness_max"] <= 2 and facts["pending"] == 0


def test_seed_decides_weights_and_batches(train: Command, small: str) -> None:
    runs = [train.json("--model", small, "--seed", seed) for seed in ("1", "1", "2")]
    hashes = [result["weights_sha256"] for result in runs]
    assert hashes[0] == hashes[1] != hashes[2]


def test_evaluation_does_not_change_training(train: Command, small: str) -> None:
    plain = train.json("--model", small, "--steps", "3")
    evaluated = train.json("--model", small, "--steps", "3", "--eval-every", "2")
    assert "valid_loss" not in plain
    assert 4 < evaluated["valid_loss"] < 6
    assert evaluated["weights_sha256"] == plain["weights_sha256"]


def test_checkpointing_takes_less_and_says_the_same(train: Command, small: str) -> None:
    flags = ("--model", small, "--batch", "4", "--seq", "64", "--precision", "fp32")
    plain, checkpointed = train.json(*flags), train.json(*flags, "--checkpoint-activations")
    assert checkpointed["losses"] == plain["losses"]


def test_offloading_moves_activations_and_says_the_same(train: Command, small: str) -> None:
    flags = (
        "--model",
        small,
        "--batch",
        "8",
        "--seq",
        "64",
        "--device-memory",
        "20MB",
        "--host-memory",
        "20MB",
    )
    plain = train.json(*flags)
    runs = [
        train.json(*flags, "--offload-activations"),
        train.json(*flags, "--offload-activations", "all", "--steps", "2"),
        train.json(*flags, "--offload-activations", "--checkpoint-activations"),
    ]
    assert {run["weights_sha256"] for run in runs[:2]} == {plain["weights_sha256"]}
    assert runs[0]["offloaded_bytes"] == runs[1]["offloaded_bytes"] > 0 == plain["offloaded_bytes"]
    assert runs[0]["moved_bytes"]["device_to_host"] >= runs[0]["offloaded_bytes"]
    assert runs[2]["losses"] == plain["losses"]
    status, _, error = train(*flags, "--offload-activations", "checkpoints")
    assert status == 2 and "expected --checkpoint-activations beside" in error
    status, _, error = train("--model", small, "--device", "cpu", "--offload-activations")
    assert status == 2 and "set host.memory" in error


def test_config_file_and_flags_that_override_it(train: Command, small: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('precision = "fp32"\naccumulate = 2\n[optimizer]\nlr = 3e-3\n')
    from_file = train.json("--model", small, "--config", str(file))
    by_flags = train.json("--model", small, "--precision", "fp32", "--accumulate", "2", "--lr", "3e-3")
    overridden = train.json("--model", small, "--config", str(file), "--lr", "0")
    assert from_file["weights_sha256"] == by_flags["weights_sha256"] != overridden["weights_sha256"]
    assert overridden["losses"][0] == from_file["losses"][0]


def test_schedules(train: Command, small: str, tmp_path: Path) -> None:
    rates = {}
    for schedule in ("constant", "linear", "cosine"):
        flags = ("--schedule", schedule, "--lr", "0.01", "--steps", "4", "--out", str(tmp_path / schedule))
        train.json("--model", small, *flags)
        lines = (tmp_path / schedule / "metrics.jsonl").read_text().splitlines()
        rates[schedule] = [json.loads(line)["lr"] for line in lines]
    assert rates["constant"] == [0.01] * 4
    assert rates["linear"] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert rates["cosine"] == pytest.approx([0.01, 0.0085355, 0.005, 0.0014645], rel=1e-3)


@pytest.mark.parametrize("model", ["small", "t5-tiny", "bert-tiny"])
def test_out_is_a_model_to_start_from(train: Command, small: str, tmp_path: Path, model: str) -> None:
    out = tmp_path / "out"
    flags = ("--model", small if model == "small" else model, "--clip", "1.0")
    first = train.json(*flags, "--out", str(out))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in metrics] == first["losses"]
    assert all(line["grad_norm"] > 0 for line in metrics)
    again = train.json("--model", str(out), "--lr", "0", "--seed", "8")
    assert again["weights_sha256"] == first["weights_sha256"]


def test_a_person_gets_tables(train: Command, small: str) -> None:
    status, out, err = train("--model", small)
    assert status == 0
    assert "weights_sha256" in out and "step 2/2" in err


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == f"ebbtide {ebbtide.__version__}\n"


BAD = {
    "folder that cannot be made": (["--out", "{text}/out"], ["--out", "text.txt", "cannot be written"]),
    "unknown flag": (["--stpes", "3"], ["--stpes", "did you mean '--steps'?"]),
    "not a number": (["--steps", "many"], ["--steps", "'many'"]),
    "unknown preset": (["--model", "gpt-tiny"], ["'gpt-tiny'", "did you mean 'gpt2-tiny'?"]),
    "no such model": (["--model", "nowhere/config.json"], ["nowhere/config.json"]),
    "model without a model": (["--model", "{text}"], ["text.txt", "model's config.json"]),
    "steps": (["--steps", "0"], ["--steps", "at least 1", "found 0"]),
    "batch": (["--batch", "0"], ["--batch", "at least 1", "found 0"]),
    "seq too short": (["--seq", "1"], ["--seq", "at least 2", "found 1"]),
    "seq too long": (["--seq", "2000"], ["--seq", "2000", "context of gpt2-tiny, 1024"]),
    "accumulate": (["--accumulate", "0"], ["--accumulate", "found 0"]),
    "eval-every": (["--eval-every", "-1"], ["--eval-every", "found -1"]),
    "lr": (["--lr", "-1"], ["--lr", "found -1.0"]),
    "clip": (["--clip", "-1"], ["--clip", "found -1.0"]),
    "schedule": (["--schedule", "cosin"], ["--schedule", "did you mean 'cosine'?"]),
    "prefetch": (["--prefetch", "of"], ["--prefetch", "'of'", "did you mean 'off'?"]),
    "precision": (["--precision", "bf61"], ["--precision", "'bf61'", "did you mean 'bf16'?"]),
    "master": (["--master", "splitt"], ["--master", "did you mean 'split'?"]),
    "fp16 and split": (["--precision", "fp16", "--master", "split"], ["--master", "fp16"]),
    "layout": (["--layout", "pages"], ["--layout", "did you mean 'page'?"]),
    "chunk size": (["--chunk-size", "4Mb"], ["--chunk-size", "'4Mb'", "did you mean '4MB'?"]),
    "placement": (["--placement", "hosts"], ["--placement", "did you mean 'host'?"]),
    "eviction": (["--eviction", "lur"], ["--eviction", "did you mean 'lru'?"]),
    "updates": (["--updates", "exakt"], ["--updates", "did you mean 'exact'?"]),
    "clip in backward": (["--updates", "in-backward", "--clip", "1"], ["--clip", "in-backward"]),
    "device": (["--device", "cpuu"], ["--device", "did you mean 'cpu'?"]),
    "device memory": (["--device-memory", "24 giga"], ["--device-memory", "'24 giga'"]),
    "budget too small": (["--device-memory", "2MB"], ["device", "short by", "raise device.memory"]),
    "host too small": (["--device-memory", "24MB", "--host-memory", "1MB"], ["host", "short by"]),
    "no data": (["--data", "nowhere.txt"], ["--data", "nowhere.txt"]),
    "empty data": (["--data", "{empty}"], ["--data", "no text"]),
    "binary data": (["--data", "{binary}"], ["--data", "not a text file"]),
    "short data": (["--data", "{short}"], ["the data has 5 bytes; one sequence needs 16"]),
    "no config": (["--config", "nowhere.toml"], ["nowhere.toml"]),
    "misspelt setting": (["--config", "{config}"], ["precison", "did you mean 'precision'?"]),
    "out is a file": (["--out", "{text}"], ["text.txt"]),
    "loss not finite": (["--lr", "1e30", "--steps", "4"], ["step 2", "the loss is"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(train: Command, text: str, tmp_path: Path, case: str) -> None:
    files = {"empty": b"", "binary": b"\0\1\2" * 100, "short": b"hello", "config": b'precison = "bf16"\n'}
    paths = {"text": text}
    for name, content in files.items():
        path = tmp_path / f"{name}.toml"
        path.write_bytes(content)
        paths[name] = str(path)
    flags, fragments = BAD[case]
    status, out, err = train("--json", *(flag.format(**paths) for flag in flags))
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert [fragment for fragment in fragments if fragment not in err] == []
    said = [line for line in err.splitlines() if not line.endswith("...")]  # what takes long is told
    assert len(said) == 1


def test_after_a_refusal_the_process_goes_on(train: Command, small: str) -> None:
    assert train("--model", small, "--device-memory", "10kB")[0] == 2
    assert train("--model", small, "--device-memory", "20MB")[0] == 0


def test_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert run(["bench", "--help"]) == 0
    assert run(["trian"]) == 2
    assert "did you mean 'train'?" in capfd.readouterr().err.lower()
    assert run(["bench", "offload", "--repeats", "0"]) == 2
    for name in ("overhead", "offload", "ssd", "lockfree"):
        assert run(["bench", name, "--precision", "bf61"]) == 2
    assert "--repeats" in capfd.readouterr().err


def test_warnings_of_ours_are_said_without_a_line_of_code() -> None:
    assert said_plainly("slow", UserWarning, ebbtide.initialize.__code__.co_filename, 3) == "ebbtide: slow\n"
    assert "elsewhere.py:3: UserWarning: slow" in said_plainly("slow", UserWarning, "/elsewhere.py", 3)


def _process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_as_a_process() -> None:
    done = _process("-m", "ebbtide", "train", "--modle", "gpt2-tiny")
    assert done.returncode == 2
    assert done.stdout == "" and "--modle; did you mean '--model'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_openmp_is_set_before_torch_is_loaded() -> None:
    program = """
import os, sys
sys.argv = ["ebbtide", "--help"]
from ebbtide.__main__ import main
assert "OMP_WAIT_POLICY" not in os.environ
try:
    main()
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules, "torch was loaded before the environment was set"
assert os.environ["OMP_WAIT_POLICY"] == "passive"
"""
    done = _process("-c", program)
    assert done.returncode == 0, done.stderr


# -- checkpoints --------------------------------------------------------------------------------------------

SAME = ("steps", "losses", "final_loss", "weights_sha256", "params", "skipped_steps")


def test_a_run_goes_on_where_it_was(train: Command, small: str, tmp_path: Path) -> None:
    flags = (
        "--model",
        small,
        "--steps",
        "6",
        "--schedule",
        "cosine",
        "--eval-every",
        "2",
        "--clip",
        "1.0",
        "--json",
    )
    whole = train.json(*flags)
    out = tmp_path / "run"
    every = (*flags, "--out", str(out), "--save-every", "2", "--keep", "3", "--resume", "auto")
    first = train.json(*every)  # nothing to resume yet: a fresh start
    assert {key: first[key] for key in SAME} == {key: whole[key] for key in SAME}
    folder = out / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", *(f"step-{n:08d}" for n in (2, 4, 6))]
    metrics = (out / "metrics.jsonl").read_text()
    assert train.json(*every) == first  # it is done
    shutil.rmtree(folder / "step-00000006")  # as if it had been killed after the fifth step
    again = train.json(*every)
    assert {key: again[key] for key in SAME} == {key: whole[key] for key in SAME}
    assert again["valid_loss"] == whole["valid_loss"]
    lines = [
        [line for line in map(json.loads, text.splitlines()) if "event" not in line]
        for text in (metrics, (out / "metrics.jsonl").read_text())
    ]
    for one, other in zip(*lines, strict=True):
        assert one["step"] == other["step"] and one["loss"] == other["loss"] and one["lr"] == other["lr"]
    elsewhere = train.json(*flags, "--resume", str(folder / "step-00000004"))
    assert {key: elsewhere[key] for key in SAME} == {key: whole[key] for key in SAME}


def test_resuming_with_other_settings_says_so(train: Command, small: str, tmp_path: Path) -> None:
    flags = ("--model", small, "--out", str(tmp_path), "--save-every", "1", "--resume", "auto")
    train.json(*flags, "--steps", "2")
    status, out, err = train(*flags, "--steps", "3", "--seed", "5", "--json")
    assert status == 0 and "--seed was 0" in err and "--steps was 2" in err
    assert json.loads(out.splitlines()[-1])["steps"] == 3


def test_resuming_tells_settings_and_text_that_differ(train: Command, small: str, tmp_path: Path) -> None:
    """And nothing where all is as it was."""
    out = tmp_path / "run"
    first = ("--model", small, "--out", str(out), "--save-every", "1", "--resume", "auto")
    flags = ("--accumulate", "2", "--lr", "0.003", "--clip", "0.5")
    train.json(*first, *flags)
    status, _, err = train(*first, *flags)
    assert status == 0 and "when the checkpoint was saved" not in err and "stays" not in err
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    config = tmp_path / "config.toml"
    config.write_text("[optimizer]\nweight_decay = 0.5\n")
    other = tmp_path / "other.txt"
    other.write_text("another text " * 400)
    status, _, err = train(*first, "--config", str(config), "--data", str(other))
    assert status == 0
    for said in (
        "--accumulate was 2 when the checkpoint was saved, and is 1 now",
        "--lr was 0.003 when",
        "--clip was 0.5 when",
        "optimizer.weight_decay stays 0.01, as in the checkpoint; 0.5 is not used",
        "--data has other text than when the checkpoint was saved",
    ):
        assert f"ebbtide: {said}" in err, err


def test_what_the_run_writes_is_no_text_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100)
    before = load_text(str(tmp_path), tmp_path / "run").digest
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("numbers")
    assert load_text(str(tmp_path), tmp_path / "run").digest == before != load_text(str(tmp_path)).digest


def test_an_earlier_run_is_not_written_over(train: Command, small: str, tmp_path: Path) -> None:
    flags = ("--model", small, "--out", str(tmp_path), "--save-every", "1")
    train.json(*flags)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, _, err = train(*flags, "--seed", "1")
    assert status == 2 and "up to step 2" in err and "--resume auto goes on with that run" in err, err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_that_could_not_write_its_model_writes_it_when_it_is_resumed(
    train: Command, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--model", small, "--out", str(tmp_path), "--save-every", "1", "--resume", "auto")

    def full(*_: Any) -> None:
        raise DiskError("no space left", file="model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr("ebbtide.engine.Engine.export", full)
        status, _, err = train(*flags)
    assert status == 2 and "no space left" in err and not (tmp_path / "model.safetensors").exists()
    found = train.json(*flags)
    assert found["steps"] == 2 and (tmp_path / "model.safetensors").stat().st_size
    assert (tmp_path / "config.json").exists()


def test_bad_checkpoint_flags(train: Command, small: str, tmp_path: Path) -> None:
    for flags, said in (
        (("--save-every", "2"), "--out"),
        (("--resume", "auto"), "--out"),
        (("--save-every", "-1", "--out", str(tmp_path)), "--save-every"),
        (("--keep", "0", "--save-every", "1", "--out", str(tmp_path)), "--keep"),
        (("--resume", str(tmp_path / "none")), "is not there"),
    ):
        status, _, err = train("--model", small, *flags)
        assert status == 2 and said in err and err.count("\n") == 1, err


def test_a_checkpoint_of_another_model(train: Command, small: str, tmp_path: Path) -> None:
    flags = ("--out", str(tmp_path), "--save-every", "1", "--resume", "auto", "--steps", "1")
    assert train("--model", small, *flags)[0] == 0
    status, _, err = train("--model", "llama-tiny", *flags)
    assert status == 2 and "another model" in err


def test_what_each_chunk_moved_is_logged_by_step(train: Command, small: str, tmp_path: Path) -> None:
    budget = ("--device", "cpu", "--device-memory", "900KB", "--chunk-size", "16KiB")
    flags = (*budget, "--log-moves", str(tmp_path / "moves.jsonl"), "--steps", "3", "--json")
    status, out, _ = train("--model", small, *flags)
    assert status == 0
    lines = [json.loads(line) for line in (tmp_path / "moves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    sums: dict[str, int] = {}
    for line in lines:
        for links in line["moved"].values():
            assert links and all(count > 0 for count in links.values())
            for link, count in links.items():
                sums[link] = sums.get(link, 0) + count
    moved = json.loads(out.splitlines()[-1])["moved_bytes"]
    assert sums["host_to_device"] > 0
    assert sums == {link: count for link, count in moved.items() if count}
    before = (tmp_path / "moves.jsonl").read_text()
    assert train("--model", small, *flags, "--device-memory", "10KB")[0] == 2  # refused before its first step
    assert (tmp_path / "moves.jsonl").read_text() == before
    assert train("--model", small, *flags, "--steps", "1")[0] == 0
    [line] = (tmp_path / "moves.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    status, _, err = train(
        "--model", small, "--log-moves", str(tmp_path / "none" / "moves.jsonl"), "--steps", "1"
    )
    assert status == 2 and "--log-moves: " in err and "cannot be written" in err


def test_told_to_end_it_saves_and_can_go_on(small: str, text: str, tmp_path: Path) -> None:
    arguments = [
        sys.executable,
        "-m",
        "ebbtide",
        "train",
        "--model",
        small,
        "--data",
        text,
        "--seq",
        "32",
        "--json",
    ]
    arguments += [
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        "--save-every",
        "100000",
        "--resume",
        "auto",
    ]
    run_ = subprocess.Popen(
        [*arguments, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert time.monotonic() < deadline and run_.poll() is None
            time.sleep(0.05)
        run_.send_signal(signal.SIGTERM)
        out, err = run_.communicate(timeout=60)
    finally:
        run_.kill()
    assert run_.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    done = result["steps"]
    assert 3 < done < 100000 and [p.name for p in (tmp_path / "run/checkpoints").glob("step*")] == [
        f"step-{done:08d}"
    ]
    more = subprocess.run([*arguments, "--steps", str(done + 2)], capture_output=True, text=True, check=True)
    after = json.loads(more.stdout.splitlines()[-1])
    assert after["steps"] == done + 2 and after["losses"][:done] == result["losses"]


def test_told_to_end_it_saves_before_all_else(
    small: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever told it gives it seconds; to be told again changes nothing."""
    from ebbtide.checkpoint.folders import RunFolder
    from ebbtide.cli.loop import Training

    seen: list[int] = []
    summary = Training.summary

    def summed(training: Training) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(len(RunFolder(tmp_path / "out" / "checkpoints").complete()))
        return summary(training)

    def advance(self: Any, number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "summary", summed)
    monkeypatch.setattr("ebbtide.cli.checkpoints.Checkpoints.after", advance)
    flags = [
        "--model",
        small,
        "--data",
        text,
        "--batch",
        "1",
        "--seq",
        "16",
        "--steps",
        "1000",
        "--save-every",
        "500",
        "--out",
        str(tmp_path / "out"),
    ]
    assert run(["train", *flags, "--json"]) == 0
    assert seen == [1]
