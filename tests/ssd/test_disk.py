"""The SSD tier: what is written comes back, whatever the memory, the folders and the order."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disks import MIB, FaultyIO, memory, stored, uses
from ebbtide.errors import BudgetError, DiskError, StateError
from ebbtide.memory.disk import vectors
from ebbtide.memory.disk.extents import Extents
from ebbtide.memory.disk.space import BLOCK, READ, STRIPE, WRITE, DiskSpace, Extent

# -- round trips --------------------------------------------------------------------------------------

_requests = st.lists(
    st.tuples(
        st.integers(0, 4),  # which extent
        st.floats(0, 1),  # where
        st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.sampled_from([0, 0, 64, 2048, 3])), max_size=5),
        st.booleans(),  # wait for it
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    folders=st.integers(1, 3),
    direct=st.sampled_from([None, False]),
    sizes=st.lists(st.integers(1, 9 * BLOCK), min_size=5, max_size=5),
    requests=_requests,
)
def test_a_space_is_memory(
    tmp_path_factory: Any, folders: int, direct: bool | None, sizes: list[int], requests: list[Any]
) -> None:
    """Random writes against bytearrays; nothing waits, so it is the space that keeps overlapping ones in order."""
    root = tmp_path_factory.mktemp("disks")
    paths = [root / str(place) for place in range(folders)]
    for path in paths:
        path.mkdir()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("ebbtide.memory.disk.space.STRIPE", 2 * BLOCK)
        patch.setattr(vectors, "BOUNCE", 4 * BLOCK)
        patch.setattr(vectors, "MAX_CALL", 6 * BLOCK)
        space = DiskSpace(paths, 64 * BLOCK, checksums=True, io=FaultyIO(direct=direct))
        try:
            extents = [space.allocate(size) for size in sizes]
            model = [bytearray(size) for size in sizes]
            zeros = [space.write(one, [torch.zeros(one.nbytes, dtype=torch.uint8)]) for one in extents]
            events, seen = list(zeros), []
            for seed, (which, where, pieces, wait) in enumerate(requests):
                extent, truth = extents[which], model[which]
                offset = int(where * extent.nbytes)
                buffers = []
                end = offset
                for number, (count, skew) in enumerate(pieces):
                    count = min(count, extent.nbytes - end)
                    buffers.append(memory(count, skew, seed * 8 + number))
                    end += count
                events.append(space.write(extent, buffers, offset))
                truth[offset:end] = b"".join(bytes(one.tolist()) for one in buffers)
                back = [memory(len(one), skew) for one, (_, skew) in zip(buffers, pieces, strict=True)]
                events.append(space.read(extent, back, offset))
                seen.append((bytes(truth[offset:end]), back))
                if wait:
                    events[-1].wait()
            whole = [memory(extent.nbytes, 0) for extent in extents]
            events += [space.read(extent, [one]) for extent, one in zip(extents, whole, strict=True)]
            for event in events:
                event.wait()
            for expected, back in seen:
                assert b"".join(bytes(one.tolist()) for one in back) == expected
            for truth, one in zip(model, whole, strict=True):
                assert bytes(one.tolist()) == bytes(truth)
        finally:
            space.close()
        assert all(not stored(path) for path in paths)


@pytest.mark.parametrize("folders", [1, 2, 3])
def test_large_requests_use_every_folder(folder: Path, folders: int) -> None:
    paths = [folder / str(place) for place in range(folders)]
    for path in paths:
        path.mkdir()
    io = FaultyIO()
    space = DiskSpace(paths, 8 * STRIPE + 3 * BLOCK, io=io)
    space.allocate(5 * BLOCK)
    extent = space.allocate(8 * STRIPE - 5 * BLOCK + 17)
    data, back = memory(extent.nbytes, 0, 1), memory(extent.nbytes, 64)
    io.calls.clear()
    space.write(extent, [data[: 3 * MIB], data[3 * MIB :]]).wait()
    space.read(extent, [back]).wait()
    assert torch.equal(data, back)
    written = [count for link, _, count in io.calls if link == WRITE]
    assert len(written) == folders and max(written) - min(written) <= 2 * STRIPE
    assert sum(os.path.getsize(file) for file in space.files) == 8 * STRIPE + 3 * BLOCK
    space.close()


def test_a_block_written_in_part_keeps_the_rest(folder: Path) -> None:
    space = DiskSpace([folder], 4 * BLOCK)
    first, second = space.allocate(2 * BLOCK - 100), space.allocate(BLOCK)
    data, more = memory(first.nbytes, 0, 1), memory(50, 3, 2)
    space.write(second, [memory(BLOCK, 0, 3)])
    space.write(first, [data])
    space.write(first, [more], offset=BLOCK - 20).wait()
    space.write(first, [more], offset=10).wait()
    data[BLOCK - 20 : BLOCK + 30] = more
    data[10:60] = more
    back, other = memory(first.nbytes, 0), memory(BLOCK, 0)
    space.read(first, [back]).wait()
    space.read(second, [other]).wait()
    assert torch.equal(back, data) and torch.equal(other, memory(BLOCK, 0, 3))
    space.close()


# -- extents ------------------------------------------------------------------------------------------


def test_extents_tile_the_space(folder: Path) -> None:
    space = DiskSpace([folder], 10 * BLOCK + 5)
    assert (space.size, space.room, space.held) == (10 * BLOCK, 10 * BLOCK, 0)
    one, two, three = (space.allocate(n) for n in (1, BLOCK, 2 * BLOCK + 1))
    assert [e.start for e in (one, two, three)] == [0, BLOCK, 2 * BLOCK]
    assert space.held == 5 * BLOCK
    space.free(one)
    space.free(three)
    with pytest.raises(BudgetError, match=r"the largest piece 32.0 KiB.*short by 4.00 KiB") as caught:
        space.allocate(9 * BLOCK)
    assert (caught.value.tier, caught.value.short) == ("ssd", BLOCK)
    with pytest.raises(BudgetError, match=r"short by 4.00 KiB.*; raise ssd.memory") as caught:
        space.allocate(10 * BLOCK)
    space.check()
    space.free(two)
    whole = space.allocate(10 * BLOCK)
    assert space.room == 0
    space.check()
    for stale in (one, two, Extent(0, 10 * BLOCK)):
        with pytest.raises(StateError, match="not allocated"):
            space.free(stale)
        with pytest.raises(StateError, match="not allocated"):
            space.read(stale, [memory(1)])
    space.free(whole)
    space.check()
    space.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_the_books_hold(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(64 * BLOCK)
    held: list[Extent] = []
    for take, number in steps:
        if take:
            try:
                held.append(extents.allocate(number * 700 + 1))
            except BudgetError as error:
                assert error.short > 0
        elif held:
            extents.free(held.pop(number % len(held)))
        extents.check()
    for one in held:
        extents.free(one)
    assert extents.allocate(64 * BLOCK).start == 0


def test_wrong_requests_are_refused(folder: Path) -> None:
    space = DiskSpace([folder], 4 * BLOCK)
    extent = space.allocate(100)
    for buffers, offset, message in (
        ([memory(101)], 0, r"within Extent\(start=0, nbytes=100\), found 0 to 101"),
        ([memory(1)], -1, "found -1 to 0"),
        ([torch.zeros(4)], 0, "flat uint8 tensors in host memory, found torch.float32"),
        ([memory(8).view(2, 4)], 0, r"of shape \(2, 4\)"),
        ([memory(8)[::2]], 0, "flat uint8"),
    ):
        with pytest.raises(StateError, match=message):
            space.write(extent, buffers, offset)
    space.write(extent, []).wait()
    assert space.read(extent, [memory(0)]).done()
    space.close()


# -- queues -------------------------------------------------------------------------------------------


def test_neighbours_become_one_call(folder: Path) -> None:
    io = FaultyIO()
    space = DiskSpace([folder], 64 * MIB, io=io)
    extents = [space.allocate(MIB) for _ in range(48)]
    data = [memory(MIB, 0, seed) for seed in range(48)]
    for start, buffers in ((space.write, data), (space.read, [memory(MIB) for _ in data])):
        io.close_gate()
        events = [start(extents[0], [buffers[0]])]
        io.at_gate(1)
        events += [start(e, [b]) for e, b in zip(extents[1:], buffers[1:], strict=True)]
        io.calls.clear()
        io.gate.set()
        for event in events:
            event.wait()
        assert [count // MIB for _, _, count in io.calls] == [1, 32, 15]
    assert all(torch.equal(a, b) for a, b in zip(data, buffers, strict=True))
    space.close()


def test_what_is_apart_is_not_merged(folder: Path) -> None:
    io = FaultyIO()
    space = DiskSpace([folder], 64 * BLOCK, io=io)
    extents = [space.allocate(BLOCK) for _ in range(8)]
    io.close_gate()
    events = [space.write(one, [memory(BLOCK, 0, 1)]) for one in extents[::2]]
    io.calls.clear()
    io.gate.set()
    for event in events:
        event.wait()
    assert [offset for _, offset, _ in io.calls] == [one.start for one in extents[::2]]
    space.close()


def test_reads_and_writes_overlap(folder: Path) -> None:
    """A write that stands still does not hold a read of other bytes; one of the same bytes waits for it."""
    first = threading.Event()

    def stand_still(link: str, *_: Any) -> None:
        if link == WRITE:
            assert first.wait(20)

    io = FaultyIO(stand_still, direct=False)
    space = DiskSpace([folder], 64 * BLOCK, io=io)
    one, two = space.allocate(BLOCK), space.allocate(BLOCK)
    data, back = memory(BLOCK, 0, 1), memory(BLOCK, 0)
    write = space.write(one, [data])
    space.read(two, [memory(BLOCK)]).wait()
    again = space.read(one, [back])
    time.sleep(0.02)
    assert not write.done() and not again.done()
    with pytest.raises(StateError, match="requests are under way"):
        space.free(one)
    first.set()
    again.wait()
    assert torch.equal(back, data)
    space.free(one)
    space.close()


def test_a_request_that_must_wait_is_not_merged(folder: Path) -> None:
    """The second read lies right behind the first, but a write that overlaps both stands between them."""
    io = FaultyIO()
    space = DiskSpace([folder], MIB, io=io)
    extent, other = space.allocate(3 * BLOCK), space.allocate(BLOCK)
    old, new = memory(3 * BLOCK, 0, 1), memory(2 * BLOCK, 0, 2)
    space.write(extent, [old]).wait()
    io.close_gate()
    space.read(other, [memory(BLOCK)])
    io.at_gate(1)
    first, second = memory(2 * BLOCK), memory(BLOCK)
    space.read(extent, [first])
    space.write(extent, [new], offset=BLOCK)
    space.read(extent, [second], offset=2 * BLOCK)
    io.gate.set()
    space.synchronize()
    assert torch.equal(first, old[: 2 * BLOCK]) and torch.equal(second, new[BLOCK:])
    space.close()


def test_memory_is_let_go_before_the_event(folder: Path) -> None:
    space = DiskSpace([folder], 16 * MIB)
    extent = space.allocate(8 * MIB)
    data = memory(8 * MIB, 0, 1)
    before = uses(data)
    for _ in range(30):
        for start in (space.write, space.read):
            event = start(extent, [data[: 2 * MIB], data[2 * MIB :]])
            while not event.done():
                pass
            assert uses(data) == before
    space.close()


def test_memory_is_let_go_after_an_error(folder: Path) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    io = FaultyIO()
    space = DiskSpace([folder], MIB, io=io)
    extent, data = space.allocate(BLOCK), memory(BLOCK)
    before = uses(data)
    io.on_call = fail
    event = space.write(extent, [data[:]])

    def waits() -> None:
        # The event must not hold the frames of those who asked it, nor what is in them.
        kept = data[:]
        event.wait()
        del kept

    for _ in range(2):
        try:
            waits()
        except DiskError:
            continue
        raise AssertionError("expected an error each time")
    assert uses(data) == before
    space.close()


def test_rates_imitate_a_slow_disk_and_traffic_is_counted(folder: Path) -> None:
    space = DiskSpace([folder], 4 * MIB, rates={WRITE: 20e6})
    extent = space.allocate(2 * MIB)
    start = time.perf_counter()
    space.write(extent, [memory(2 * MIB, 0, 1)]).wait()
    assert time.perf_counter() - start > 0.1
    space.read(extent, [memory(2 * MIB)]).wait()
    traffic = space.traffic
    assert traffic.moved == {READ: 2 * MIB, WRITE: 2 * MIB}
    assert traffic.calls == {READ: 1, WRITE: 1}
    assert traffic.waited[WRITE] > 0.1 and traffic.busy[WRITE] > 0
    space.close()
