"""Updates whose gradients left for want of room: submitted before they have any, never waited for in `step()`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from disks import FaultyIO
from ebbtide.backend import CpuBackend
from ebbtide.config import Config
from ebbtide.disk.space import READ, DiskSpace
from ebbtide.engine import Engine
from ebbtide.errors import BudgetError, DiskError
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.ledger import Ledger
from ebbtide.run.tiers import Tiers
from ebbtide.run.updater import Updater
from harness import config_of, expected

SSD = 64 << 20


class Rooms:
    """Jobs that come when they have room, or when they may make some; in which order they did."""

    def __init__(self) -> None:
        self.updater = Updater(background=True)
        self.chunks: dict[int, Chunk] = {}
        self.room: set[int] = set()
        self.ran, self.finished = list[int](), list[tuple[int, bool]]()
        self.error: Exception | None = None

    def bring(self, index: int, wait: bool) -> list[Any] | None:
        if index in self.room:
            return []
        if not wait:
            return None
        if self.error is not None:
            raise self.error
        while index not in self.room and self.updater.settle_oldest():
            continue
        return []

    def submit(self, index: int) -> None:
        self.chunks[index] = Chunk("param", index, torch.float32, 1024, 4096)
        self.updater.submit_early(
            [self.chunks[index]],
            lambda wait: self.bring(index, wait),
            lambda: self.ran.append(index),
            lambda done: self.finished.append((index, done)),
        )

    def until_ran(self, *indices: int) -> None:
        end = time.monotonic() + 60
        while self.ran != list(indices) and time.monotonic() < end:
            time.sleep(0.001)
        assert self.ran == list(indices)


def test_they_begin_in_their_order_as_room_comes() -> None:
    rooms = Rooms()
    rooms.room = {0, 2}
    for index in range(4):
        rooms.submit(index)
    rooms.until_ran(0)
    rooms.updater.collect()
    assert rooms.finished == [(0, True)] and rooms.chunks[2].work is not None
    rooms.room |= {1, 3}
    rooms.updater.collect()
    rooms.until_ran(0, 1, 2, 3)
    rooms.updater.flush()
    assert rooms.finished == [(index, True) for index in range(4)]


def test_whoever_is_waited_for_passes_those_without_room() -> None:
    rooms = Rooms()
    for index in range(4):
        rooms.submit(index)
    rooms.room = {2}
    work = rooms.chunks[2].work
    assert work is not None and work.waiting and not rooms.chunks[2].worked_on
    work.settle()
    assert rooms.ran == [2] and rooms.chunks[2].work is None and rooms.chunks[0].work is not None


def test_who_makes_room_waits_for_those_that_have_theirs() -> None:
    """And not for others that would want more of it, which might wait for this one in turn."""
    rooms = Rooms()
    for index in range(4):
        rooms.submit(index)
    rooms.room = {3}
    rooms.updater._pending[3].bring(wait=False)
    work = rooms.chunks[0].work
    assert work is not None
    work.settle()
    assert rooms.ran == [3, 0]
    rooms.updater.flush()
    assert rooms.ran == [3, 0, 1, 2] and not rooms.updater.failed


def test_one_without_room_stays_until_there_is_some() -> None:
    rooms = Rooms()
    rooms.submit(0)
    rooms.error = BudgetError("too much", tier="device", short=1, advice="raise it")
    for _ in range(2):
        with pytest.raises(BudgetError):
            rooms.updater.flush()
    assert not rooms.updater.failed and rooms.chunks[0].work is not None
    rooms.error = None
    rooms.updater.flush()
    assert rooms.ran == [0] and rooms.finished == [(0, True)]


def test_one_that_never_gets_any_is_dropped_and_said_to_be_lost() -> None:
    rooms = Rooms()
    rooms.submit(0)
    rooms.submit(1)
    rooms.error = BudgetError("too much", tier="device", short=1, advice="raise it")
    ended = threading.Thread(target=rooms.updater.drop, daemon=True)
    ended.start()
    ended.join(60)
    assert not ended.is_alive()
    assert "too much" in rooms.updater.failed
    assert rooms.finished == [(0, False), (1, False)] and not rooms.ran
    assert all(chunk.work is None for chunk in rooms.chunks.values())


def open_engine(folder: Path, io: FaultyIO, memory: int) -> Engine:
    settings = config_of(ssd={"folder": str(folder), "memory": SSD}, device={"memory": memory})
    budgets = {"device": memory, "host": 0, "ssd": SSD}
    tiers = Tiers(CpuBackend(poison=True), Ledger(budgets), DiskSpace([folder], SSD, io=io))
    return Engine(zoo.build("gpt2"), Config.read(settings | {"host": {"memory": 0}}), tiers=tiers)


def step(engine: Engine, number: int) -> int:
    """How many updates have no room when the step is over."""
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
    engine.step()
    return sum(not job.ready for job in engine._session.executor.updater._pending)


def slow(*_: Any) -> None:
    time.sleep(0.004)


@pytest.mark.parametrize("memory", [1_800_000, 2_000_000, 2_700_000])
def test_steps_do_not_wait_for_them(folder: Path, memory: int) -> None:
    engine = open_engine(folder, FaultyIO(slow), memory)
    without = 0
    for number in range(4):
        without += step(engine, number)
        engine.check_integrity()
    assert without, "all had room"
    assert engine.stats()["peak_bytes"]["device"] <= memory
    assert engine.weights_sha256() == expected("gpt2", "none", 4)[0]
    engine.close()


@pytest.mark.parametrize("memory", [1_800_000, 2_000_000, 2_700_000])
def test_whatever_comes_between_steps_finds_them_done(folder: Path, memory: int) -> None:
    """Other shapes, ones that are too large, reading, writing, saving: the weights of undisturbed steps."""
    engine = open_engine(folder, FaultyIO(slow), memory)
    batch = zoo.ZOO["gpt2"].batch
    longer = {key: torch.cat([value] * 3) for key, value in batch(9).items()}
    without = refused = 0
    for number in range(5):
        without += step(engine, number)
        if number == 0:
            with torch.no_grad():
                engine(**{key: value[:, :7] for key, value in batch(99).items()})
        if number in (1, 2):
            try:
                engine(**longer)
            except BudgetError:
                refused += 1
        if number == 3:
            engine.save(folder / "saved")
            with engine.weights("*.c_fc.*", write=True) as values:
                assert all(value.isfinite().all() for value in values.values())
        engine.check_integrity()
    assert without, "all had room"
    assert refused == 2
    assert engine.weights_sha256() == expected("gpt2", "none", 5)[0]
    engine.close()


def test_a_gradient_that_cannot_be_read_stops_the_engine_and_a_checkpoint_mends_it(folder: Path) -> None:
    broken = False

    def fail(link: str, *_: Any) -> None:
        slow()
        if broken and link == READ:
            raise OSError(5, "Input/output error")

    engine = open_engine(folder, FaultyIO(fail), 1_800_000)
    for number in range(2):
        step(engine, number)
    engine.save(folder / "saved")
    broken = True
    with pytest.raises(DiskError):
        step(engine, 2)
        engine.synchronize()
    broken = False
    engine.load(folder / "saved")
    for number in (2, 3):
        step(engine, number)
    assert engine.weights_sha256() == expected("gpt2", "none", 4)[0]
    engine.check_integrity()
    engine.close()
