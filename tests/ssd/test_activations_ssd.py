"""Activations that leave for SSD: the same numbers, within each tier's budget, and nothing is lost when a disk fails."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
import zoo
from disks import FaultyIO
from ebbtide.config import Config
from ebbtide.devices import CpuBackend
from ebbtide.engine import Engine, Tiers
from ebbtide.errors import BudgetError, DiskError, IntegrityError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.space import READ, WRITE, DiskSpace
from ebbtide.memory.ssd_passage import Passage
from ebbtide.planner.activation_trips import ALL, CHECKPOINTS, AwayRoom, send_away
from ebbtide.planner.sizes import passage_bytes
from harness import Count, config_of, expected
from sampling import crossed, some
from test_activations import fail, fail_in_backward, long_batch, long_model, some_record
from test_exact import CHANGES, MODES
from test_ssd import follow, on_ssd

STEPS = 4
SPLITS = {"one tier of RAM": (200_000, 0), "three tiers": (200_000, 1_500_000)}
"""Budgets of device and host to begin with: too little for what is away, beside model data."""
LESS = [("gpt2", "non-reentrant", "checkpoints"), ("vit", "reentrant", "all")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's activations are smaller than what is worth a copy."""
    monkeypatch.setattr("ebbtide.tracing.saved_storages.SMALLEST", 1024)


def check(
    name: str, mode: str, which: str, config: dict[str, Any], split: tuple[int, int], steps: int = STEPS
) -> dict[str, Any]:
    device, host, done = follow(name, mode, steps, config | {"offload_activations": which}, split)
    clip, accumulate = config.get("clip"), config.get("accumulate", 1)
    sha, losses = expected(name, mode, steps, config.get("precision", "bf16"), clip, accumulate)
    assert (done.sha, tuple(done.losses)) == (sha, losses)
    assert done.counted <= device
    assert done.stats["peak_bytes"]["device"] <= device and done.stats["peak_bytes"]["host"] <= host
    assert not done.stats["diverged"]
    return done.stats


@pytest.mark.parametrize(("name", "mode", "which"), some(LESS, 2))
def test_one_tier_of_ram(small: None, folder: Path, name: str, mode: str, which: str) -> None:
    stats = check(name, mode, which, on_ssd(folder), SPLITS["one tier of RAM"])
    assert stats["offloaded_bytes"] > 0 and stats["tags"]["ssd"]["activations"] > 0


def test_three_tiers(small: None, folder: Path) -> None:
    config = on_ssd(folder)
    config["ssd"]["checksums"] = True
    stats = check("gpt2", "none", "all", config, SPLITS["three tiers"])
    assert stats["tags"]["ssd"]["activations"] > 0 and stats["tags"]["host"]["activations"] > 0


@pytest.mark.parametrize("change", ["no prefetch", "in-backward"])
def test_settings(small: None, folder: Path, change: str) -> None:
    settings: dict[str, Any] = {
        "no prefetch": {"prefetch": False},
        "in-backward": {"updates": "in-backward", "clip": None},
    }
    check("gpt2", "none", "all", on_ssd(folder, **settings[change]), SPLITS["one tier of RAM"])


def test_values_that_are_known_in_an_imagined_pass_take_room(small: None, folder: Path) -> None:
    """T5's positions are computed for real while its first pass is imagined."""
    check("t5", "none", "all", on_ssd(folder, layout="page"), SPLITS["one tier of RAM"])


@pytest.mark.heavy
@pytest.mark.parametrize("change", ["plain", *CHANGES])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_everything(small: None, folder: Path, name: str, mode: str, change: str) -> None:
    for which in (ALL, CHECKPOINTS):
        for split in SPLITS.values():
            check(name, mode, which, on_ssd(folder, **CHANGES.get(change, {})), split, 12)


