"""Checkpoints in the background: those of the moment that they were asked for, whatever training does meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ebbtide
import zoo
from ebbtide.checkpoint import dcp_planners, folders, saving, shards
from ebbtide.checkpoint.folders import INDEX, SPARE, RunFolder
from ebbtide.errors import ConfigError, DiskError, EbbtideWarning, StateError
from group import group_of
from harness import batch_of, config_of, facts
from test_checkpoint import start, tiers, train


class Gated(shards.SystemIO):
    """Writes of large pieces wait at a gate, and fail behind it where that is wanted."""

    def __init__(self, gate: threading.Event, fails: bool = False) -> None:
        self._gate, self._fails = gate, fails

    def pwritev(self, file: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "ebbtide-save":
            assert self._gate.wait(60)
            if self._fails:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().pwritev(file, buffers, offset)


def gated(monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> threading.Event:
    gate = threading.Event()
    monkeypatch.setattr(shards, "SystemIO", lambda: Gated(gate, fails))
    return gate


def test_training_goes_on_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wanted = start("gpt2", config_of()), start("gpt2", config_of())
    losses = train(wanted, "gpt2", 0, 5)
    found = train(engine, "gpt2", 0, 2)
    old = engine.save(folder)
    sha = engine.weights_sha256()
    found += train(engine, "gpt2", 2, 3)
    then = engine.weights_sha256()
    gate = gated(monkeypatch)
    coming = engine.save(folder, {"place": 3}, background=True)
    found += train(engine, "gpt2", 3, 5)
    assert RunFolder(folder).complete() == [old] and RunFolder(folder).latest() == old
    assert engine.stats()["tags"]["device"]["snapshot"] > 0
    gate.set()
    engine.wait_for_save()
    assert RunFolder(folder).latest() == coming
    assert found == losses and engine.weights_sha256() == wanted.weights_sha256()
    engine.check_integrity()
    assert engine._session.ledger.tags["device"]["snapshot"] == 0
    assert engine.load(folder) == {"place": 3}
    assert engine.weights_sha256() == then != sha
    assert train(engine, "gpt2", 3, 5) == losses[3:]
    engine.close()
    wanted.close()


@pytest.mark.parametrize("where", ["all", "host", "ssd-host", "ssd"])
def test_wherever_values_are(where: str, folder: Path) -> None:
    config = tiers("gpt2", where, folder / "ssd", config_of())
    engine = start("gpt2", config)
    train(engine, "gpt2", 0, 2)
    sha = engine.weights_sha256()
    for _ in range(2):
        engine.save(folder / "run", keep=1, background=True)
    losses = train(engine, "gpt2", 2, 4)
    engine.wait_for_save()
    engine.load(folder / "run")
    assert engine.weights_sha256() == sha
    assert train(engine, "gpt2", 2, 4) == losses
    engine.check_integrity()
    engine.close()


def test_what_has_no_room_is_written_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiers("gpt2", "host", folder, config_of())
    engine = start("gpt2", config)
    train(engine, "gpt2", 0, 2)
    ledger = engine._session.ledger
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "room", lambda tier: -1)  # as where the level has risen
        engine.save(folder / "run", background=True)
        assert ledger.tags["host"]["snapshot"] == 0
        engine.wait_for_save()
    monkeypatch.setattr(ledger, "spare", lambda tier: 100_000)
    engine.save(folder / "run", background=True)
    assert 0 < ledger.tags["host"]["snapshot"] <= 100_000
    sha = engine.weights_sha256()
    train(engine, "gpt2", 2, 3)
    engine.load(folder / "run")
    assert engine.weights_sha256() == sha
    engine.close()


def test_its_copy_makes_room_for_what_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy takes what no pass has needed so far; then one needs it."""
    peak, model_data, _ = facts("gpt2", "none", config_of())
    engine = start("gpt2", config_of(device={"memory": 2 * peak + model_data}, host={"memory": 0}))
    train(engine, "gpt2", 0, 2)
    gate = gated(monkeypatch)
    engine.save(folder, background=True)
    assert engine.stats()["tags"]["device"]["snapshot"] > 0
    threading.Timer(0.3, gate.set).start()
    batch = batch_of("gpt2", 2, torch.bfloat16, "cpu")
    longer = {key: torch.cat([value, value], 0) for key, value in batch.items()}
    engine.backward(engine(**longer).loss)
    engine.step()
    assert RunFolder(folder).latest() is not None
    engine.close()


