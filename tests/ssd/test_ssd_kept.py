"""Pieces of a chunk's state that stay in RAM while the rest streams: used first, seen by everybody, never lost."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from disks import FaultyIO
from ebbtide.config import Config
from ebbtide.devices import CpuBackend
from ebbtide.engine import Engine
from ebbtide.errors import BudgetError, DiskError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.space import READ, WRITE, DiskSpace
from ebbtide.memory.ssd_space import SsdSpace
from ebbtide.planner.host_side import fill, filling_order, kept_bytes
from ebbtide.planner.shape import ModelShape, Settings
from ebbtide.runtime.process_tiers import Tiers
from harness import config_of, expected
from sampling import crossed

SSD = 64 << 20
SPLITS = {"one tier of RAM": (3_200_000, 0), "less of it": (2_550_000, 0)}
"""Budgets of device and host in which some chunk has a part of its state in RAM."""
THREE = {"three tiers": (1_500_000, 1_500_000)}
LEAVING = {"a chunk leaves": (2_700_000, 0)}


def open_engine(folder: Path, io: FaultyIO, split: str, **changes: Any) -> Engine:
    return open_engine_of(folder, io, (SPLITS | THREE)[split], **changes)


def open_engine_of(folder: Path, io: FaultyIO, memory: tuple[int, int], **changes: Any) -> Engine:
    device, host = memory
    budgets = {"device": device, "host": host, "ssd": SSD}
    settings = config_of(ssd={"folder": str(folder), "memory": SSD}, device={"memory": device})
    config = Config.read(settings | {"host": {"memory": host}, **changes})
    tiers = Tiers(CpuBackend(poison=True), Ledger(budgets), DiskSpace([folder], SSD, io=io))
    return Engine(zoo.build("gpt2"), config, tiers=tiers)


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
    engine.step()


def kept(engine: Engine) -> dict[int, int]:
    return dict(engine._session.streaming.kept)


@pytest.mark.parametrize(("split", "updates"), crossed(SPLITS, ["exact", "in-backward"]))
def test_everybody_sees_what_only_ram_has(folder: Path, split: str, updates: str) -> None:
    """Evaluation, reading, writing, loading, saving and other shapes between steps: the weights of undisturbed ones."""
    engine = open_engine(folder, FaultyIO(), split, updates=updates, clip=None)
    batch = zoo.ZOO["gpt2"].batch
    for number in range(6):
        step(engine, number)
        assert kept(engine), "nothing was split"
        with torch.no_grad():
            engine(**{key: value[:, :7] for key, value in batch(99).items()})
        if number == 2:
            engine.load_state_dict(engine.state_dict())
            engine.save(folder / "saved")
        if number == 3:
            engine.load(folder / "saved")
            step(engine, number)
        with engine.weights("*.c_fc.*", write=True) as values:
            assert all(value.isfinite().all() for value in values.values())
        engine.check_integrity()
    assert engine.weights_sha256() == expected("gpt2", "none", 6, clip=None)[0]
    engine.close()


def test_the_disk_begins_before_what_lives_in_ram_is_updated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(folder, FaultyIO(), "one tier of RAM")
    for number in range(2):
        step(engine, number)
    updates = engine._session.updates
    begun: list[int] = []
    update = updates.chunks.update

    def seen(index: int, *rest: Any) -> None:
        begun.append(index)
        update(index, *rest)

    monkeypatch.setattr(updates.chunks, "update", seen)
    step(engine, 2)
    homes = [updates.store.state_homes[index] for index in begun]
    assert {*homes} == {"device", "ssd"} and sorted(begun) == sorted({*begun})
    assert homes == sorted(homes, reverse=True), "streams first"
    assert engine.weights_sha256() == expected("gpt2", "none", 3)[0]
    engine.close()


def test_state_that_the_first_plan_takes_home_gives_its_place_on_ssd_back_unwritten(folder: Path) -> None:
    """Before there is a plan the device keeps half of its budget free; moments that no step has touched are nowhere."""
    budgets = {"device": 6_000_000, "host": 0, "ssd": SSD}
    config = Config.read(config_of(ssd={"folder": str(folder), "memory": SSD}, device={"memory": 6_000_000}))
    tiers = Tiers(CpuBackend(poison=True), Ledger(budgets), DiskSpace([folder], SSD, io=FaultyIO()))
    engine = Engine(zoo.build("gpt2"), config, tiers=tiers)
    session = engine._session
    before = session.homes.at("ssd")
    loss = engine(**zoo.ZOO["gpt2"].batch(0)).loss
    came = [index for index in before if session.store.state_homes[index] == "device"]
    assert came
    for index in came:
        assert all(state.ssd is None for state in session.store.state_chunks(index))
    engine.backward(loss)
    engine.step()
    assert engine.weights_sha256() == expected("gpt2", "none", 1)[0]
    engine.close()


def test_they_do_not_stream(folder: Path) -> None:
    """They are read when they are first used, and written when somebody reads them by another way: once."""
    io = FaultyIO()
    engine = open_engine(folder, io, "one tier of RAM")
    for number in range(2):
        step(engine, number)
    engine.synchronize()
    [(index, count)] = kept(engine).items()
    group = engine._session.store.ssd_space.group(index).pieces
    extents = [(extent.start, extent.start + extent.nbytes) for _, _, extent in group[:count]]

    def touched() -> list[str]:
        found = [
            link
            for link, offset, nbytes in io.calls
            if any(offset < last and first < offset + nbytes for first, last in extents)
        ]
        io.calls.clear()
        return found

    touched()
    step(engine, 2)
    engine.synchronize()
    assert touched() == []
    engine.weights_sha256()
    assert set(touched()) == {READ, WRITE}  # state is written, then the masters among it are read
    engine.weights_sha256()
    assert set(touched()) == {READ}
    engine.close()


def test_a_disk_that_fails_when_they_are_written_loses_nothing(folder: Path) -> None:
    broken = False

    def fail(link: str, *_: Any) -> None:
        if broken and link == WRITE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    engine = open_engine(folder, FaultyIO(fail), "one tier of RAM")
    for number in range(3):
        step(engine, number)
    engine.synchronize()
    assert kept(engine)
    broken = True
    with pytest.raises(DiskError):
        engine.state_dict()
    broken = False
    step(engine, 3)
    assert engine.weights_sha256() == expected("gpt2", "none", 4)[0]
    engine.check_integrity()
    engine.close()
    assert not list(folder.iterdir())


def shape_of(states: list[int]) -> ModelShape:
    sizes = tuple(count // 6 for count in states)
    return ModelShape((), (), sizes, sizes, tuple(states))


@given(
    st.lists(st.integers(0, 400).map(lambda count: count * 6 * 4096), min_size=1, max_size=8),
    st.integers(0, 4_000_000),
)
def test_room_is_used_up_to_a_piece(states: list[int], room: int) -> None:
    shape = shape_of(states)
    here, pieces = fill(shape, range(shape.chunks), room)
    used = sum(states[i] for i in here) + kept_bytes(shape, pieces)
    assert used <= room and not here & set(pieces)
    left = [count for i, count in enumerate(states) if count and i not in here]
    largest = max(kept_bytes(shape, {i: 1}) for i in range(shape.chunks))
    assert not left or room - used < largest, "a chunk streams as a whole beside room for a piece"


@given(st.integers(3, 60), st.data())
def test_updates_in_backward_have_their_state_come_evenly(count: int, data: st.DataObject) -> None:
    """However many chunks' state has room: no two that stream are further apart than three times their mean distance."""
    in_backward = Settings(10**9, 0, in_backward=True)
    order = filling_order(range(count), in_backward)
    assert sorted(order) == [*range(count)] and order[0] == 0
    assert filling_order(range(count), Settings(10**9, 0)) == [*range(count)]
    held = data.draw(st.integers(1, count - 1))
    streams = sorted(order[held:])
    gaps = [b - a for a, b in itertools.pairwise([0, *streams, count])]
    assert max(gaps) <= 3 * count / len(streams)


