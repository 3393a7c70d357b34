"""Lock-free updates that are interrupted, or whose disk fails: no gradient is lost, or the engine says that it is broken
and loading mends it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.engine import Engine
from ebbtide.errors import DiskError, StateError
from ebbtide.kernels import RULES
from ebbtide.runtime.updates.lock_free.policy import LockFree
from interrupt import Interrupt
from sampling import few
from test_lock_free import ELEMENTS, LAYERS, SUMS, TIERS, chain, check, slow, train

POINTS = 24
"""At which a step is interrupted."""


def of_books(path: str) -> bool:
    return "/ebbtide/runtime/updates/lock_free/" in path


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "adamw", SUMS)


def go_on(engine: Engine, total: torch.Tensor) -> None:
    """All is there, or the engine is broken and loading mends it."""
    if engine._core.broken or engine._session.queue.failed:
        with pytest.raises(StateError, match="partially stepped"):
            engine.synchronize()
        engine.load_state_dict({f"layers.{i}.weight": torch.zeros(ELEMENTS) for i in range(LAYERS)})
        books = engine.stats()["lock_free"]
        assert books["gradients_applied"] + books["gradients_dropped"] == books["gradients_produced"]
        total = train(engine, 3)
        for value, wanted in zip(engine.state_dict().values(), total, strict=True):
            assert torch.equal(value, wanted.expand(ELEMENTS))
        engine.check_integrity()
    else:
        check(engine, total + train(engine, 3))


def interrupted(folder: Path, host: bool, at: int) -> int:
    """A step that is interrupted, after others; returns how many points it has."""
    with chain(folder, host, max_staleness=1) as engine:
        total = train(engine, 3)
        interrupt = Interrupt(at, of_books)
        try:
            with interrupt:
                step = train(engine, 1)
            total += step
        except KeyboardInterrupt:
            pass
        go_on(engine, total)
    return interrupt.seen


@TIERS
def test_a_step_may_be_interrupted_anywhere(folder: Path, host: bool) -> None:
    count = interrupted(folder, host, -1)
    assert count > POINTS
    for place in few(range(POINTS), POINTS // 3):
        interrupted(folder, host, 1 + place * count // POINTS)


@pytest.mark.parametrize("call", ["_loose", "give"])
def test_an_interrupt_between_passes_keeps_no_buffer(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pass is about to start updates are begun, and values taken over, too."""
    resting, tick = False, LockFree.tick
    monkeypatch.setattr(LockFree, "tick", lambda self: None if resting else tick(self))
    with chain(folder, max_staleness=9) as engine:
        total = train(engine, 2)
        engine.synchronize()
        lock_free = engine._session.lock_free
        if call == "give":
            total += train(engine, 1)
            for turn in [*lock_free._turns.queue]:
                turn.event.wait()
                lock_free._finish()
            resting = True
        else:
            resting = True
            total += train(engine, 1)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(lock_free.buffers, call, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine(torch.ones(LAYERS))
        engine.check_integrity()
        resting = False
        go_on(engine, total)


def test_waiting_for_updates_may_be_interrupted_anywhere(folder: Path) -> None:
    for place in few(range(1, 200, 9), 9):
        gate = threading.Event()
        with chain(folder, max_staleness=9) as engine:
            total = train(engine, 1)
            slow(engine, 0.0, gate)
            total += train(engine, 2)
            gate.set()
            try:
                with Interrupt(place, of_books):
                    engine.synchronize()
            except KeyboardInterrupt:
                pass
            go_on(engine, total)


@TIERS
@pytest.mark.parametrize("fails", ["_bring", "_copy"])
def test_an_update_that_could_not_begin_waits_for_another_time(
    folder: Path, host: bool, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters are on SSD, say, and the disk fails once."""
    gate = threading.Event()
    with chain(folder, host, max_staleness=9) as engine:
        total = train(engine, 2)
        engine.synchronize()
        slow(engine, 0.0, gate)
        total += train(engine, 2)
        gate.set()

        def fail(*_: Any) -> None:
            raise DiskError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(engine._session.lock_free, fails, fail)
            with pytest.raises(DiskError, match="injected"):
                engine.synchronize()
        engine.synchronize()
        engine.save(folder / "run")
        check(engine, total + train(engine, 2))


def test_gradients_that_nobody_adds_are_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when an update counts on the addition, and before anybody was asked for it."""
    gate = threading.Event()
    with chain(folder, max_staleness=10) as engine:
        train(engine, 2)
        engine.synchronize()
        slow(engine, 0.0, gate)
        train(engine, 1)

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._session.queue, "submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(engine, 1)
        gate.set()
        go_on(engine, torch.zeros(LAYERS))


@TIERS
@pytest.mark.parametrize("master", ["split", "separate"])
def test_a_write_before_an_update_is_in_it(folder: Path, host: bool, master: str) -> None:
    with chain(folder, host, precision="bf16", master=master, max_staleness=4) as engine:
        total = train(engine, 1)
        engine.synchronize()
        with torch.no_grad():
            engine.module.layers[0].weight.add_(8.0)
        total[0] += 8
        total += train(engine, 1)
        for value, wanted in zip(engine.state_dict().values(), total, strict=True):
            assert torch.equal(value, wanted.expand(ELEMENTS))


@pytest.mark.parametrize("master", ["split", "separate"])
def test_a_write_that_is_lost_is_not_said_in_the_middle_of_a_pass(folder: Path, master: str) -> None:
    gate = threading.Event()
    with chain(folder, precision="bf16", master=master, max_staleness=20) as engine:
        train(engine, 1)
        engine.synchronize()
        slow(engine, 0.0, gate)
        train(engine, 1)
        loss = engine(torch.ones(LAYERS))
        with torch.no_grad():
            engine.module.layers[0].weight.add_(1.0)
        gate.set()
        engine._session.lock_free._turns.queue[0].event.wait()
        with torch.no_grad():
            engine(torch.ones(LAYERS))
        engine.backward(loss)
        engine.step()
        with pytest.raises(StateError, match="written in place"):
            engine.synchronize()
        assert not engine._core.broken