def test_close_waits_for_it(folder: Path) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    found = engine.save(folder, background=True)
    engine.close()
    assert RunFolder(folder).latest() == found


@pytest.mark.parametrize("how", ["wait_for_save", "close"])
def test_waiting_that_is_interrupted_can_be_repeated(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    gate = gated(monkeypatch)
    coming = engine.save(folder, background=True)
    interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, how)()
    assert engine._session.ledger.tags["device"]["snapshot"] > 0  # its thread still writes from it
    gate.set()
    getattr(engine, how)()
    assert RunFolder(folder).latest() == coming
    assert engine._session.ledger.tags["device"]["snapshot"] == 0
    engine.close()
    assert not engine._session.ledger.reserved["device"]


def test_a_close_that_is_interrupted_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start("gpt2", tiers("gpt2", "ssd", folder, config_of()))
    train(engine, "gpt2", 0, 1)
    disk = engine._tiers.disk
    assert disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(disk, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.state_dict()
    engine.close()
    engine.close()
    assert not any(engine._session.ledger.reserved.values()) and not list(folder.iterdir())


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_room_for_the_copy_is_taken_before_it_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it may be gone, with the copy already in it."""
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    ledger, write = engine._session.ledger, dcp_planners.write

    def writes(*given: Any) -> None:
        write(*given)
        assert ledger.tags["device"]["snapshot"] > 0
        ledger.set_level("device", ledger.budgets["device"] - ledger.reserved["device"])

    monkeypatch.setattr(dcp_planners, "write", writes)
    engine.save(folder, background=True)
    engine.wait_for_save()
    assert RunFolder(folder).latest() is not None and not ledger.tags["device"]["snapshot"]
    engine.close()


@pytest.mark.parametrize("what", ["reserve", "start"])
def test_a_save_that_cannot_begin_leaves_nothing(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    ledger = engine._session.ledger

    def refuse(*given: Any) -> None:
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        if what == "reserve":
            patch.setattr(ledger, "reserve", refuse)
        else:
            patch.setattr(saving, "PendingSave", refuse)
        with pytest.raises(RuntimeError, match="refused"):
            engine.save(folder, background=True)
    assert not list(folder.iterdir()) and not ledger.tags["device"]["snapshot"]
    engine.save(folder, background=True)
    engine.wait_for_save()
    engine.close()


def test_a_disk_that_is_full_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, the checkpoint before stays, and the next one can be written."""
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    old = engine.save(folder)
    with monkeypatch.context() as patch:
        gate = gated(patch, fails=True)
        gate.set()
        engine.save(folder, background=True)
        with pytest.raises(DiskError, match="step 1 could not be written: No space left"):
            engine.wait_for_save()
        engine.save(folder, background=True)
        with pytest.warns(UserWarning, match="No space left") as warned:
            while engine._checkpoints.saver.pending is not None:
                train(engine, "gpt2", 1, 2)
        assert warned[0].filename == train.__code__.co_filename
    assert RunFolder(folder).complete() == [old] and len(list(folder.iterdir())) == 2
    assert engine.save(folder, background=True).name == f"step-{engine.steps:08d}"
    engine.wait_for_save()
    assert RunFolder(folder).latest() != old
    engine.check_integrity()
    engine.close()


def test_a_process_that_was_forked_meanwhile_holds_nothing(folder: Path) -> None:
    """A worker of a loader, which lives on; its folder becomes a spare, and is written to again."""
    run, children = RunFolder(folder), []
    try:
        for number in range(4):
            with run.writing(number) as (partial, _):
                (partial / INDEX).write_text("{}")
                child = os.fork()
                if not child:
                    time.sleep(60)
                    os._exit(0)
                children.append(child)
            run.keep(1)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert [path.name for path in run.complete()] == ["step-00000003"]


def test_a_spare_that_somebody_has_locked_is_left_alone(folder: Path) -> None:
    run = RunFolder(folder)
    (folder / SPARE).mkdir(parents=True)
    lock = os.open(folder / SPARE, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with run.writing(1) as (partial, _):
        (partial / INDEX).write_text("{}")
    assert [path.name for path in run.complete()] == ["step-00000001"]
    os.close(lock)
    with run.writing(2) as (partial, _):
        (partial / INDEX).write_text("{}")
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def test_a_folder_that_another_program_has_locked_is_waited_for_and_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SILENCE", 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    said = threading.Event()
    monkeypatch.setattr(folders, "warn_user", lambda message: (said.set(), messages.append(message)))
    messages: list[str] = []
    giver = threading.Thread(target=lambda: (said.wait(60), os.close(lock)))
    giver.start()
    with RunFolder(folder).writing(1) as (partial, _):
        (partial / INDEX).write_text("{}")
    giver.join()
    assert messages == [f"save: another process has locked {folder}; waiting until it gives it back"]
    assert [path.name for path in RunFolder(folder).complete()] == ["step-00000001"]


def test_what_failed_is_over_once_another_was_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    gate = threading.Event()
    gate.set()
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SystemIO", lambda: Gated(gate, True))
        engine.save(folder, background=True)
        with pytest.raises(DiskError):
            engine.wait_for_save()
    engine.save(folder)
    engine.wait_for_save()
    engine.close()


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


def test_extra_state_of_a_module_is_told_to_be_the_loops(folder: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), WithExtraState(4, 4))
    engine = ebbtide.initialize(module, config_of(precision="fp32"))
    with pytest.warns(
        EbbtideWarning,
        match=r"^the module '1' has a get_extra_state\(\), which the engine does not save: give",
    ):
        engine.save(folder)
    engine.close()


def test_two_averages_of_one_decay_are_refused() -> None:
    engine = ebbtide.initialize(torch.nn.Linear(4, 4), config_of(precision="fp32"))
    first = engine.ema(0.9)
    with pytest.raises(ConfigError, match=r"an average with decay 0.9 already"):
        engine.ema(0.9)
    engine.ema(0.99)
    first.close()
    engine.ema(0.9)
    engine.close()


# -- ranks --------------------------------------------------------------------------------------------------------


def on_ranks(folder: Path, fails: int | None) -> dict[str, Any]:
    """`fails`: the rank whose disk is full."""
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of())
    real = shards.SystemIO
    try:

        def steps(first: int, last: int) -> list[float]:
            losses = []
            for number in range(first, last):
                loss = engine(**batch_of("gpt2", number * size + rank, torch.bfloat16, "cpu")).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
            return losses

        steps(0, 2)
        engine.save(folder)
        then = engine.weights_sha256()
        if fails == rank:
            gate = threading.Event()
            gate.set()
            shards.SystemIO = lambda: Gated(gate, True)  # type: ignore[misc, assignment]
        engine.save(folder, background=True)
        losses = steps(2, 4)
        failed = ""
        try:
            engine.wait_for_save()
        except DiskError as error:
            failed = str(error)
        shards.SystemIO = real  # type: ignore[misc]
        dist.barrier()
        latest = RunFolder(folder).latest()
        engine.load(folder)
        assert engine.weights_sha256() == then
        assert steps(2, 4) == losses
        return {"latest": latest.name if latest else "", "failed": failed}
    finally:
        shards.SystemIO = real  # type: ignore[misc]
        engine.close()