# -- what moves --------------------------------------------------------------------------------------------


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Engines whose activations have the sizes that are used outside of tests, on a disk that can be told to fail."""
    engines: list[Engine] = []

    def build(device: int = 5_000_000, host: int = 0, io: FaultyIO | None = None, **changes: Any) -> Engine:
        budgets = {"device": device, "host": host, "ssd": 64 << 20}
        rates = changes.pop("rates", None)
        disk = DiskSpace([folder], budgets["ssd"], io=io or FaultyIO(), rates=rates)
        tiers = {tier: {"memory": budgets[tier]} for tier in ("device", "host")}
        ssd = {"folder": str(folder), "memory": budgets["ssd"]}
        config = config_of(**{"offload_activations": "all", "ssd": ssd, **tiers, **changes})
        backend = CpuBackend(poison=True)
        engines.append(
            Engine(long_model(False), Config.read(config), tiers=Tiers(backend, Ledger(budgets), disk))
        )
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
    assert not list(folder.iterdir())


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(**long_batch(number)).loss)
    engine.step()
    engine.check_integrity()


@pytest.fixture(scope="module")
def reference() -> str:
    """The weights after `STEPS` steps where nothing ever leaves."""
    engine = ebbtide.initialize(long_model(False), config_of(device={"memory": "1GB"}))
    for number in range(STEPS):
        step(engine, number)
    sha = engine.weights_sha256()
    engine.close()
    return str(sha)


@pytest.mark.parametrize(("device", "host"), some([(5_000_000, 3_000_000), (5_000_000, 0)], 1))
def test_each_step_writes_what_was_planned(make: Any, reference: str, device: int, host: int) -> None:
    engine = make(device, host)
    moved = engine._session.store.traffic.moved
    with Count(engine) as count:
        for number in range(STEPS):
            before, sent = dict(moved), engine.stats()["offloaded_bytes"]
            step(engine, number)
    engine.synchronize()
    assert engine.weights_sha256() == reference
    plan = engine._session.cursor.plan
    assert plan is not None and plan.away is not None and plan.away.on_ssd
    assert (plan.away.host_bytes > 0) == (host > 0) and plan.away.beside == (host == 0)
    assert moved["ssd_write"] - before["ssd_write"] >= plan.away.ssd_bytes
    assert moved["ssd_read"] - before["ssd_read"] >= plan.away.ssd_bytes
    stats = engine.stats()
    assert count.peak <= device and stats["peak_bytes"]["device"] <= device
    assert stats["peak_bytes"]["host"] <= host
    tags = engine._tiers.ledger.tags
    assert tags["ssd"]["activations"] == plan.away.stored_bytes
    assert tags["host"]["activations"] == plan.away.staging
    assert stats["offloaded_bytes"] - sent == plan.away.bytes


def test_ram_that_is_free_is_used_first(make: Any, reference: str) -> None:
    for host in (0, 64 << 20):
        engine = make(64 << 20, host)
        for number in range(STEPS):
            step(engine, number)
        assert engine.weights_sha256() == reference
        assert engine.stats()["moved_bytes"]["ssd_write"] == engine.stats()["moved_bytes"]["ssd_read"] == 0
        assert (engine.stats()["offloaded_bytes"] > 0) == (host > 0)
        engine.close()


def test_it_trains_where_ram_alone_is_refused(make: Any) -> None:
    with pytest.raises(BudgetError, match="needs at least"):
        step(make(offload_activations="off"), 0)


@pytest.mark.heavy
@pytest.mark.parametrize("host", [0, 3_000_000])
def test_a_slow_disk_costs_time_and_no_memory(make: Any, reference: str, host: int) -> None:
    engine = make(5_000_000, host, rates={READ: 200e6, WRITE: 60e6})
    with Count(engine) as count:
        for number in range(STEPS):
            step(engine, number)
    assert engine.weights_sha256() == reference
    assert count.peak <= 5_000_000
    assert not engine.stats()["diverged"]


# -- where execution is not as planned -----------------------------------------------------------------------


@pytest.mark.parametrize("host", [0, 3_000_000])
def test_without_a_plan(make: Any, reference: str, monkeypatch: pytest.MonkeyPatch, host: int) -> None:
    """What the host has no room for goes to SSD, and comes when backward asks for it."""
    monkeypatch.setattr("ebbtide.runtime.planning.tracer.trace_symbolically", fail)
    engine = make(24_000_000, host)
    loss = engine(**long_batch(0)).loss
    assert engine._session.cursor.plan is None
    engine.backward(loss)
    engine.step()
    assert engine._tiers.ledger.tag_peaks["ssd"]["activations"] > 0
    for number in range(1, STEPS):
        step(engine, number)
    assert engine.weights_sha256() == reference


@pytest.mark.heavy
def test_shapes_take_turns(make: Any) -> None:
    """Each has its plan; what only the other one wanted on SSD is given back."""
    shas = []
    for which, device in (("off", 64 << 20), ("all", 5_000_000)):
        engine = make(device, offload_activations=which)
        for number in range(6):
            engine.backward(engine(**long_batch(number, 256 if number % 3 == 1 else 512)).loss)
            engine.step()
            engine.check_integrity()
            plan = engine._session.cursor.plan
            if plan is not None and plan.away is not None:
                assert engine._tiers.ledger.tags["ssd"]["activations"] == plan.away.stored_bytes
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.heavy), 3_000_000])
def test_exceptions_and_dropped_graphs_give_everything_back(make: Any, reference: str, host: int) -> None:
    engine = make(5_000_000, host)
    step(engine, 0)
    loss = engine(**long_batch(1)).loss
    fail_in_backward(engine, loss)
    del loss
    gc.collect()
    dropped = engine(**long_batch(2)).loss
    del dropped
    engine._session.abandon()
    for number in range(1, STEPS):
        step(engine, number)
    assert engine.weights_sha256() == reference
    assert engine._tiers.ledger.tags["ssd"]["activations"] == engine._session.cursor.plan.away.stored_bytes
    held = engine(**long_batch(9)).loss
    engine.close()
    assert held.item() > 0  # it still holds the graph
    assert not any(engine._tiers.ledger.tags["ssd"].values()) and engine._tiers.disk.held == 0
    assert engine._tiers.ledger.tags["host"]["activations"] == 0
    assert engine._tiers.backend.held() == {"device": 0, "host": 0}


# -- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "host"), crossed([READ, WRITE], [0, 3_000_000]))
def test_a_disk_that_errors_once(make: Any, reference: str, link: str, host: int) -> None:
    """The file and the bytes are named, nothing is lost, and the step can be made again."""
    places: set[int] = set()
    bad: list[int] = []
    left = [5, 11, 23]

    def fail(kind: str, _: int, buffers: Any, offset: int) -> None:
        if kind == link and offset in places and left and not bad:
            left[0] -= 1
            if not left[0]:
                del left[0]
                bad.append(offset)
        if kind == link and offset in bad:  # each part of a merged call that fails is tried by itself
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    engine = make(5_000_000, host, io=FaultyIO(fail))
    number = failed = 0
    while number < STEPS:
        if number > 1:  # the plan from the first live iteration is in force
            shelf = engine._session.room.activations._ssd
            places |= {extent.start for extents in shelf._places.values() for extent in extents}
        try:
            loss = engine(**long_batch(number)).loss
            engine.backward(loss)
        except DiskError as error:
            assert ".data" in str(error) and "expected" in str(error)
            failed += 1
            bad.clear()
            engine._session.drop_gradients()
            engine.check_integrity()
            continue
        engine.step()
        engine.check_integrity()
        number += 1
    assert engine.weights_sha256() == reference
    assert failed


@pytest.mark.heavy
def test_short_transfers_are_no_error(make: Any, reference: str) -> None:
    def some(link: str, file: int, buffers: Any, offset: int) -> int | None:
        return sum(len(one) for one in buffers) // 2 // 4096 * 4096 or None

    engine = make(io=FaultyIO(some))
    for number in range(STEPS):
        step(engine, number)
    assert engine.weights_sha256() == reference


def test_a_file_that_is_cut(make: Any, folder: Path) -> None:
    engine = make()
    step(engine, 0)
    engine.synchronize()
    (data,) = folder.glob("*.data")
    os.truncate(data, 4096)
    with pytest.raises((DiskError, IntegrityError), match=data.name):
        step(engine, 1)


def test_no_room_on_ssd(folder: Path) -> None:
    """What it cannot hold stays; where that does not fit, it is said before anything runs."""
    for size, works in ((32 << 20, True), (4 << 20, False)):
        ssd = {"folder": str(folder), "memory": size}
        tiers = {"device": {"memory": 5_000_000}, "host": {"memory": 0}, "ssd": ssd}
        engine = ebbtide.initialize(long_model(False), config_of(offload_activations="all", **tiers))
        try:
            if works:
                step(engine, 0)
                assert engine.stats()["peak_bytes"]["ssd"] <= size
            else:
                with pytest.raises(BudgetError) as found:
                    step(engine, 0)
                assert found.value.short > 0
        finally:
            engine.close()


# -- the passage, and the planner -------------------------------------------------------------------------------


@pytest.mark.parametrize("buffered", [False, True])
def test_bytes_come_back_as_they_were(folder: Path, buffered: bool) -> None:
    backend, disk = CpuBackend(), DiskSpace([folder], 4 << 20)
    buffers = [backend.allocate("host", 16384) for _ in range(6)] if buffered else []
    passage = Passage(backend, disk, buffers)
    kept, events = [], []
    for number, size in enumerate((1, 4096, 50_000, 200_001, 16384)):
        flat = torch.randint(0, 256, (size,), dtype=torch.uint8)
        uses = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
        extents = [disk.allocate(min(size, 100_000))]
        extents += [disk.allocate(size - 100_000)] if size > 100_000 else []
        kept.append((flat, extents, uses))
        events.append(passage.put(flat, extents))
        assert torch._C._storage_Use_Count(flat.untyped_storage()._cdata) == uses, number
    for event in events:
        event.wait()
    for flat, extents, _ in kept:
        back = torch.empty_like(flat)
        passage.get(back, extents).wait()
        assert torch.equal(back, flat)
    gone = passage.put(kept[2][0], kept[2][1])
    gone.cancel()
    gone.wait()
    assert len(passage.close()) == len(buffers)
    disk.close()
    backend.close()


@pytest.mark.parametrize("beside", [False, True])
def test_what_the_host_lacks_goes_to_ssd(beside: bool) -> None:
    for seed in range(100):
        record = some_record(seed)
        record = replace(record, saved=tuple(replace(s, bytes=s.bytes << 10) for s in record.saved))
        everything = send_away(record, ALL, spent=0)[1]
        assert not everything.on_ssd
        host = 0 if beside else everything.bytes // 2
        _, away = send_away(record, ALL, spent=0, room=AwayRoom(host, 1 << 40, beside))
        assert away.bytes == everything.bytes
        assert beside or away.host_bytes + away.staging <= host or not away.host_bytes
        assert away.staging == (
            0 if beside or not away.on_ssd else passage_bytes(max(t.bytes for t in away.on_ssd))
        )
        assert away.traffic == 2 * (away.ssd_bytes if beside else away.bytes + away.ssd_bytes)
        roomy = send_away(record, ALL, room=AwayRoom(1 << 40, 1 << 40))[1]
        assert not roomy.on_ssd
        longest = max(everything.trips.values(), key=lambda t: t.come - t.gone, default=None)
        if away.on_ssd and longest is not None:
            assert max(t.come - t.gone for t in away.on_ssd) == longest.come - longest.gone
