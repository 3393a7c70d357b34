"""The SSD tier: what is written comes back, whatever the memory, the folders and the system's moods."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.errors import BudgetError, ConfigError, DiskError, EbbtideError, IntegrityError, StateError
from ebbtide.memory import disk, lanes, vectors
from ebbtide.memory.disk import BLOCK, READ, STRIPE, WRITE, DiskSpace, Extent, SystemIO
from ebbtide.memory.files import LOCK

MIB = 1 << 20


def memory(count: int, skew: int = 0, seed: int | None = None) -> torch.Tensor:
    """Bytes whose address is `skew` past a block."""
    whole = torch.empty(count + 2 * BLOCK, dtype=torch.uint8)
    first = -whole.data_ptr() % BLOCK + skew
    flat = whole[first : first + count]
    if seed is not None:
        flat.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return flat


def uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class FaultyIO(SystemIO):
    """The system, with `on_call(link, file, buffers, offset)` before each transfer: raises, or says how many bytes
    are moved; None leaves it alone. Transfers wait while `gate` is closed. Whether files are direct can be said."""

    def __init__(self, on_call: Callable[..., int | None] | None = None, direct: bool | None = None) -> None:
        self.on_call = on_call
        self.calls: list[tuple[str, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._direct = direct
        self._here = threading.Condition()
        self._arrived = 0

    def close_gate(self) -> None:
        self.gate.clear()
        self._arrived = 0

    def at_gate(self, count: int) -> None:
        """Waits until so many transfers stand there."""
        with self._here:
            assert self._here.wait_for(lambda: self._arrived == count, 20)

    def open(self, path: str, flags: int) -> int:
        if self._direct is False and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return super().open(path, flags)

    def preadv(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return self._move(READ, os.preadv, file, buffers, offset)

    def pwritev(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return self._move(WRITE, os.pwritev, file, buffers, offset)

    def _move(self, link: str, move: Any, file: int, buffers: Sequence[Any], offset: int) -> int:
        with self._here:
            self._arrived += 1
            self._here.notify_all()
        assert self.gate.wait(20)
        self.calls.append((link, offset, sum(len(one) for one in buffers)))
        count = self.on_call(link, file, buffers, offset) if self.on_call else None
        if count is None:
            return int(move(file, buffers, offset))
        short = []
        for one in buffers:
            short.append(one[:count])
            count -= len(short[-1])
        return int(move(file, [one for one in short if len(one)], offset)) if sum(map(len, short)) else 0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no direct access")
        yield tmp_path


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
        patch.setattr(disk, "STRIPE", 2 * BLOCK)
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
    extents = disk.Extents(64 * BLOCK)
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


# -- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [None, False])
def test_short_counts_are_continued(folder: Path, direct: bool | None) -> None:
    interrupted = set()

    def short(link: str, file: int, buffers: Sequence[Any], offset: int) -> int | None:
        total = sum(len(one) for one in buffers)
        if (link, offset) not in interrupted:
            interrupted.add((link, offset))
            raise InterruptedError
        return max(BLOCK, total // 3 // 512 * 512) if direct is None else max(1, total // 3)

    io = FaultyIO(direct=direct)
    space = DiskSpace([folder], MIB, io=io)
    extent = space.allocate(100_001)
    data, back = memory(extent.nbytes, 0, 1), memory(extent.nbytes, 64)
    io.on_call = short
    io.calls.clear()
    space.write(extent, [data[:40_000], data[40_000:]]).wait()
    space.read(extent, [back]).wait()
    assert torch.equal(data, back)
    assert len(io.calls) > 6
    space.close()


def test_a_transfer_that_makes_no_way_ends(folder: Path) -> None:
    io = FaultyIO()
    space = DiskSpace([folder], MIB, io=io)
    extent = space.allocate(2 * BLOCK)
    for count in (0, 512):
        io.on_call = lambda *_, count=count: count
        if count and not space.direct:
            continue
        with pytest.raises(
            DiskError, match=rf"reading at offset 0: expected {2 * BLOCK} bytes, found {count}"
        ):
            space.read(extent, [memory(2 * BLOCK)]).wait()
    space.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 8])
def test_a_failed_call_disturbs_nobody_else(folder: Path, fail_at: int, code: int) -> None:
    """Eight writes wait and merge; one place of the file fails for good, and one call fails once."""
    io = FaultyIO()
    space = DiskSpace([folder], MIB, io=io)
    extents = [space.allocate(BLOCK) for _ in range(9)]
    bad = extents[fail_at - 1]

    def fail(link: str, file: int, buffers: Sequence[Any], offset: int) -> None:
        if link == WRITE and offset <= bad.start < offset + sum(len(one) for one in buffers):
            raise OSError(code, os.strerror(code))

    io.close_gate()
    io.on_call = fail
    data = [memory(BLOCK, 0, seed) for seed in range(9)]
    events = [space.write(e, [d]) for e, d in zip(extents, data, strict=True)]
    io.gate.set()
    for event, extent in zip(events, extents, strict=True):
        for _ in range(2):
            if extent is not bad:
                event.wait()
                continue
            with pytest.raises(
                DiskError, match=f"writing at offset {bad.start}.*{os.strerror(code)}"
            ) as caught:
                event.wait()
            assert isinstance(caught.value.__cause__, OSError)
            assert (caught.value.file, caught.value.offset) == (space.files[0], bad.start)
            assert (caught.value.expected, caught.value.found) == (BLOCK, 0)
    io.on_call = None
    space.write(bad, [data[fail_at - 1]]).wait()
    for extent, one in zip(extents, data, strict=True):
        back = memory(BLOCK)
        space.read(extent, [back]).wait()
        assert torch.equal(back, one)
        space.free(extent)
    space.check()
    space.close()


def test_any_error_ends_a_request_and_no_thread(folder: Path) -> None:
    io = FaultyIO()
    space = DiskSpace([folder], MIB, io=io, checksums=True)
    extent = space.allocate(BLOCK)

    def fail(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    io.on_call = fail
    for start in (space.read, space.write):
        with pytest.raises(RuntimeError, match="unforeseen"):
            start(extent, [memory(BLOCK)]).wait()
    io.on_call = None
    space.read(extent, [memory(BLOCK)]).wait()
    space.close()


def test_a_file_that_was_cut(folder: Path) -> None:
    space = DiskSpace([folder], MIB)
    extent = space.allocate(MIB)
    space.write(extent, [memory(MIB, 0, 1)]).wait()
    os.truncate(space.files[0], 10_000)
    for start in (space.read, space.write):
        with pytest.raises(DiskError, match=r"expected a file of 1048576 bytes, found 10000") as caught:
            start(extent, [memory(MIB)]).wait()
        assert space.files[0] in str(caught.value)
    space.close()


def test_checksums_find_what_was_changed(folder: Path) -> None:
    space = DiskSpace([folder], MIB, checksums=True)
    first, extent = space.allocate(BLOCK), space.allocate(4 * BLOCK)
    space.write(first, [memory(BLOCK, 0, 5)])
    data = memory(4 * BLOCK, 0, 1)
    space.write(extent, [data[: 2 * BLOCK]]).wait()
    space.write(extent, [data[2 * BLOCK :]], offset=2 * BLOCK).wait()
    with open(space.files[0], "r+b") as file:
        file.seek(extent.start + 3 * BLOCK)
        byte = file.read(1)
        file.seek(extent.start + 3 * BLOCK)
        file.write(bytes([byte[0] ^ 1]))
    back = memory(4 * BLOCK)
    space.read(extent, [back[: 2 * BLOCK]]).wait()
    for offset in (0, 2 * BLOCK):
        with pytest.raises(IntegrityError, match=r"bytes 8192 to 16384 .*\(8192 bytes\)") as caught:
            space.read(extent, [back[offset:]], offset=offset).wait()
        assert space.files[0] in str(caught.value)
    space.read(extent, [back[:BLOCK]], offset=3 * BLOCK).wait()  # no whole write: nothing to compare with
    space.write(extent, [data[:BLOCK]], offset=3 * BLOCK).wait()  # forgets the write that it covers in part
    space.read(extent, [back]).wait()
    space.free(extent)
    again = space.allocate(4 * BLOCK)
    space.read(again, [back]).wait()
    space.close()


# -- folders ------------------------------------------------------------------------------------------


def test_no_space_is_found_at_once(folder: Path) -> None:
    class Full(SystemIO):
        code = errno.ENOSPC

        def fallocate(self, file: int, size: int) -> None:
            raise OSError(self.code, os.strerror(self.code))

        def free(self, folder: str) -> int:
            return 3 * BLOCK

    with pytest.raises(
        BudgetError, match=r"16384 bytes.*No space left.*short by 4.00 KiB; lower ssd"
    ) as caught:
        DiskSpace([folder], 4 * BLOCK, io=Full())
    assert (caught.value.tier, caught.value.short) == ("ssd", BLOCK)
    assert str(folder) in str(caught.value)
    Full.code = errno.EDQUOT
    with pytest.raises(BudgetError, match="less by the quota"):
        DiskSpace([folder], 4 * BLOCK, io=Full())
    Full.code = errno.EFBIG
    with pytest.raises(DiskError, match="File too large; name a folder on another"):
        DiskSpace([folder], 4 * BLOCK, io=Full())
    assert stored(folder) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("name", [LOCK, ".data"])
def test_a_folder_that_cannot_be_written_to(folder: Path, code: int, name: str) -> None:
    class Refusing(SystemIO):
        def open(self, path: str, flags: int) -> int:
            if path.endswith(name):
                raise OSError(code, os.strerror(code))
            return super().open(path, flags)

    with pytest.raises(
        ConfigError, match=f"can be written to, found '{folder}' .*{os.strerror(code)}.*change its"
    ):
        DiskSpace([folder], BLOCK, io=Refusing())
    assert stored(folder) == []


def test_wrong_folders(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "other").mkdir()
    for folders, size, message in (
        ([], BLOCK, "expected a folder, found none"),
        ([folder / "missing"], BLOCK, "expected a folder, found nothing at '.*missing'; create it"),
        ([folder / "file"], BLOCK, "expected a folder, found a file at '.*file'"),
        ([folder, folder / "other" / ".."], BLOCK, "is named twice"),
        ([folder, folder / "missing"], BLOCK, "found nothing"),
        ([folder], BLOCK - 1, "ssd.memory: expected at least 4096 bytes, found 4095"),
    ):
        with pytest.raises(ConfigError, match=message):
            DiskSpace(folders, size)
        assert stored(folder) == ["file", "other"]


def test_without_direct_access_there_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    class Late(SystemIO):
        """Takes the flag and refuses the transfers."""

        def pwritev(self, file: int, buffers: Sequence[Any], offset: int) -> int:
            import fcntl

            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().pwritev(file, buffers, offset)

    for io in (FaultyIO(direct=False), Late()):
        with pytest.warns(UserWarning, match=r"no direct access .*page cache") as caught:
            space = DiskSpace([tmp_path / "a", tmp_path / "b"], 3 * MIB, io=io)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert not space.direct
        extent, data, back = space.allocate(2 * MIB), memory(2 * MIB, 0, 1), memory(2 * MIB, 3)
        space.write(extent, [data]).wait()
        space.read(extent, [back]).wait()
        assert torch.equal(data, back)
        space.close()


def run(code: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    text = (
        "import os, signal, sys, time, torch, warnings\nwarnings.simplefilter('ignore')\n"
        f"from ebbtide.memory.disk import DiskSpace\nfolder = {str(folder)!r}\n{code}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )


def test_a_folder_in_use_is_refused(folder: Path) -> None:
    space = DiskSpace([folder], MIB)
    with pytest.raises(ConfigError, match=f"'{folder}' is in use by process {os.getpid()}, started 20"):
        DiskSpace([folder], MIB)
    assert len(stored(folder)) == 2
    space.close()
    DiskSpace([folder], MIB).close()


def test_a_lock_that_was_removed_meanwhile_is_none(folder: Path) -> None:
    """Its owner may end between our opening the file and locking it: the name is then somebody else's to take."""

    class Racing(SystemIO):
        raced = False

        def open(self, path: str, flags: int) -> int:
            number = super().open(path, flags)
            if path.endswith(LOCK) and not self.raced:
                self.raced = True
                os.unlink(path)
            return number

    space = DiskSpace([folder], MIB, io=Racing())
    with pytest.raises(ConfigError, match="is in use"):
        DiskSpace([folder], MIB)
    space.close()


