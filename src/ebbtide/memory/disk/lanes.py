"""Threads that read and write data files: one queue for each file and direction.

Requests of a queue start in order. Those that lie behind each other in the file and wait when a thread is free
become one vectored call, so that small chunks do not mean small transfers. A request waits for earlier ones that
overlap it, in whichever queue they are; it is merged only when it has nothing to wait for, so queues never wait
for each other in a circle.

Note [use counts]: a chunk whose storage somebody uses is not evicted. So threads work with addresses, and the
tensors of a request are let go before its event is set.
"""

from __future__ import annotations

import copy
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbtide.devices.pool import map_memory
from ebbtide.errors import DiskError, EbbtideError, StateError
from ebbtide.memory.disk.data_files import DataFile, SystemIO
from ebbtide.memory.disk.extents import BLOCK, Extent
from ebbtide.memory.disk.vectors import BOUNCE, MAX_VECTORS, BytePart, ByteSpan, Memory, calls, view
from ebbtide.units import round_up

READ, WRITE = "ssd_read", "ssd_write"
MERGE = 32 << 20
"""Bytes up to which neighbouring requests become one call."""
_TRIES = 4
"""Calls in a row that may end inside their first block."""


@dataclass
class DiskTraffic:
    """What was moved between files and memory, padding included, by direction."""

    moved: dict[str, int] = field(default_factory=lambda: {READ: 0, WRITE: 0})
    calls: dict[str, int] = field(default_factory=lambda: {READ: 0, WRITE: 0})
    busy: dict[str, float] = field(default_factory=lambda: {READ: 0.0, WRITE: 0.0})
    """Seconds inside system calls, summed over threads."""
    waited: dict[str, float] = field(default_factory=lambda: {READ: 0.0, WRITE: 0.0})
    """Seconds that somebody waited for a request."""
    # Reentrant, as all locks here: the collector may run a finalizer on a thread that holds one.
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def count(self, link: str, moved: int, seconds: float) -> None:
        with self._lock:
            self.moved[link] += moved
            self.calls[link] += 1
            self.busy[link] += seconds

    def wait(self, link: str, seconds: float) -> None:
        with self._lock:
            self.waited[link] += seconds


class DiskEvent:
    """The end of a request."""

    __slots__ = ("_begun", "_ended", "_error", "_flag", "_link", "_traffic")

    def __init__(self, link: str, traffic: DiskTraffic) -> None:
        self._flag = threading.Event()
        self._begun = self._ended = 0.0
        self._error: BaseException | None = None
        self._link = link
        self._traffic = traffic

    def wait(self) -> None:
        if not self._flag.is_set():
            start = time.perf_counter()
            self._flag.wait()
            self._traffic.wait(self._link, time.perf_counter() - start)
        error = self._error
        if error is not None:
            # A copy: an exception that is raised keeps the frames that it passed, and all that they hold.
            raise copy.copy(error) if isinstance(error, EbbtideError) else error from error.__cause__

    synchronize = wait

    def done(self) -> bool:
        return self._flag.is_set()

    def over(self) -> None:
        """Waits, whatever became of it."""
        self._flag.wait()

    @property
    def timing(self) -> DiskEvent:
        return self

    def span(self) -> tuple[float, float] | None:
        return (self._begun or self._ended, self._ended) if self._flag.is_set() else None

    def begin(self) -> None:
        """A thread comes to the request, or to another file's part of it."""
        self._begun = self._begun or time.perf_counter()

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._ended = time.perf_counter()
        self._flag.set()


