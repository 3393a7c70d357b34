"""What ends early between two lines: no number is lost, nobody waits for ever, the books are right."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import zoo
from disks import FaultyIO
from ebbtide.devices.cpu_device import CpuBackend, Stream
from ebbtide.engine import Engine
from ebbtide.errors import DiskError, StateError
from ebbtide.memory.chunk import cut
from ebbtide.memory.disk.space import WRITE
from ebbtide.planner.states import RunStates
from ebbtide.runtime.updates.update_jobs import UpdateJob
from harness import config_of
from sampling import crossed
from test_ssd_faults import open_engine


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
    engine.step()


def spilling(**changes: Any) -> Engine:
    """State on the host, and parameters that come and go."""
    config = config_of(device={"memory": 1_350_000}, host={"memory": 64 << 20}, **changes)
    return ebbtide.initialize(zoo.build("gpt2"), config)


def under_way(**changes: Any) -> Engine:
    """Traced, and by a plan since."""
    engine = spilling(**changes)
    step(engine, 0)
    step(engine, 1)
    return engine


def failing(copy: Callable[..., Any], link: str, nth: int, ending: type[BaseException]) -> Callable[..., Any]:
    """The nth copy over a link does not start."""
    seen = 0

    def fail(to: torch.Tensor, source: torch.Tensor, over: str, after: Any = None) -> Any:
        nonlocal seen
        seen += over == link
        if over == link and seen == nth:
            raise ending("stopped")
        return copy(to, source, over, after)

    return fail


def interrupted_at(nth: int, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = 0

    def call(*given: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == nth:
            raise KeyboardInterrupt
        return original(*given, **named)

    return call


@pytest.mark.parametrize(
    ("nth", "link", "ending"),
    crossed([1, 2, 7, 20], ["host_to_device", "device_to_host"], [KeyboardInterrupt, OSError]),
)
def test_a_copy_that_could_not_start(
    monkeypatch: pytest.MonkeyPatch, link: str, ending: type[BaseException], nth: int
) -> None:
    """The chunk stays where it is good; after an interrupt in forward training goes on with the same numbers."""
    hashes = []
    for interrupted in (False, True):
        engine = under_way()
        with monkeypatch.context() as patch:
            if interrupted:
                patch.setattr(
                    engine._tiers.backend, "copy", failing(engine._tiers.backend.copy, link, nth, ending)
                )
            try:
                with torch.no_grad():
                    engine(**zoo.ZOO["gpt2"].batch(2))
            except ending:
                pass
        engine.check_integrity()
        step(engine, 3)
        hashes.append(engine.weights_sha256())
        engine.close()
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("nth", "call", "leaves"), crossed([1, 3, 5, 8], ["_placeholder", "_version"], [False, True])
)
def test_a_chunk_whose_parameters_were_bound_or_unbound_half_way(
    monkeypatch: pytest.MonkeyPatch, call: str, nth: int, leaves: bool
) -> None:
    """Its memory is known as a chunk's as long as it is one, and no longer: what comes to lie there is not a weight."""
    hashes = []
    for interrupted in (False, True):
        engine = under_way()
        data = engine._session.data
        with monkeypatch.context() as patch, torch.no_grad():
            if interrupted:
                patch.setattr(data, call, interrupted_at(nth, getattr(data, call)))
                with pytest.raises(KeyboardInterrupt):
                    engine(**zoo.ZOO["gpt2"].batch(2))
            else:
                engine(**zoo.ZOO["gpt2"].batch(2))
        for index in range(len(data.bound)) if leaves else ():
            chunk = data.computed(index)
            if chunk.device_valid and chunk.move is None:
                engine._session.room.evict(chunk)
        engine.check_integrity()
        for number in (3, 4):
            step(engine, number)
            engine.check_integrity()
        hashes.append(engine.weights_sha256())
        engine.close()
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("where, call", [("host", "submit"), ("device", "update_one")])
def test_an_update_in_backward_that_could_not_begin(
    monkeypatch: pytest.MonkeyPatch, where: str, call: str
) -> None:
    """The steps of its parameters are counted already: it is no step, and the engine says so."""
    config = config_of(updates="in-backward", clip=None, placement="host" if where == "host" else "auto")
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    step(engine, 0)
    engine.synchronize()
    updates = engine._session.updates
    owner = updates.chunks.queue if where == "host" else updates.chunks
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, call, interrupted_at(1, getattr(owner, call)))
        step(engine, 1)
    with pytest.raises(StateError, match="partially stepped"):
        step(engine, 1)
    engine.close()