def test_a_chunk_finds_room_in_fragments(folder: Path) -> None:
    """What is free may lie in pieces that are each too small."""
    disk = DiskSpace([folder], 64 * 4096)
    small = [disk.allocate(4096 * 4) for _ in range(16)]
    for extent in small[::2]:
        disk.free(extent)
    space = SsdSpace(disk, Ledger({"device": 0, "host": 0, "ssd": 10**9}), piece=1 << 20)
    stored = space.acquire("param", 0, 14 * 2048, [("param", torch.bfloat16)])
    assert [one.first for one in stored] == sorted(one.first for one in stored)
    assert sum(one.count for one in stored) == 14 * 2048 and len(stored) > 1
    with pytest.raises(BudgetError):
        space.acquire("param", 1, 64 * 2048, [("param", torch.bfloat16)])
    space.release("param", 0)
    space.check()
    for extent in small[1::2]:
        disk.free(extent)
    assert disk.room == 64 * 4096
    disk.close()


def test_a_plan_that_found_no_room_leaves_state_within_reach(folder: Path) -> None:
    """While all parameters are held another shape's plan cannot be followed; later the first one's can."""
    engine = open_engine_of(folder, FaultyIO(), (2_200_000, 0), updates="in-backward", clip=None)
    batch = zoo.ZOO["gpt2"].batch
    longer = {key: torch.cat([value, value[:1]], 0) for key, value in batch(9).items()}
    failed = 0
    for number in range(6):
        step(engine, number)
        if number > 2:
            with engine.resident():
                try:
                    engine(**longer)
                except BudgetError:
                    failed += 1
    assert failed, "it was to have no room"
    found = engine.weights_sha256()
    engine.check_integrity()
    engine.close()
    plain = open_engine(folder, FaultyIO(), "one tier of RAM", updates="in-backward", clip=None)
    for number in range(6):
        step(plain, number)
    assert plain.weights_sha256() == found
    plain.close()