@pytest.mark.parametrize("fails", [None, 0, 1])
def test_ranks_write_in_the_background(fails: int | None, tmp_path: Path) -> None:
    found = group_of(2).run(on_ranks, tmp_path, fails)
    assert {rank["latest"] for rank in found} == {"step-00000002" if fails is not None else "step-00000002-1"}
    assert all(bool(rank["failed"]) == (fails is not None) for rank in found), found
    assert not list(tmp_path.glob(".partial-*"))


def removed(folder: Path) -> str:
    """The second rank's disk is slow, and somebody removes the folder meanwhile."""
    rank, _ = dist.get_rank(), dist.get_world_size()
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of())
    gate, real = threading.Event(), shards.SystemIO
    try:
        if rank:
            shards.SystemIO = lambda: Gated(gate, False)  # type: ignore[misc, assignment]
        engine.save(folder, background=True)
        dist.barrier()
        if rank:
            shutil.rmtree(folder)
        dist.barrier()
        gate.set()
        try:
            engine.wait_for_save()
        except DiskError as error:
            return str(error)
        return ""
    finally:
        gate.set()
        shards.SystemIO = real  # type: ignore[misc]
        engine.close()


def test_a_checkpoint_whose_folder_is_removed_is_waited_for_by_nobody(tmp_path: Path) -> None:
    found = group_of(2).run(removed, tmp_path / "run", patience=60)
    assert "step-00000000" in found[0] or "partial" in found[0]
    assert "is gone" in found[0]