@dataclass(slots=True, eq=False)
class Request:
    """Bytes [first, last) of an extent, spread over the queues of one or more files."""

    link: str
    extent: Extent
    first: int
    last: int
    memory: Sequence[Memory]
    tensors: tuple[torch.Tensor, ...]
    """Hold the memory until the end."""
    where: str
    """The files."""
    event: DiskEvent
    finish: Callable[[Request, BaseException | None], BaseException | None]
    left: int
    """Files whose part is not over."""
    after: Sequence[Request] = ()
    error: BaseException | None = None
    lock: Any = field(default_factory=threading.RLock)

    @property
    def ready(self) -> bool:
        return all(one.event.done() for one in self.after)

    def end_part(self, error: BaseException | None) -> None:
        with self.lock:
            self.left -= 1
            self.error = self.error or error
            if self.left:
                return
        error = self.finish(self, self.error)
        # Their frames know the request, which knows the error: a circle that only the collector would open.
        for one in (error, error and error.__cause__):
            if one is not None:
                one.__traceback__ = None
        self.after = ()
        self.tensors = ()  # see Note [use counts]
        self.event.set(error)


@dataclass(slots=True, eq=False)
class DiskJob:
    """What a request asks of one file."""

    span: ByteSpan
    request: Request
    begun: bool = False
    """A thread has it, or it is over."""


