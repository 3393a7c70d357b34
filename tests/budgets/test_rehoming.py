"""Batches of other sizes want optimizer state elsewhere: it goes there, and whatever ends that early costs no number."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from disks import FaultyIO
from ebbtide.config import Config
from ebbtide.devices import CpuBackend
from ebbtide.engine import Engine
from ebbtide.errors import DiskError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.space import READ, DiskSpace
from ebbtide.runtime.planning import plan_cache
from ebbtide.runtime.process_tiers import Tiers
from harness import config_of
from sampling import crossed

SSD = 64 << 20
ROOMY = (60_000_000, 0)
Batch = tuple[int, int]
"""(seed, how many times the zoo's batch)."""


@pytest.fixture(autouse=True)
def _plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size has its own here, also where a larger one's would do."""
    monkeypatch.setattr(plan_cache, "NEAR", 1)


def engine_with(folder: Path, memory: tuple[int, int], io: FaultyIO | None = None, **changes: Any) -> Engine:
    """`memory`: of the device and of the host."""
    device, host = memory
    disk = DiskSpace([folder], SSD, io=io or FaultyIO())
    tiers = Tiers(CpuBackend(poison=True), Ledger({"device": device, "host": host, "ssd": SSD}), disk)
    places = {"device": {"memory": device}, "host": {"memory": host}}
    config = config_of(ssd={"folder": str(folder), "memory": SSD}, **places, **changes)
    return Engine(zoo.build("gpt2"), Config.read(config), tiers=tiers)


def train(engine: Engine, batches: list[Batch]) -> None:
    for seed, times in batches:
        batch = {key: torch.cat([value] * times) for key, value in zoo.ZOO["gpt2"].batch(seed).items()}
        engine.backward(engine(**batch).loss)
        engine.step()


def hash_of(engine: Engine) -> str:
    engine.check_integrity()
    found = engine.weights_sha256()
    engine.close()
    return found


@pytest.mark.parametrize(
    ("memory", "updates"),
    crossed(
        [(4_060_000, 1_300_000), (4_100_000, 1_250_000), (4_150_000, 1_450_000), (4_300_000, 0)],
        ["exact", "in-backward"],
    ),
)
def test_batches_of_all_sizes(tmp_path: Path, memory: tuple[int, int], updates: str) -> None:
    """Every plan fits, so getting there does: the last batch of an epoch is a small one."""
    settings = {"updates": updates} | ({"clip": None} if updates == "in-backward" else {})
    batches = list(enumerate([3, 2, 3, 1, 3, 2, 3]))
    found = []
    for number, place in enumerate((memory, ROOMY)):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = engine_with(folder, place, **settings)
        train(engine, batches)
        found.append(hash_of(engine))
    assert found[0] == found[1]


class Ended(Exception):
    """What ends a move early."""


def ending_after(
    count: int, go_home: Callable[[Any, str], None], ending: type[BaseException]
) -> Callable[[Any, str], None]:
    calls = 0

    def end(chunk: Any, tier: str) -> None:
        nonlocal calls
        calls += 1
        if calls > count:
            raise ending
        go_home(chunk, tier)

    return end


@pytest.mark.parametrize(
    ("after", "master", "ending"), crossed([0, 1, 2, 5], ["auto", "separate"], [KeyboardInterrupt, Ended])
)
def test_a_plan_that_is_followed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: type[BaseException], after: int, master: str
) -> None:
    """Between two chunks, or between two kinds of one: training goes on as it was."""
    found = []
    for number, memory in enumerate(((3_970_000, 1_200_000), ROOMY)):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = engine_with(folder, memory, master=master)
        train(engine, [(0, 3), (1, 3)])
        if memory != ROOMY:
            places = engine._session.places
            with monkeypatch.context() as patch, pytest.raises(ending):
                patch.setattr(places, "go_home", ending_after(after, places.go_home, ending))
                train(engine, [(2, 1)])
        train(engine, [(3, 3), (4, 3), (5, 1), (6, 3)])
        found.append(hash_of(engine))
    assert found[0] == found[1]


class ErrsOnce:
    """A read fails where it is asked for."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, kind: str, *_: Any) -> None:
        if kind == READ and self.armed:
            self.armed = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_errors_once_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number, memory in enumerate(((3_970_000, 1_200_000), ROOMY)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault = ErrsOnce()
        engine = engine_with(folder, memory, FaultyIO(fault))
        train(engine, [(0, 3), (1, 3)])
        if memory != ROOMY:
            engine.synchronize()
            places = engine._session.places
            with monkeypatch.context() as patch, pytest.raises(DiskError):
                patch.setattr(places, "_go", arming(fault, places._go))
                train(engine, [(2, 1)])
        train(engine, [(3, 3), (4, 3)])
        found.append(hash_of(engine))
    assert found[0] == found[1]


def arming(fault: ErrsOnce, go: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    armed = []

    def arm(chunk: Any, tier: str) -> None:
        if chunk.ssd_valid and not armed:
            armed.append(chunk)
            fault.armed = True
        go(chunk, tier)

    return arm