def test_a_move_whose_chunk_cannot_be_settled(folder: Path) -> None:
    engine = open_engine(folder, FaultyIO())
    step(engine, 0)
    engine.synchronize()
    session = engine._session
    chunk = next(c for c in session.store.chunks.values() if c.kind == "variance" and c.ssd_valid)
    settle = session.store.settle_stream

    def fail(_: Any) -> None:
        raise DiskError("a kept piece cannot be written")

    session.store.settle_stream = fail
    with pytest.raises(DiskError):
        session.places.go_home(chunk, "device")
    session.store.settle_stream = settle
    assert chunk.ssd_valid and not chunk.device_valid and chunk.device is None
    engine.check_integrity()
    engine.close()


def test_a_job_that_was_handed_over_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody told the thread of it: whoever wants its chunk does."""
    engine = spilling()
    step(engine, 0)
    engine.synchronize()
    original = Stream.submit
    told = []

    def submit(self: Stream, work: Any) -> Any:
        if work == engine._session.queue._work_off and not told:
            told.append(work)
            raise KeyboardInterrupt
        return original(self, work)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stream, "submit", submit)
        step(engine, 1)
    assert told
    engine.load_state_dict(zoo.build("gpt2").state_dict())
    step(engine, 2)
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_job_that_nobody_was_given(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    engine = spilling()
    step(engine, 0)
    engine.synchronize()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def hand_over(self: UpdateJob, original: Any = UpdateJob.hand_over) -> None:
            if late:
                original(self)
            raise KeyboardInterrupt

        patch.setattr(UpdateJob, "hand_over", hand_over)
        step(engine, 1)
    engine.load_state_dict(zoo.build("gpt2").state_dict())
    step(engine, 2)
    assert all(chunk.work is None or chunk.work._job() for chunk in engine._session.store.chunks.values())
    engine.check_integrity()
    engine.close()


def test_values_by_name_after_a_write_that_failed(folder: Path) -> None:
    """They are not the ones before the update."""
    armed = False

    def fail(kind: str, *_: Any) -> None:
        if armed and kind == WRITE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    engine = open_engine(folder, FaultyIO(fail), clip=None)
    step(engine, 0)
    step(engine, 1)
    engine.synchronize()
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
    armed = True
    with pytest.raises(DiskError, match=r"\.data"):
        engine.step()
        engine.state_dict()
    armed = False
    engine.close()


def test_staging_that_could_not_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(folder, FaultyIO())
    step(engine, 0)
    session, ledger = engine._session, engine._tiers.ledger
    engine.synchronize()
    assert ledger.tags["device"]["staging"]

    def allocate(self: CpuBackend, tier: str, count: int) -> torch.Tensor:
        raise KeyboardInterrupt

    session.queue.drain()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CpuBackend, "allocate", allocate)
        session.homes.restream()
    assert ledger.tags["device"]["staging"] == 0
    step(engine, 1)
    assert ledger.tags["device"]["staging"]
    engine.close()
    assert ledger.reserved["device"] == 0


@pytest.mark.parametrize("precision", [{"precision": "fp16"}, {"precision": "bf16", "master": "separate"}])
@pytest.mark.parametrize("host", [0, 64 << 20])
def test_what_is_written_between_steps_counts(precision: dict[str, Any], host: int) -> None:
    """Though the next thing that comes to its chunk is a gradient, in the parameter's place."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    places = {"device": {"kind": "cpu", "memory": 64 << 20}, "host": {"memory": host}}
    engine = ebbtide.initialize(
        module, {**places, "optimizer": {"lr": 1e-4, "weight_decay": 0.0}, **precision}
    )
    x = torch.randn(8, 64, dtype=next(module.parameters()).dtype)
    for _ in range(3):
        engine.backward(engine(x).float().square().mean())
        engine.step()
        with torch.no_grad():
            module[0].weight.clamp_(-0.01, 0.01)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    largest = engine.state_dict()["0.weight"].abs().max().item()
    assert 0.009 < largest < 0.0103
    engine.close()


