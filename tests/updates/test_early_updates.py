"""Updates whose gradients left for want of room: submitted before they have any, never waited for in `step()`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebbtide
import zoo
from disks import FaultyIO
from ebbtide.config import Config
from ebbtide.devices import CpuBackend
from ebbtide.engine import Engine
from ebbtide.errors import BudgetError, DiskError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.disk.space import READ, WRITE, DiskSpace
from ebbtide.memory.links import Traffic
from ebbtide.planner import search
from ebbtide.runtime.process_tiers import Tiers
from ebbtide.runtime.updates.update_queue import UpdateQueue
from harness import Count, config_of, expected
from sampling import some

SSD = 64 << 20


@pytest.fixture(autouse=True)
def gradients_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small models other plans move less, and all gradients stay."""
    monkeypatch.setattr(search, "FRESH", 4)


class Rooms:
    """Jobs that come when they have room, or when they may make some; in which order they did."""

    def __init__(self) -> None:
        self.updater = UpdateQueue(True, SimpleNamespace(state_stream=None, traffic=Traffic()))
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
        self.updater.submit(
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


def test_one_that_has_its_room_keeps_it_behind_one_that_has_none() -> None:
    rooms = Rooms()
    rooms.submit(0)
    chunk = Chunk("param", 1, torch.float32, 1024, 4096)
    rooms.updater.submit(
        [chunk], [], lambda: rooms.ran.append(1), lambda done: rooms.finished.append((1, done))
    )
    assert chunk.worked_on and not rooms.chunks[0].worked_on
    rooms.updater.flush()
    assert sorted(rooms.ran) == [0, 1] and sorted(rooms.finished) == [(0, True), (1, True)]


class Layers(nn.Module):
    """Equal layers, and a head of another size: its update never has room beside all else."""

    def __init__(self, layers: int, width: int, head: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, head, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


class Tables(nn.Module):
    """Layers around a module that owns several tables: what is used at once is most there, activations elsewhere."""

    def __init__(self, width: int = 128, layers: int = 6, tables: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.tables = _Sum(width, tables)
        self.after = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.before:
            y = torch.tanh(layer(y))
        y = y + self.tables(x.abs().mul(100).long().remainder(128))
        for layer in self.after:
            y = torch.tanh(layer(y))
        return (y.repeat(1, 10).square() - 1).square().mean()


class _Sum(nn.Module):
    def __init__(self, width: int, tables: int) -> None:
        super().__init__()
        for number in range(tables):
            self.register_parameter(f"table{number}", nn.Parameter(0.1 * torch.randn(128, width)))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return sum(F.embedding(places[:, i], p) for i, p in enumerate(self.parameters()))  # type: ignore[return-value]


def settings_of(folder: Path, memory: int, **changes: Any) -> Config:
    changes |= {"precision": "fp32", "host": {"memory": 0}, "device": {"memory": memory}}
    return Config.read(config_of(**changes, ssd={"folder": str(folder), "memory": SSD}))


def tiers_of(folder: Path, memory: int) -> Tiers:
    io = FaultyIO(lambda link, *_: time.sleep(0.006 if link == WRITE else 0.001))
    budgets = {"device": memory, "host": 0, "ssd": SSD}
    return Tiers(CpuBackend(poison=True), Ledger(budgets), DiskSpace([folder], SSD, io=io))


def rows(number: int, count: int, width: int = 128) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(number))


def train(engine: Engine, x: torch.Tensor) -> int:
    """How many updates have no room when the step is over."""
    engine.backward(engine(x))
    engine.step()
    return sum(not job.ready for job in engine._session.queue._pending)


def test_another_engine_takes_no_room_from_updates_that_have_theirs(folder: Path) -> None:
    free = ebbtide.initialize(Layers(5, 128, 768), config_of(precision="fp32"))
    for number in range(4):
        train(free, rows(number, 16))
    wanted = free.weights_sha256()
    free.close()
    memory = 2_040_000
    tiers = tiers_of(folder, memory)
    one = Engine(Layers(5, 128, 768), settings_of(folder, memory), tiers=tiers)
    assert sum(train(one, rows(number, 16)) for number in range(3)), "all had room"
    other = Engine(Layers(2, 32, 32), settings_of(folder, memory), tiers=tiers)
    train(other, rows(0, 1024, 32))
    train(one, rows(3, 16))
    assert one.weights_sha256() == wanted
    for engine in (one, other):
        engine.check_integrity()
        engine.close()


@pytest.mark.parametrize("memory", [1_520_000, 1_540_000, 1_560_000])
def test_parameters_that_stay_put_fit_right_after_a_step(folder: Path, memory: int) -> None:
    engine = Engine(Layers(12, 128, 128), settings_of(folder, memory), tiers=tiers_of(folder, memory))
    assert sum(train(engine, rows(number, 16)) for number in range(2)), "all had room"
    with engine.resident():
        assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
    engine.close()


def test_in_backward_they_change_no_number(folder: Path) -> None:
    changes: dict[str, Any] = {"updates": "in-backward", "clip": None}
    free = ebbtide.initialize(Layers(12, 128, 128), config_of(precision="fp32", **changes))
    for number in range(4):
        train(free, rows(number, 16))
    wanted = free.weights_sha256()
    free.close()
    for memory in (1_100_000, 1_200_000, 1_500_000):
        settings = settings_of(folder, memory, **changes)
        engine = Engine(Layers(12, 128, 128), settings, tiers=tiers_of(folder, memory))
        for number in range(4):
            train(engine, rows(number, 16))
        assert engine.weights_sha256() == wanted
        engine.check_integrity()
        engine.close()


@pytest.mark.parametrize("memory", [3_040_000, 3_120_000, 3_200_000])
def test_evaluation_between_passes_fits_where_training_does(folder: Path, memory: int) -> None:
    """What training takes at its highest is kept for it, but not from the chunks that it uses."""
    engine = Engine(Tables(), settings_of(folder, memory), tiers=tiers_of(folder, memory))
    with Count(engine) as count:
        for number in range(3):
            train(engine, rows(number, 64))
            with torch.no_grad():
                engine(rows(9, 64))
    assert count.peak <= memory
    engine.check_integrity()
    engine.close()


def open_engine(folder: Path, io: FaultyIO, memory: int) -> Engine:
    settings = config_of(ssd={"folder": str(folder), "memory": SSD}, device={"memory": memory})
    budgets = {"device": memory, "host": 0, "ssd": SSD}
    tiers = Tiers(CpuBackend(poison=True), Ledger(budgets), DiskSpace([folder], SSD, io=io))
    return Engine(zoo.build("gpt2"), Config.read(settings | {"host": {"memory": 0}}), tiers=tiers)


def step(engine: Engine, number: int) -> int:
    """How many updates have no room when the step is over."""
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
    engine.step()
    return sum(not job.ready for job in engine._session.queue._pending)


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


@pytest.mark.parametrize("memory", some([1_800_000, 2_000_000, 2_700_000], 2))
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