@pytest.mark.parametrize("split", ["one tier of RAM", "three tiers"])
def test_what_backward_has_left_is_updated_in_the_order_of_the_next_forward(folder: Path, split: str) -> None:
    """A disk that is slow: updates are left, of state in RAM and on SSD, and no number changes."""
    _, host = (SPLITS | THREE)[split]
    engine = open_engine(
        folder, FaultyIO(lambda *_: time.sleep(0.02)), split, updates="in-backward", clip=None
    )
    updater, left = engine._session.queue, list[list[int]]()
    reorder = updater.reorder

    def spy() -> None:
        reorder()
        left.append([job.index for job in updater._pending if not job.begun])

    updater.reorder = spy  # type: ignore[method-assign]
    for number in range(4):
        step(engine, number)
        engine.check_integrity()
    homes = set(engine._session.store.state_homes)
    assert homes == ({"device", "ssd"} if not host else {"host", "ssd"} | homes & {"device"})
    assert max(map(len, left)) > 1
    assert engine.weights_sha256() == expected("gpt2", "none", 4, clip=None)[0]
    engine.close()


@pytest.mark.parametrize(
    ("split", "between"),
    [
        ("static", "evaluation"),
        ("static", "a look at the weights"),
        ("three tiers", "nothing"),
        ("a chunk leaves", "nothing"),
    ],
)
def test_what_a_slow_disk_cannot_do_in_backward_is_done_in_the_next_forward(
    folder: Path, split: str, between: str
) -> None:
    """Updates are put off where there is room for their gradients, and no number changes, whoever wants them first."""
    budgets = (THREE | LEAVING).get(split, SPLITS["one tier of RAM"])
    placement = "static" if split == "static" else "auto"
    settings = {"updates": "in-backward", "clip": None, "placement": placement}
    slow = FaultyIO(lambda *_: time.sleep(0.01))
    engine = open_engine_of(folder, slow, budgets, **settings)
    updater, put_off = engine._session.queue, list[int]()
    reorder = updater.reorder

    def spy() -> None:
        put_off.extend(job.index for job in updater._put_off)
        reorder()
        assert updater._to_reorder or not updater._put_off

    updater.reorder = spy  # type: ignore[method-assign]
    for number in range(4):
        step(engine, number)
        if between == "evaluation":
            with torch.no_grad():
                engine(**zoo.ZOO["gpt2"].batch(9))
        elif between == "a look at the weights":
            with engine.weights():
                pass
    plan = engine._session.cursor.plan
    assert plan is not None and bool(plan.evicted) == (split in (*THREE, *LEAVING))
    assert put_off or split in THREE  # there is not always room for it
    assert engine.weights_sha256() == expected("gpt2", "none", 4, clip=None)[0]
    engine.close()