def test_what_is_written_while_all_is_resident_counts() -> None:
    config = {
        "device": {"kind": "cpu", "memory": 300_000},
        "host": {"memory": 64 << 20},
        "optimizer": {"lr": 1e-3},
    }
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    engine = ebbtide.initialize(module, config)
    x = torch.randn(8, 64, dtype=next(module.parameters()).dtype)
    with engine.resident():
        for _ in range(2):
            engine.backward(engine(x).float().square().mean())
            engine.step()
            engine.synchronize()
            with torch.no_grad():
                module[0].weight.add_(8.0)
    assert engine.state_dict()["0.weight"].mean().item() == pytest.approx(16.0, abs=0.1)
    engine.close()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("deed", ["access", "release"])
@pytest.mark.parametrize("nth", [2, 5])
def test_between_a_runs_state_and_its_pins(
    monkeypatch: pytest.MonkeyPatch, deed: str, backward: bool, nth: int
) -> None:
    hashes = []
    for interrupted in (False, True):
        engine = under_way()
        loss = engine(**zoo.ZOO["gpt2"].batch(2)).loss if backward else None
        original, seen = getattr(RunStates, deed), []

        def stop(self: RunStates, *args: Any, original: Any = original, seen: list[bool] = seen) -> bool:
            seen.append(original(self, *args))
            if len(seen) == nth:
                raise KeyboardInterrupt
            return seen[-1]

        if interrupted:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(RunStates, deed, stop)
                engine.backward(loss) if backward else engine(**zoo.ZOO["gpt2"].batch(2))
            engine.check_integrity()
            assert not any(
                engine._session.data.computed(i).pins for i in range(len(engine._session.layout.chunks))
            )
            loss = None
        engine.optimizer.zero_grad()
        engine.backward(loss or engine(**zoo.ZOO["gpt2"].batch(2)).loss)
        engine.step()
        step(engine, 3)
        hashes.append(engine.weights_sha256())
        engine.close()
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("redone", [False, True])
@pytest.mark.parametrize("deed", ["zero_grad", "state_dict"])
def test_while_parameters_are_rebuilt(monkeypatch: pytest.MonkeyPatch, deed: str, redone: bool) -> None:
    """Gradients are where they were, and nobody takes one for the other."""
    hashes = []
    for interrupted in (False, True):
        engine = under_way(master="separate")
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
        assert engine._session.updates.sink.parameter_space.members
        seen: list[Any] = []

        def stop(*args: Any, seen: list[Any] = seen) -> Any:
            seen.append(None)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return cut(*args)

        if interrupted:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("ebbtide.runtime.gradients.destinations.cut", stop)
                engine.optimizer.zero_grad() if deed == "zero_grad" else engine.state_dict()
            engine.check_integrity()
        if redone:
            engine.optimizer.zero_grad()
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
        if interrupted and deed == "zero_grad" and not redone:
            with pytest.raises(StateError, match="without a backward pass"):
                engine.step()
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
        engine.step()
        step(engine, 3)
        hashes.append(engine.weights_sha256())
        engine.close()
    assert hashes[0] == hashes[1]
