"""The SSD tier: extents in preallocated files, one file in each folder, read and written beside the computation.

A space is striped over its folders, so every disk takes part in every larger request. Reads and writes have threads
of their own and overlap; see `lanes` for their order.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from ebbtide.devices.device import Event
from ebbtide.devices.pool import map_memory
from ebbtide.errors import ConfigError, StateError, warn_user
from ebbtide.memory.disk.checksums import Checksums, whole_blocks
from ebbtide.memory.disk.data_files import DataFile, Folder, SystemIO
from ebbtide.memory.disk.extents import BLOCK, Extent, Extents
from ebbtide.memory.disk.lanes import READ, WRITE, DiskEvent, DiskJob, DiskTraffic, Lane, Request
from ebbtide.memory.disk.vectors import ByteSpan, Memory, view
from ebbtide.units import round_up

__all__ = ["BLOCK", "READ", "STRIPE", "WRITE", "DiskSpace", "Extent", "SystemIO"]

STRIPE = 1 << 20
"""Bytes that lie in one file before the next one's turn."""


class _Books:
    """What is allocated and under way; apart from the space, so that threads do not keep the space alive."""

    def __init__(self, size: int, checksums: bool) -> None:
        self.extents = Extents(size)
        self.checksums = Checksums() if checksums else None
        self._pending: dict[int, list[Request]] = {}
        """By the start of an extent."""
        # Reentrant: the collector may run a finalizer that frees on a thread that holds it.
        self.lock = threading.RLock()

    def begin(self, request: Request) -> None:
        """The caller holds the lock until the request is in its queues: their orders must agree."""
        self.extents.require(request.extent)
        pending = self._pending.get(request.extent.start, [])
        request.after = [one for one in pending if _conflict(one, request)]
        self._pending[request.extent.start] = [*pending, request]

    def knows(self, request: Request) -> bool:
        with self.lock:
            return request in self._pending.get(request.extent.start, ())

    def finish(self, request: Request, error: BaseException | None) -> BaseException | None:
        """Called once, before the request's memory is let go. What became of it."""
        extent, first, last = request.extent, request.first, request.last
        try:
            if self.checksums is not None and request.link == WRITE:
                self.checksums.distrust(extent, first, last)
                if error is None:
                    self.checksums.keep(extent, first, last, request.memory)
            elif self.checksums is not None and error is None:
                self.checksums.verify(request.where, extent, first, last, request.memory)
        except BaseException as caught:
            error = caught
        with self.lock:
            pending = self._pending[extent.start]
            pending.remove(request)
            if not pending:
                del self._pending[extent.start]
        return error

    def free(self, extent: Extent) -> None:
        with self.lock:
            self.extents.require(extent)
            if extent.start in self._pending:
                raise StateError(
                    f"ssd: {extent} is freed while requests are under way; wait for their events"
                )
            self.extents.free(extent)
            if self.checksums is not None:
                self.checksums.forget(extent)

    def under_way(self) -> list[DiskEvent]:
        with self.lock:
            return [one.event for pending in self._pending.values() for one in pending]


class DiskSpace:
    def __init__(
        self,
        folders: Sequence[str | Path],
        size: int,
        *,
        checksums: bool = False,
        threads: int = 1,
        rates: Mapping[str, float] | None = None,
        io: SystemIO | None = None,
    ) -> None:
        """`threads` for each folder and direction: one fills the disks that were measured. `rates` (bytes a second
        of each folder, by direction) imitate slow disks; `io` takes the place of the system's calls."""
        self.size = size // BLOCK * BLOCK
        if self.size <= 0:
            raise ConfigError(f"ssd.memory: expected at least {BLOCK} bytes, found {size}; raise it")
        io = io or SystemIO()
        self.traffic = DiskTraffic()
        self._books = _Books(self.size, checksums)
        self._pid = os.getpid()
        self._lanes: list[dict[str, Lane]] = []
        claimed: list[Folder] = []
        self._closed = False
        self._close = partial(_close, self._pid, self._lanes, claimed)
        self._closer = weakref.finalize(self, self._close)
        try:
            _claim(folders, claimed, io)
            files = _create(claimed, self.size, io)
            for file in files:
                self._lanes.append(
                    {k: Lane(file, k, io, self.traffic, (rates or {}).get(k), threads) for k in (READ, WRITE)}
                )
        except BaseException:
            self.close()
            raise
        self.files = tuple(file.path for file in files)
        self.direct = all(file.direct for file in files)
        self.removed = sum(folder.removed for folder in claimed)
        """Data files that owners who died had left in the folders."""

    # -- extents --------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that are not allocated, in however many pieces."""
        return self._books.extents.room

    @property
    def held(self) -> int:
        return self._books.extents.held

    def allocate(self, nbytes: int) -> Extent:
        self._require_open()
        return self._books.extents.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        """Gives an extent back; nothing may be under way in it. After `close` there is nothing to do."""
        if not self._closed:
            self._books.free(extent)

    def check(self) -> None:
        """Raises unless the books add up."""
        self._books.extents.check()

    # -- requests -------------------------------------------------------------------------------------

    def read(self, extent: Extent, buffers: Sequence[torch.Tensor], offset: int = 0) -> Event:
        """Starts to fill `buffers`, one after the other, with the extent's bytes from `offset` on."""
        return self._start(READ, extent, buffers, offset)

    def write(self, extent: Extent, buffers: Sequence[torch.Tensor], offset: int = 0) -> Event:
        """Starts to write `buffers`, which must not change before the event, to the extent from `offset` on."""
        return self._start(WRITE, extent, buffers, offset)

    def synchronize(self) -> None:
        """Waits for everything that was started, whatever became of it."""
        if os.getpid() != self._pid:
            return  # a forked child: its parent's threads did not come along
        for event in self._books.under_way():
            event.over()

    def _start(self, link: str, extent: Extent, buffers: Sequence[torch.Tensor], offset: int) -> Event:
        memory = _memory_of(buffers)
        last = offset + sum(nbytes for _, nbytes in memory)
        if offset < 0 or last > extent.nbytes:
            raise StateError(f"ssd: expected bytes within {extent}, found {offset} to {last}")
        self._require_open()
        event = DiskEvent(link, self.traffic)
        if not memory:
            event.set(None)
            return event
        if self._books.checksums is not None and link == READ:
            offset, last, buffers = whole_blocks(extent, offset, last, buffers)
            memory = _memory_of(buffers)
        spans = _stripe(extent, offset, memory, len(self._lanes))
        where = ", ".join(self.files[place] for place in spans)
        request = Request(
            link, extent, offset, last, memory, tuple(buffers), where, event, self._books.finish, len(spans)
        )
        jobs = {place: DiskJob(span, request) for place, span in spans.items()}
        with self._books.lock:
            try:
                self._books.begin(request)
                for place, job in jobs.items():
                    self._lanes[place][link].submit(job)
            except BaseException:
                self._take_back(request, jobs)
                raise
        return event

    def _take_back(self, request: Request, jobs: Mapping[int, DiskJob]) -> None:
        """Else who waits for all that is under way would wait for ever."""
        if not self._books.knows(request):
            return
        for place, job in jobs.items():
            if self._lanes[place][request.link].take_back(job):
                request.end_part(
                    StateError(f"ssd: a request was interrupted before it began ({request.where})")
                )

    # -- the end --------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"ssd: opened by process {self._pid}, used by process {os.getpid()}: a forked child opens a space of "
                "its own, in another folder"
            )
        if self._closed:
            raise StateError("ssd: the space is closed; open a new one")

    def close(self) -> None:
        """Removes the files. Requests that have not started fail; those that have end first. What was interrupted can
        be called again, or is done when the process ends."""
        self._closed = True
        self._close()
        self._closer.detach()