class Lane:
    """The queue of one file and direction."""

    def __init__(
        self, file: DataFile, link: str, io: SystemIO, traffic: DiskTraffic, rate: float | None, threads: int
    ) -> None:
        self._file = file
        self._io = io
        self._traffic = traffic
        self._link = link
        self._rate = rate
        self._block = BLOCK if file.direct else 1
        self._queue: deque[DiskJob] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._threads: dict[threading.Thread, threading.Event] = {}
        """With what is set at its end."""
        for number in range(threads):
            over = threading.Event()
            thread = threading.Thread(
                target=self._run, args=(over,), name=f"ebbtide-{link}-{number}", daemon=True
            )
            self._threads[thread] = over
            thread.start()

    def submit(self, job: DiskJob) -> None:
        with self._wake:
            if not self._closed:
                self._queue.append(job)
                self._wake.notify()
                return
        job.begun = True
        job.request.end_part(self._too_late())

    def take_back(self, job: DiskJob) -> bool:
        """Whoever submitted it was interrupted, wherever that was; whether no thread will ever carry it out."""
        with self._wake:
            if job in self._queue:
                self._queue.remove(job)
            return not job.begun

    def close(self) -> None:
        """Requests that have not started fail, those that have end."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def join(self) -> None:
        for thread, over in self._threads.items():
            if thread is not threading.current_thread():
                over.wait()  # not `join`: Python takes a thread for dead whose join was interrupted (before 3.13)

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self, over: threading.Event) -> None:
        try:
            self._serve_all()
        finally:
            over.set()  # from here on the process may end, which no tensor outlives well

    def _serve_all(self) -> None:
        buffer = map_memory(BOUNCE)
        while batch := self._take():
            self._serve(batch, buffer.data_ptr())
            del batch

    def _take(self) -> list[DiskJob]:
        """The next job and those that lie right behind it; nothing where the lane is closed and empty."""
        with self._wake:
            while not self._queue and not self._closed:
                self._wake.wait()
            if not self._queue:
                return []
            first = self._pop()
        for one in first.request.after:
            one.event.over()
        batch = [first]
        with self._wake:
            while self._queue and self._mergeable(batch, self._queue[0]):
                batch.append(self._pop())
        return batch

    def _pop(self) -> DiskJob:
        job = self._queue.popleft()
        job.begun = True
        return job

    def _mergeable(self, batch: list[DiskJob], job: DiskJob) -> bool:
        size = job.span.end - batch[0].span.start
        vectors = sum(len(one.span.memory) for one in batch) + len(job.span.memory)
        return (
            round_up(batch[-1].span.end, self._block) == job.span.start
            and size <= MERGE
            and vectors <= MAX_VECTORS
            and job.request.ready
        )

    def _serve(self, batch: list[DiskJob], bounce: int) -> None:
        error = self._attempt(batch, bounce)
        if error is None or len(batch) == 1:
            for job in batch:
                job.request.end_part(error)
            return
        # One of them failed: each on its own tells which.
        for job in batch:
            job.request.end_part(self._attempt([job], bounce))

    def _attempt(self, batch: list[DiskJob], bounce: int) -> BaseException | None:
        for job in batch:
            job.request.event.begin()
        try:
            if self._closed:
                raise self._too_late()
            self._check_size()
            for call in calls((job.span for job in batch), self._block, bounce):
                if self._link == WRITE:
                    self._fill(call)
                    self._transfer(WRITE, call)
                else:
                    self._transfer(READ, call)
                    _empty(call)
        except BaseException as error:
            return error
        return None

    def _too_late(self) -> StateError:
        return StateError(
            f"{self._file.path}: closed before a request was carried out; wait for events before close"
        )

    def _check_size(self) -> None:
        """A write would make a file that somebody cut whole again, with zeros where there were values."""
        found = self._io.size(self._file.number)
        if found != self._file.size:
            raise DiskError(
                f"{self._file.path}: expected a file of {self._file.size} bytes, found {found}: somebody else changed "
                "it; keep other programs out of ssd.folder, and start again from a checkpoint",
                file=self._file.path,
                expected=self._file.size,
                found=found,
            )

    def _fill(self, call: list[BytePart]) -> None:
        """Gathers what is written through the bounce buffer; blocks that are written in part keep the rest."""
        for part in call:
            if not part.copies:
                continue
            block = self._block
            head, end = part.copies[0].place, part.copies[-1].place + part.copies[-1].nbytes
            tail = 0 if part.loose else part.nbytes - end
            if head:
                self._transfer(READ, [BytePart(part.offset, block, part.address)])
            if tail and not (head and part.nbytes == block):
                last = part.nbytes - block
                self._transfer(READ, [BytePart(part.offset + last, block, part.address + last)])
            if part.loose:
                ctypes.memset(part.address + end, 0, part.nbytes - end)
            for piece in part.copies:
                ctypes.memmove(part.address + piece.place, piece.address, piece.nbytes)

    def _transfer(self, link: str, call: list[BytePart]) -> None:
        offset, total = call[0].offset, sum(part.nbytes for part in call)
        done = tries = 0
        while done < total:
            count = self._system_call(link, call, done, offset, total)
            # A direct transfer goes on at a block.
            forward = count if done + count == total else count // self._block * self._block
            tries = 0 if forward else tries + 1
            if count <= 0 or tries == _TRIES:
                raise self._short(link, offset, total, done + count)
            done += forward

    def _system_call(self, link: str, call: list[BytePart], done: int, offset: int, total: int) -> int:
        views = _views(call, done)
        move = self._io.preadv if link == READ else self._io.pwritev
        start = time.perf_counter()
        while True:
            try:
                count = move(self._file.number, views, offset + done)
                break
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failed(link, offset, total, done, error) from error
        seconds = time.perf_counter() - start
        self._traffic.count(link, max(0, count), seconds)
        if self._rate:
            time.sleep(max(0.0, count / self._rate - seconds))
        return count

    def _failed(self, link: str, offset: int, total: int, done: int, error: OSError) -> DiskError:
        reason = error.strerror or str(error)
        return self._error(
            link, offset, total, done, f"{reason}; see the system's log, or name another folder"
        )

    def _short(self, link: str, offset: int, total: int, found: int) -> DiskError:
        return self._error(link, offset, total, found, "the file was cut, or the disk gives no more")

    def _error(self, link: str, offset: int, total: int, found: int, why: str) -> DiskError:
        verb = "reading" if link == READ else "writing"
        return DiskError(
            f"{self._file.path}: {verb} at offset {offset}: expected {total} bytes, found {found}: {why} (ssd.folder)",
            file=self._file.path,
            offset=offset,
            expected=total,
            found=found,
        )


def _empty(call: list[BytePart]) -> None:
    for part in call:
        for piece in part.copies:
            ctypes.memmove(piece.address, part.address + piece.place, piece.nbytes)


def _views(call: list[BytePart], done: int) -> list[memoryview]:
    """The memory of a call but for its first `done` bytes."""
    views = []
    for part in call:
        if done < part.nbytes:
            views.append(view(part.address + done, part.nbytes - done))
        done = max(0, done - part.nbytes)
    return views
