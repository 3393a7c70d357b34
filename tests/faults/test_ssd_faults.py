"""Faults of the third tier under training: a clear error, no hang, no wrong number, no file left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from disks import FaultyIO
from ebbtide.checkpoint.tensor_parts import parts_of
from ebbtide.cli.signals import waiting
from ebbtide.config import Config
from ebbtide.devices import CpuBackend
from ebbtide.engine import Engine
from ebbtide.errors import DiskError, IntegrityError, StateError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.lanes import DiskJob, Lane
from ebbtide.memory.disk.space import READ, WRITE, DiskSpace
from ebbtide.memory.ssd_space import offsets
from ebbtide.runtime.process_tiers import Tiers
from harness import config_of, expected
from sampling import crossed, some

STEPS = 4
BUDGETS = {"device": 2_000_000, "host": 0, "ssd": 64 << 20}


def open_engine(folder: Path, io: FaultyIO, checksums: bool = False, **changes: Any) -> Engine:
    disk = DiskSpace([folder], BUDGETS["ssd"], io=io, checksums=checksums)
    tiers = {"device": {"memory": BUDGETS["device"]}, "host": {"memory": 0}}
    settings = config_of(ssd={"folder": str(folder), "memory": BUDGETS["ssd"]}, **tiers, **changes)
    tiers_of = Tiers(CpuBackend(poison=True), Ledger(BUDGETS), disk)
    return Engine(zoo.build("gpt2"), Config.read(settings), tiers=tiers_of)


def train(engine: Engine) -> str:
    for number in range(STEPS):
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
        engine.step()
    return engine.weights_sha256()


@pytest.mark.parametrize(
    ("fail_at", "link", "updates"), crossed([1, 7, 40, 90], [READ, WRITE], ["exact", "in-backward"])
)
def test_a_disk_that_errors(folder: Path, updates: str, link: str, fail_at: int) -> None:
    """The call that failed is named, and loading weights makes the engine usable again."""
    seen = 0

    def fail(kind: str, *_: Any) -> None:
        nonlocal seen
        seen += kind == link
        if kind == link and seen == fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    clip = None if updates == "in-backward" else 1.0
    try:
        engine = open_engine(folder, FaultyIO(fail), updates=updates, clip=clip)
    except DiskError as error:  # while values were written for the first time
        assert ".data" in str(error)
        assert not list(folder.iterdir())
        return
    try:
        try:
            sha = train(engine)
        except (DiskError, StateError) as error:
            assert ".data" in str(error)
        else:
            # There were fewer calls, or it was a merged one, of which each part was tried again.
            assert sha == expected("gpt2", "none", STEPS, clip=clip)[0]
        engine.load_state_dict(zoo.build("gpt2").state_dict())
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(0)).loss)
        engine.step()
        assert engine.weights_sha256()
        engine.check_integrity()
    finally:
        engine.close()
    assert not list(folder.iterdir())


def test_short_transfers_are_no_error(folder: Path) -> None:
    def some(link: str, file: int, buffers: Sequence[Any], offset: int) -> int | None:
        total = sum(len(one) for one in buffers)
        return total // 2 // 4096 * 4096 or None

    engine = open_engine(folder, FaultyIO(some))
    assert train(engine) == expected("gpt2", "none", STEPS)[0]
    engine.close()


def test_a_file_that_is_cut_or_changed_underneath(folder: Path) -> None:
    for damage, error, checksums in ((_cut, DiskError, False), (_change, IntegrityError, True)):
        engine = open_engine(folder, FaultyIO(), checksums)
        train(engine)
        engine.synchronize()
        (data,) = folder.glob("*.data")
        damage(data)
        with pytest.raises(error, match=data.name):
            train(engine)
        engine.close()
        assert not list(folder.iterdir())


def test_values_by_name_and_checkpoints_refuse_what_was_changed(folder: Path, tmp_path: Path) -> None:
    """They read parts of what updates wrote at once, and write parts of it back."""
    engine = open_engine(folder, FaultyIO(), checksums=True)
    train(engine)
    engine.synchronize()
    good = engine.state_dict()
    (data,) = folder.glob("*.data")
    _change(data)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=data.name):
            engine.state_dict()
        with pytest.raises(IntegrityError, match=data.name):
            engine.save(tmp_path)
        with pytest.raises(
            IntegrityError, match=data.name
        ):  # a block that it writes back would have a good sum
            engine.load_state_dict(good)
    engine.close()


def test_state_that_comes_in_part_is_zero_elsewhere(folder: Path) -> None:
    """Whatever the disk held before: a checkpoint of other chunks may have state of some members only."""
    engine = open_engine(folder, FaultyIO())
    session, space = engine._session, engine._session.store.ssd_space
    assert space is not None
    index = next(i for i in session.homes.at("ssd") if len(session.data.members[i]) > 1)
    group = space.group(index)
    for _, count, extent in group.pieces:
        _, first, _, last = offsets(group.kinds, count)  # the master has its values already
        space.disk.write(extent, [torch.full((last - first,), 0x3F, dtype=torch.uint8)], first).wait()
    names = [session.data.places[member].name for member in session.data.members[index]]
    parts = {part.key: part for part in parts_of(session, everything=True)}
    for kind in ("momentum", "variance"):
        keys = [f"{kind}/{name}" for name in names]
        parts[keys[1]].store(0, torch.ones(parts[keys[1]].numel, dtype=parts[keys[1]].dtype))
        for key in keys:
            found = torch.empty(parts[key].numel, dtype=parts[key].dtype)
            parts[key].load(0, found)
            assert torch.equal(found, torch.full_like(found, key == keys[1])), key
    engine.close()


def _cut(path: Path) -> None:
    os.truncate(path, 4096)


def _change(path: Path) -> None:
    with path.open("r+b") as file:
        for block in range(0, path.stat().st_size, 4096):
            file.seek(block + 7)
            file.write(b"\xa5\x5a")
        file.flush()
        os.fsync(file.fileno())


# -- the command ------------------------------------------------------------------------------------------

TRAIN = (
    "train --model gpt2-tiny --batch 1 --seq 32 --device cpu --device-memory 30MB --host-memory 0 --ssd-memory {size} "
    "--ssd-dir {folder} --chunk-size 1MiB --steps {steps} --json"
)


def command(folder: Path, size: str = "128MB", steps: int = 2) -> list[str]:
    return [sys.executable, "-m", "ebbtide", *TRAIN.format(folder=folder, size=size, steps=steps).split()]


def test_the_command_trains_with_ssd(folder: Path) -> None:
    done = subprocess.run(command(folder, steps=4), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["moved_bytes"]["ssd_read"] > 0 and result["ssd_write_bytes_per_step"] > 0
    assert not list(folder.iterdir())


def test_a_file_system_without_space(tmp_path: Path) -> None:
    """A real one, of eight megabytes."""
    inside = " ".join(command(tmp_path / "small"))
    script = f"mkdir {tmp_path}/small && mount -t tmpfs -o size=8m none {tmp_path}/small && exec {inside}"
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this system lets nobody mount a file system of their own")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "small" in done.stderr and "MiB" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_in_one_folder(folder: Path) -> None:
    disk = DiskSpace([folder], 1 << 20)
    try:
        done = subprocess.run(command(folder), capture_output=True, text=True, timeout=120)
    finally:
        disk.close()
    assert done.returncode == 2 and str(folder) in done.stderr and str(os.getpid()) in done.stderr


@pytest.mark.parametrize(
    ("number", "left"), some([(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, 2)], 2)
)
def test_signals(folder: Path, number: signal.Signals, left: int) -> None:
    """What ends in order leaves nothing; what a killed run left is removed at the next start."""
    run = subprocess.Popen(
        command(folder, steps=10_000), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.data")):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert len(list(folder.iterdir())) == left
    if number == signal.SIGKILL:
        engine = open_engine(folder, FaultyIO())
        assert engine.stats()["ssd"]["stale_files_removed"] == 1
        engine.close()
        assert not list(folder.iterdir())
    else:
        assert run.returncode == 128 + number and "Traceback" not in errors, errors
        assert "is not saved" in errors


def test_a_signal_waits_for_the_end_of_a_step() -> None:
    """The first one does; the second is for now."""
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), waiting():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append("the step")
    assert done == ["the step"] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), waiting():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        done.append("too late")
    assert done == ["the step"] and signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_of_a_run_that_saves_ends_it_in_the_step() -> None:
    """There the first one only asks for the end, and the handler raises at the second."""
    asked: list[int] = []

    def handler(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    done = []
    try:
        with waiting():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            done.append("the step")
        assert done == ["the step"] and len(asked) == 1
        asked.clear()
        with pytest.raises(KeyboardInterrupt), waiting():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
            done.append("too late")
        assert done == ["the step"] and len(asked) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_between_a_request_and_its_event(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when a write is under way that nobody has noted yet: its memory goes to others when it is done."""
    io = FaultyIO()
    engine = open_engine(folder, io)
    train(engine)
    engine.synchronize()
    assert engine._tiers.disk is not None
    write = engine._tiers.disk.write

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        write(*args, **kwargs)
        raise KeyboardInterrupt

    io.close_gate()
    monkeypatch.setattr(engine._tiers.disk, "write", interrupted)
    chunk = next(c for c in engine._session.store.chunks.values() if c.kind == "param" and c.device_valid)
    threading.Timer(0.3, io.gate.set).start()
    before = len(io.calls)
    with pytest.raises(KeyboardInterrupt):
        engine._session.room.evict(chunk)
    assert [link for link, *_ in io.calls[before:]] == [WRITE]
    engine.close()
    engine._tiers.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("late", [False, True], ids=["before its queue has it", "after"])
def test_an_interrupt_while_a_request_is_handed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Nobody waits for ever for what no thread will do."""

    def hangs(*_: Any) -> None:
        raise AssertionError("it hangs")

    engine = open_engine(folder, FaultyIO())
    train(engine)
    engine.synchronize()
    submit, told = Lane.submit, []

    def interrupted(self: Lane, job: DiskJob) -> None:
        if threading.current_thread() is threading.main_thread() and not told:
            told.append(job)
            if late:
                submit(self, job)
            raise KeyboardInterrupt
        submit(self, job)

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), torch.no_grad():
            patch.setattr(Lane, "submit", interrupted)
            for number in range(5):
                engine(**zoo.ZOO["gpt2"].batch(number))
        engine.check_integrity()
        sha = train(engine)
        engine.close()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    other = open_engine(folder, FaultyIO())
    train(other)
    assert train(other) == sha
    other.close()