class Signals(torch.nn.Module):
    """Has a signal of its process come in a pass, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.when = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.when == "forward" and not ebbtide.imagining():
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.when == "backward":
            x.register_hook(lambda _: os.kill(os.getpid(), signal.SIGUSR1))
        return self.head(x).square().mean()


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
@pytest.mark.parametrize("when", ["forward", "backward", "update"])
def test_a_signal_handler_that_saves_within_a_step_writes_no_half_of_it(
    when: str, updates: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Signals()
    engine = ebbtide.initialize(model, config_of(precision="fp32", clip=None, updates=updates))
    for number in range(2):
        engine.backward(engine(torch.full((2, 8), 1.0 + number)))
        engine.step()
    real = engine._session.unmanaged.apply

    def apply(*args: Any) -> None:
        if model.when == "update":
            os.kill(os.getpid(), signal.SIGUSR1)
        real(*args)

    monkeypatch.setattr(engine._session.unmanaged, "apply", apply)
    said: list[str] = []

    def handler(*_: Any) -> None:
        for method in (engine.save, engine.load, engine.export, engine.load_weights):
            with pytest.raises(StateError) as found:
                method(folder)
            said.append(str(found.value))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        model.when = when
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(said) == 4 and not list(folder.glob("step-*")) and not list(folder.glob("*.safetensors"))
    what = "an update" if when == "update" else "a forward or backward pass"
    assert all(f"while {what} is under way" in one and "a signal handler" in one for one in said)
    model.when = ""
    assert engine.steps == 3
    engine.save(folder)  # nothing was broken by it
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
    engine.check_integrity()
    engine.close()


def test_a_hook_after_the_step_may_save(folder: Path) -> None:
    engine = ebbtide.initialize(Signals(), config_of(precision="fp32", clip=None))
    engine.optimizer.register_step_post_hook(lambda *_: engine.save(folder))
    for number in range(2):
        engine.backward(engine(torch.full((2, 8), 1.0 + number)))
        engine.step()
        assert RunFolder(folder).latest() == folder / f"step-{number + 1:08d}"
    sha = engine.weights_sha256()
    engine.backward(engine(torch.ones(2, 8)))
    engine.zero_grad()
    engine.load(folder)
    assert engine.weights_sha256() == sha
    engine.close()


def test_what_another_machine_writes_is_left_alone_until_it_is_abandoned(folder: Path) -> None:
    """On storage that machines share, a lock holds on its own one: a job may have been started again elsewhere."""
    theirs, left = folder / ".partial-0123456789ab", folder / ".partial-ba9876543210"
    ours = folder / folders.partial_name()
    for place in (theirs, left, ours):
        place.mkdir(parents=True)
        (place / "rank-00000.bin").write_bytes(b"weights")
    old = time.time() - 2 * folders.ABANDONED
    for path in (left / "rank-00000.bin", left):
        os.utime(path, (old, old))
    engine = ebbtide.initialize(Signals(), config_of(precision="fp32", clip=None))
    engine.save(folder)
    assert (theirs / "rank-00000.bin").read_bytes() == b"weights"
    assert not left.exists() and not ours.exists()
    engine.close()


def test_a_backward_that_raised_does_not_keep_anybody_from_saving(folder: Path) -> None:
    """The loop goes on with the next batch."""
    engine = ebbtide.initialize(Signals(), config_of(precision="fp32", clip=None))

    def fails(_: torch.Tensor) -> None:
        raise ValueError("mine")

    x = torch.ones(2, 8)
    for own in (False, True):
        for _ in range(2):
            loss = engine(x)
            loss.grad_fn.register_prehook(lambda *_: None)
            handle = engine.module.head.weight.register_post_accumulate_grad_hook(fails)
            with pytest.raises(ValueError, match="mine"):
                loss.backward() if own else engine.backward(loss)
            handle.remove()
        engine.backward(engine(x))
        engine.step()
        engine.save(folder)
    engine.close()


def test_an_evaluation_may_save(folder: Path) -> None:
    """Nothing is half-done in it."""
    engine = ebbtide.initialize(Signals(), config_of(precision="fp32", clip=None))
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()

    def evaluated(x: torch.Tensor) -> torch.Tensor:
        engine.save(folder)
        return engine.module(x)

    with torch.no_grad():
        assert engine.run(evaluated, torch.ones(2, 8)).isfinite()
    assert RunFolder(folder).latest() == folder / "step-00000001"
    engine.close()
