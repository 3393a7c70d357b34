"""The command under torchrun: one voice, a batch for all, checkpoints for any number of ranks, and ranks that die."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ebbtide.checkpoint.folders import RunFolder

SMALL = ["--model", "gpt2-tiny", "--seq", "32", "--batch", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, so that reading it takes no time."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}. " for i in range(3000)))
    return path


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def torchrun(ranks: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "ebbtide", "train", *SMALL, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=180, check=False
    )


def alone(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ebbtide", "train", *SMALL, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=180, check=False
    )


def start(rank: int, ranks: int, port: int, *flags: str) -> subprocess.Popen[str]:
    """A rank without torchrun, which would end the others when one does."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    return subprocess.Popen(
        [sys.executable, "-m", "ebbtide", "train", *SMALL, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**where, **numbers),
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1, "one of them speaks"
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found


@pytest.mark.heavy
def test_ranks_share_a_batch(text: Path) -> None:
    data = ["--data", str(text), "--json"]
    alone = result(torchrun(1, *data, "--steps", "4", "--precision", "fp32"))
    two = result(torchrun(2, *data, "--steps", "4", "--precision", "fp32"))
    assert two["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert two["ranks"] == 2 and two["moved_bytes"]["wire"] > 0


@pytest.mark.heavy
def test_ranks_go_on_in_other_numbers(text: Path, tmp_path: Path) -> None:
    data = ["--data", str(text), "--json"]
    saved = [*data, "--save-every", "2", "--out", str(tmp_path / "run")]
    whole = result(torchrun(2, *data, "--steps", "6", "--eval-every", "3"))
    result(torchrun(2, *saved, "--steps", "4", "--eval-every", "3"))
    again = result(torchrun(2, *saved, "--steps", "6", "--eval-every", "3", "--resume", "auto"))
    assert again["weights_sha256"] == whole["weights_sha256"] and again["losses"] == whole["losses"]
    assert again["ranks"] == 2 and again["moved_bytes"]["wire"] > 0
    fewer = result(torchrun(1, *saved, "--steps", "8", "--eval-every", "3", "--resume", "auto"))
    assert fewer["losses"][:6] == whole["losses"] and len(fewer["losses"]) == 8
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.heavy
def test_a_batch_that_does_not_divide_is_refused(text: Path) -> None:
    done = torchrun(3, "--data", str(text), "--steps", "2", "--json")
    assert done.returncode != 0 and not done.stdout.strip()
    assert (
        "--batch: expected a multiple of 3" in done.stderr
        and "Traceback" not in done.stderr.split("torch")[0]
    )


def both(flags: list[list[str]]) -> list[tuple[int, str]]:
    """Two ranks that are told something each: the exit status, and what is said."""
    port = free_port()
    ranks = [start(rank, 2, port, *mine) for rank, mine in enumerate(flags)]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_that_are_told_different_things_end_and_say_what(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[1:])
    for data, steps, expected in [
        ((text, text), ("2", "3"), "--steps is 2 on rank 0 and 3 on rank 1"),
        ((text, other), ("2", "2"), "the text of --data (its digest) is"),
    ]:
        told = [["--data", str(data[rank]), "--steps", steps[rank]] for rank in range(2)]
        for status, said in both(told):
            assert status == 2 and expected in said and "Traceback" not in said


def test_resume_auto_where_one_rank_finds_no_checkpoint(text: Path, tmp_path: Path) -> None:
    flags = ["--data", str(text), "--steps", "2", "--save-every", "1", "--out"]
    assert alone(*flags, str(tmp_path / "here")).returncode == 0
    for status, said in both(
        [[*flags, str(tmp_path / name), "--resume", "auto"] for name in ("here", "gone")]
    ):
        assert status == 2 and "Traceback" not in said
        assert "rank 0 finds a checkpoint in" in said and "rank 1 finds none" in said
    assert RunFolder(tmp_path / "gone" / "checkpoints").latest() is None


@pytest.mark.heavy
def test_the_others_end_when_one_dies_and_name_it(text: Path, tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    flags = ["--data", str(text), "--steps", "100000", "--save-every", "2", "--out", str(out)]
    ranks = [start(rank, 2, port, *flags) for rank in range(2)]
    try:
        until = time.monotonic() + 120
        while RunFolder(out / "checkpoints").latest() is None:
            assert time.monotonic() < until and ranks[0].poll() is None
            time.sleep(0.05)
        ranks[1].kill()
        begun = time.monotonic()
        _, said = ranks[0].communicate(timeout=60)
        assert time.monotonic() - begun < 60
        assert ranks[0].returncode == 2, said
        assert "rank 1 of 2 is gone" in said and "Traceback" not in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    again = result(alone(*flags[:2], "--steps", "1", "--resume", str(out / "checkpoints"), "--json"))
    assert len(again["losses"]) >= 2


def test_told_to_end_all_save_and_end_well(text: Path, tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    flags = ["--data", str(text), "--steps", "100000", "--save-every", "1000", "--out", str(out)]
    ranks = [start(rank, 2, port, *flags) for rank in range(2)]
    try:
        until = time.monotonic() + 120
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 3:
            assert time.monotonic() < until and ranks[0].poll() is None
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGTERM)  # one of them is enough: they agree
        for rank in ranks:
            _, said = rank.communicate(timeout=90)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    latest = RunFolder(out / "checkpoints").latest()
    steps = sum('"event"' not in line for line in (out / "metrics.jsonl").read_text().splitlines())
    assert latest is not None and latest.name == f"step-{steps:08d}"


KILLS, IN_A_SAVE = 50, 10


@pytest.mark.heavy
def test_killed_at_any_time_the_newest_checkpoint_is_good(text: Path, tmp_path: Path) -> None:
    """kill -9 of one or all ranks; some of them while a save is being written, which is counted."""
    steps = 400
    data = ["--data", str(text), "--steps", str(steps)]
    whole = result(torchrun(2, *data, "--json"))["losses"]
    out, chance = tmp_path / "run", random.Random(0)
    checkpoints = out / "checkpoints"
    in_a_save = resumed = 0
    for number in range(KILLS):
        port = free_port()
        flags = [*data, "--save-every", "1", "--keep", "2", "--out", str(out), "--resume", "auto"]
        ranks = [start(rank, 2, port, *flags) for rank in range(2)]
        before = RunFolder(checkpoints).latest()
        until = time.monotonic() + 120
        while RunFolder(checkpoints).latest() == before and all(rank.poll() is None for rank in ranks):
            assert time.monotonic() < until
            time.sleep(0.01)
        if number % 2:
            while not list(checkpoints.glob(".partial-*")) and ranks[0].poll() is None:
                assert time.monotonic() < until
        else:
            time.sleep(chance.uniform(0, 0.5))
        victims = ranks if chance.random() < 0.5 else [chance.choice(ranks)]
        for rank in victims:
            rank.kill()
        in_a_save += bool(list(checkpoints.glob(".partial-*")))
        for rank in ranks:
            try:
                rank.communicate(timeout=90)
            finally:
                rank.kill()
                rank.communicate()
        latest = RunFolder(checkpoints).latest()
        assert latest is not None
        done = int(latest.name.split("-")[1])
        if done >= steps - 10:
            for old in checkpoints.iterdir():
                old.rename(tmp_path / f"{number}-{old.name}")
        resumed += 1
    found = result(torchrun(2, *data, "--out", str(out), "--resume", "auto", "--save-every", "100", "--json"))
    assert found["losses"] == whole
    assert resumed == KILLS and in_a_save >= IN_A_SAVE
    print(f"{KILLS} kills, {in_a_save} while a checkpoint was being written")
