"""A rank's file of a checkpoint: written past the page cache, through buffers in turn or from where the bytes lie; or
later, from a copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ebbtide.devices.cpu_device import Stream
from ebbtide.devices.device import Event, wait_for_all
from ebbtide.devices.pool import map_memory
from ebbtide.memory.budget import SNAPSHOT, Ledger
from ebbtide.memory.disk.data_files import NO_FALLOCATE, SystemIO
from ebbtide.memory.disk.extents import BLOCK
from ebbtide.memory.disk.vectors import view
from ebbtide.units import round_up

_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
WRITERS = 2
"""One write is under way while the next is asked for."""
BUFFERS, LOANS = 3, 6
"""That are full, or lent, at once: enough that the disk has one more when it ends one."""
PIECE = 32 << 20
"""Bytes that are written at once, and checked at once: enough for any disk's full rate."""


class File:
    """Opened for direct transfers where the file system has them."""

    def __init__(self, path: Path, flags: int, io: SystemIO) -> None:
        self._io = io
        try:
            self.number = io.open(str(path), flags | _DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self.number = io.open(str(path), flags)

    def allocate(self, nbytes: int) -> None:
        """What does not fit is found now; and blocks that a file has already are written faster. Where a file system
        cannot, what does not fit is found in writing."""
        try:
            self._io.fallocate(self.number, nbytes)
        except OSError as error:
            if error.errno not in NO_FALLOCATE:
                raise

    def write(self, memory: Sequence[torch.Tensor], offset: int) -> None:
        """All of it, one after the other."""
        total, done = sum(one.numel() for one in memory), 0
        while done < total:
            done += self._move(self._io.pwritev, memory, done, offset)

    def read(self, memory: torch.Tensor, offset: int) -> int:
        """How many bytes there were."""
        done = 0
        while done < memory.numel():
            count = self._move(self._io.preadv, [memory], done, offset)
            if not count:
                break
            done += count
        return done

    def _move(
        self, act: Callable[[int, Any, int], int], memory: Sequence[torch.Tensor], done: int, offset: int
    ) -> int:
        parts, skip = [], done
        for one in memory:
            if skip < one.numel():
                parts.append(view(one.data_ptr() + skip, one.numel() - skip))
            skip = max(0, skip - one.numel())
        try:
            return act(self.number, parts, offset + done)
        except OSError as error:
            # Some file systems take the flag and refuse the transfers; a short one leaves the rest off the blocks.
            if error.errno not in _NO_DIRECT:
                raise
            flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
            fcntl.fcntl(self.number, fcntl.F_SETFL, flags & ~_DIRECT)  # another thread may have done it since
            return act(self.number, parts, offset + done)

    def end(self, length: int) -> None:
        """It has this length, and is on the disk."""
        os.ftruncate(self.number, length)
        os.fsync(self.number)

    def close(self) -> None:
        self._io.close(self.number)


class FileCopy(NamedTuple):
    """Memory for a piece, and where in the file it will be."""

    memory: torch.Tensor
    offset: int


class Snapshot:
    """What is copied now and written later: the first bytes of a rank's file, as many as there is room for."""

    def __init__(self, ledger: Ledger, tier: str) -> None:
        """`tier`: where its room is taken, of what nothing has needed so far."""
        self._ledger, self._tier = ledger, tier
        self.nbytes = self._length = 0
        self._memory: torch.Tensor | None = None
        self._file: File | None = None

    def take(self, sizes: Sequence[int]) -> list[FileCopy]:
        """Room for the first of these pieces; none for the others."""
        places: list[tuple[int, int]] = []
        room, taken = min(self._ledger.spare(self._tier), self._ledger.room(self._tier)), 0
        for size in sizes:
            if taken + round_up(size, BLOCK) > room:
                break
            places.append((taken, size))
            taken += round_up(size, BLOCK)
        if taken:
            # Now: while the rest is written, others may want it.
            self._ledger.reserve(self._tier, SNAPSHOT, taken)
        self.nbytes = taken
        memory = self._memory = map_memory(max(self.nbytes, BLOCK))
        return [FileCopy(memory[at : at + size], at) for at, size in places]

    def own(self, file: File, length: int) -> None:
        """The file in which the rest is already."""
        self._file, self._length = file, length

    def write(self) -> None:
        assert self._file is not None and self._memory is not None
        try:
            for first in range(0, self.nbytes, PIECE):
                self._file.write([self._memory[first : min(first + PIECE, self.nbytes)]], first)
            self._file.end(self._length)
        finally:
            self.close()

    def release(self) -> None:
        """Gives its room back, after `close`. The ledger is the computation's: not on the thread that writes."""
        nbytes, self.nbytes = self.nbytes, 0
        self._ledger.release(self._tier, SNAPSHOT, nbytes)

    def close(self) -> None:
        file, self._file, self._memory = self._file, None, None
        if file is not None:
            file.close()


class Queue:
    """A file's bytes, one after the other: through buffers, where small pieces share one and are written together; or
    from where they lie."""

    def __init__(self, file: File, offset: int) -> None:
        self._file = file
        self._streams = [Stream(f"ebbtide-checkpoint-{number}") for number in range(WRITERS)]
        self._buffers = [map_memory(PIECE + BLOCK) for _ in range(BUFFERS)]
        self._edges = [map_memory(2 * BLOCK) for _ in range(LOANS)]
        self._under_way: list[Event | None] = [None] * BUFFERS
        self._lent: list[Event | None] = [None] * LOANS
        self._turn = self._lend_turn = 0
        self._used, self._offset = 0, offset

    @property
    def length(self) -> int:
        """Of the file, when all of it is on its way."""
        return self._offset

    def take(self, count: int) -> tuple[torch.Tensor, int]:
        """Memory for the next bytes, and where in the file they will be. It is full when the next is asked for."""
        if self._used and self._used + count > self._buffers[self._turn].numel():
            self._flush()
        if count > self._buffers[self._turn].numel():
            self._buffers[self._turn] = map_memory(count)
        start, self._used = self._used, self._used + count
        return self._buffers[self._turn][start : self._used], self._offset + start

    def lend(self, memory: torch.Tensor) -> int:
        """The next bytes lie in memory, and stay there; where in the file they will be. Their place agrees with their
        address, so that all but the first and the last block is written from there."""
        self._flush()
        assert memory.numel() >= 2 * BLOCK
        turn = self._lend_turn
        if (event := self._lent[turn]) is not None:
            event.wait()
        ahead = memory.data_ptr() % BLOCK
        place, end = self._offset + ahead, ahead + memory.numel()
        head = -ahead % BLOCK
        straight = (memory.numel() - head) // BLOCK * BLOCK
        first, last = self._edges[turn].zero_().view(2, BLOCK)
        first[ahead : ahead + head] = memory[:head]
        last[: end % BLOCK] = memory[head + straight :]
        parts = [memory[head : head + straight]]
        parts = [*([first] if head else []), *parts, *([last] if end % BLOCK else [])]
        self._lent[turn] = self._send(parts)
        self._lend_turn = (turn + 1) % LOANS
        return place

    def _flush(self) -> None:
        """Sends what is in the buffer on its way, and waits until the next one may be filled."""
        if not self._used:
            return
        self._under_way[self._turn] = self._send([self._buffers[self._turn][: self._used]])
        self._used = 0
        self._turn = (self._turn + 1) % BUFFERS
        if (event := self._under_way[self._turn]) is not None:
            event.wait()

    def _send(self, memory: list[torch.Tensor]) -> Event:
        self._streams.append(self._streams.pop(0))
        event = self._streams[0].submit(partial(self._file.write, memory, self._offset))
        self._offset += sum(one.numel() for one in memory)
        return event

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
            under_way = [event for event in (*self._under_way, *self._lent) if event is not None]
            failed = wait_for_all(under_way)
        finally:
            for stream in self._streams:
                stream.close()
        if kind is None and failed is not None:
            raise failed
