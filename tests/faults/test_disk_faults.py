"""The SSD tier when the system fails it: who is told what, and that all else goes on."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disks import MIB, FaultyIO, memory, stored
from ebbtide.errors import DiskError, IntegrityError, StateError
from ebbtide.memory.disk.space import BLOCK, READ, WRITE, DiskSpace


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
    flip(space.files[0], extent.start + 3 * BLOCK)
    back = memory(4 * BLOCK)
    space.read(extent, [back[: 3 * BLOCK]]).wait()
    # Whatever is read of what was written at once, be it a few bytes of a block.
    for begin, count in ((0, 4 * BLOCK), (2 * BLOCK, 2 * BLOCK), (3 * BLOCK, BLOCK), (3 * BLOCK + 9, 1)):
        with pytest.raises(IntegrityError, match=r"bytes 12288 to 16384 .*\(4096 bytes\)") as caught:
            space.read(extent, [back[:count]], offset=begin).wait()
        assert space.files[0] in str(caught.value)
    space.write(extent, [data[:BLOCK]], offset=3 * BLOCK).wait()
    space.read(extent, [back]).wait()
    space.free(extent)
    again = space.allocate(4 * BLOCK)
    space.read(again, [back]).wait()
    space.close()


def test_checksums_of_blocks_that_were_written_in_part(folder: Path) -> None:
    """Of such a block what was written last is compared."""
    space = DiskSpace([folder], MIB, checksums=True)
    extent = space.allocate(3 * BLOCK - 100)
    space.write(extent, [memory(extent.nbytes, 0, 1)]).wait()
    space.write(extent, [memory(700, 3, 2), memory(BLOCK - 680, 5, 3)], offset=BLOCK - 20).wait()
    back = memory(extent.nbytes)
    for at, covered in ((BLOCK - 30, False), (BLOCK - 10, True), (BLOCK + 5, True), (3 * BLOCK - 101, True)):
        flip(space.files[0], extent.start + at)
        if covered:
            with pytest.raises(IntegrityError, match="came back changed"):
                space.read(extent, [back]).wait()
        else:
            space.read(extent, [back]).wait()
        flip(space.files[0], extent.start + at)
    space.read(extent, [back]).wait()
    space.close()


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


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


def test_a_close_that_is_interrupted_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = DiskSpace([folder], MIB)
    extent = space.allocate(BLOCK)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ebbtide.memory.disk.lanes.Lane.join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            space.close()
    with pytest.raises(StateError, match="the space is closed"):
        space.write(extent, [memory(BLOCK)])
    assert len(stored(folder)) == 2
    space.close()
    assert stored(folder) == []