def _close(pid: int, lanes: list[dict[str, Lane]], folders: list[Folder]) -> None:
    if os.getpid() != pid:
        return  # a forked child: the files are its parent's
    every = [lane for pair in lanes for lane in pair.values()]
    for lane in every:
        lane.close()
    for lane in every:
        lane.join()
    for folder in folders:
        folder.close()


def _claim(folders: Sequence[str | Path], claimed: list[Folder], io: SystemIO) -> None:
    if isinstance(folders, str | Path):
        folders = [folders]
    if not folders:
        raise ConfigError("ssd.folder: expected a folder, found none; name one on each disk")
    for folder in folders:
        path = Path(folder)
        if any(path.is_dir() and path.samefile(other.path) for other in claimed):
            raise ConfigError(f"ssd.folder: '{path}' is named twice; name each folder once, one on each disk")
        claimed.append(Folder(path, io))


def _create(folders: list[Folder], size: int, io: SystemIO) -> list[DataFile]:
    block = map_memory(BLOCK)
    probe = [view(block.data_ptr(), BLOCK)]
    shares = _shares(size, len(folders))
    files = [folder.create(share, probe) for folder, share in zip(folders, shares, strict=True)]
    buffered = [str(folder.path) for folder in folders if folder.data and not folder.data.direct]
    if buffered:
        warn_user(
            f"ssd.folder: no direct access (O_DIRECT) in {', '.join(buffered)}: what is written there passes "
            "through the page cache, which takes host memory and time; a folder on ext4 or xfs has it"
        )
    return files


def _shares(size: int, files: int) -> list[int]:
    """Bytes of each file; one block at least, for a file must have something."""
    stripes, rest = divmod(size, STRIPE)
    rows, extra = divmod(stripes, files)
    return [
        max(BLOCK, (rows + (place < extra)) * STRIPE + (rest if place == extra else 0))
        for place in range(files)
    ]


def _stripe(extent: Extent, offset: int, memory: Sequence[Memory], files: int) -> dict[int, ByteSpan]:
    """What a request asks of each file: always one run, for a file's stripes lie side by side in it."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    pieces: dict[int, list[Memory]] = {}
    position = extent.start + offset
    for address, nbytes in memory:
        left = nbytes
        while left:
            stripe, inside = divmod(position, STRIPE)
            row, place = divmod(stripe, files)
            count = min(left, STRIPE - inside) if files > 1 else left
            starts.setdefault(place, row * STRIPE + inside)
            ends[place] = row * STRIPE + inside + count
            pieces.setdefault(place, []).append(Memory(address + nbytes - left, count))
            position += count
            left -= count
    loose = position == extent.start + extent.nbytes
    return {place: ByteSpan(start, pieces[place], ends[place], loose) for place, start in starts.items()}


def _conflict(one: Request, other: Request) -> bool:
    """Whether their order matters: they share a block, and not both only read it."""
    if one.link == other.link == READ:
        return False
    return one.first < round_up(other.last, BLOCK) and other.first < round_up(one.last, BLOCK)


def _memory_of(buffers: Sequence[torch.Tensor]) -> list[Memory]:
    for tensor in buffers:
        if (
            tensor.dtype != torch.uint8
            or tensor.dim() != 1
            or not tensor.is_contiguous()
            or tensor.device.type != "cpu"
        ):
            raise StateError(
                f"ssd: expected flat uint8 tensors in host memory, found {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    return [Memory(tensor.data_ptr(), tensor.numel()) for tensor in buffers if tensor.numel()]