def test_another_process_is_refused_and_leaves_nothing(folder: Path) -> None:
    """Normal ends: an exit with the space open, and a space that is let go."""
    holder = run("space = DiskSpace([folder], 1 << 20)\nprint('open', flush=True)\ninput()", folder)
    assert holder.stdout and holder.stdout.readline() == "open\n"
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}, started"):
        DiskSpace([folder], MIB)
    holder.communicate("\n")
    assert holder.returncode == 0 and stored(folder) == []
    space = DiskSpace([folder], MIB)
    del space
    assert stored(folder) == []


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    foreign = ["ebbtide-1-0123456789ab.data.bak", "ebbtide-x-0123456789ab.data", "notes.data"]
    for name in foreign:
        (folder / name).write_text("mine")
    (folder / "ebbtide-1-00000000000a.data").mkdir()
    (folder / "ebbtide-1-00000000000b.data").symlink_to(folder / "notes.data")
    before = stored(folder)
    holder = run(
        "space = DiskSpace([folder], 1 << 20)\nprint('open', flush=True)\n"
        "if os.fork() == 0: time.sleep(30)\ntime.sleep(30)",
        folder,
        start_new_session=True,
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "open\n"
        time.sleep(0.1)
        # The child lives on, and must not keep the folder.
        holder.kill()
        holder.wait()
        assert len(stored(folder)) == len(before) + 2
        space = DiskSpace([folder], MIB)
        assert space.removed == 1
        space.close()
        assert stored(folder) == before
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_forked_child_leaves_the_files_alone(folder: Path) -> None:
    holder = run(
        "space = DiskSpace([folder], 1 << 20)\nextent = space.allocate(4096)\n"
        "data = torch.full((4096,), 7, dtype=torch.uint8)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: space.read(extent, [data])\n"
        "    except Exception as error: print(type(error).__name__, flush=True)\n"
        "    space.close()\n    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(len(os.listdir(folder)), flush=True)\n"
        "space.write(extent, [data]).wait()\nspace.read(extent, [data]).wait()\nspace.close()\n"
        "print(len(os.listdir(folder)), flush=True)",
        folder,
    )
    found, _ = holder.communicate()
    assert holder.returncode == 0 and found.split() == ["StateError", "2", "0"]


def test_close_with_requests_under_way(folder: Path) -> None:
    """What runs ends, what waits fails, nobody hangs; and once is as good as twice."""
    io = FaultyIO()
    space = DiskSpace([folder], MIB, io=io)
    extents = [space.allocate(BLOCK) for _ in range(6)]
    io.calls.clear()
    io.close_gate()
    events = [space.write(one, [memory(BLOCK, 0, 1)]) for one in extents[::2]]
    again = space.read(extents[0], [memory(BLOCK)])
    io.at_gate(1)
    closer = threading.Thread(target=space.close)
    closer.start()
    time.sleep(0.02)
    assert closer.is_alive() and len(stored(folder)) == 2
    io.gate.set()
    closer.join(20)
    events[0].wait()
    for event in (*events[1:], again):
        with pytest.raises(StateError, match="closed before"):
            event.wait()
    assert len(io.calls) == 1 and stored(folder) == []
    space.close()
    space.free(extents[0])
    late: list[BaseException | None] = []
    # One that slips in while the space is closed has nobody to serve it.
    space._lanes[0][READ].submit(SimpleNamespace(request=SimpleNamespace(end_part=late.append)))  # type: ignore[arg-type]
    assert isinstance(late[0], StateError)
    for call in (lambda: space.allocate(1), lambda: space.read(extents[0], [memory(1)])):
        with pytest.raises(StateError, match="the space is closed"):
            call()


def test_errors_are_ours() -> None:
    assert issubclass(DiskError, EbbtideError)
    assert lanes.MERGE <= vectors.MAX_CALL
