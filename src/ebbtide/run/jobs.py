"""Updates as jobs: what one reads and writes is decided at once, the work may be done beside the computation.

A job has its chunks to itself until it is settled. The background thread sees memory only; the books are kept by
whoever settles the job, and whoever wants one of its chunks does (`ChunkStore.settle`). So pending work is
invisible: it can be late, never seen half-done.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ebbtide.backend import Event, Stream
from ebbtide.backend.cpu import CopyEvent
from ebbtide.errors import StateError
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.stream import StateStream


class _Handle:
    """A job as chunks know it: whoever drops an engine drops its jobs, though chunks outlive both for a moment."""

    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        self._job = weakref.ref(job)

    def settle(self) -> None:
        job = self._job()
        if job is not None:
            job.settle()


class Job:
    """`work` runs once, on whatever thread, after `waits`; `finish` keeps the books, on a thread that holds the lock,
    and is told whether the work was done."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        waits: Sequence[Event],
        work: Callable[[], None],
        finish: Callable[[bool], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._chunks = chunks
        self._waits = list(waits)
        self._work: Callable[[], None] | None = work
        self._finish = finish
        self._failed = failed
        self._event: CopyEvent | None = None
        self.index = chunks[0].index
        for chunk in chunks:
            if chunk.work is not None:
                raise StateError(f"{chunk} is already being updated")
        handle = _Handle(self)
        for chunk in chunks:
            chunk.work = handle

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None, "a job runs once"
        for event in self._waits:
            event.synchronize()
        work()

    def hand_over(self) -> None:
        """Another thread will carry it out."""
        self._event = CopyEvent()

    def carry_out(self) -> None:
        """On that thread. What it raises, whoever settles the job hears."""
        assert self._event is not None
        error: BaseException | None = None
        try:
            self.run()
        except BaseException as caught:
            error = caught
        self._event.set(error)

    def done(self) -> bool:
        return self._event is None or self._event.done()

    @property
    def settled(self) -> bool:
        return not self._chunks

    def settle(self) -> None:
        """Whatever interrupts this, the job is carried out to its end: the thread has the chunks until then."""
        if self.settled:
            return
        error, interrupt = self._end()
        if error is not None:
            self._failed(error)
        self._let_go()
        self._finish(error is None)
        if error is not None or interrupt is not None:
            raise error or interrupt  # type: ignore[misc]

    def _end(self) -> tuple[BaseException | None, BaseException | None]:
        """What the job raised, and what interrupted this."""
        if self._event is not None:
            interrupt = self._event.outlast()
            return self._event.error, interrupt
        try:
            self.run()
        except BaseException as error:
            return error, None
        return None, None

    def _let_go(self) -> None:
        self._work = None
        for chunk in self._chunks:
            chunk.work = None
        self._chunks = ()


class Updater:
    """Runs jobs one after the other: on a thread of its own, or at once.

    What is left at the end of a backward pass that updates is done in the order in which the next forward pass wants it:
    the first layers come last in backward, and first in forward.
    """

    def __init__(self, background: bool) -> None:
        self.background = background
        self.failed = ""
        """Why the weights are no longer those of any step: an update ended half-way."""
        self.state: StateStream | None = None
        """Where state comes from that is on SSD."""
        self._pending: deque[Job] = deque()
        """In the order in which they are done."""
        self._waiting: deque[Job] = deque()
        """Of these, those that nobody has begun; the thread takes the first."""
        self._lock = threading.RLock()
        self._to_reorder = False
        """As soon as the stream of state can be told."""
        self._stream: Stream | None = None

    def submit(
        self,
        chunks: Sequence[Chunk],
        waits: Sequence[Event],
        work: Callable[[], None],
        finish: Callable[[bool], None],
        at_once: bool = False,
    ) -> None:
        job = Job(chunks, waits, work, finish, self._fail)
        if at_once or not self.background:
            job.settle()
            return
        if self._stream is None:
            self._stream = Stream("ebbtide-updates")
            weakref.finalize(self, self._stream.close)
        # Whatever interrupts this, what is pending is carried out: else whoever waits for it would wait for ever.
        with self._lock:
            job.hand_over()
            self._waiting.append(job)
        self._pending.append(job)
        self._stream.submit(self._work_off)

    def _wake(self) -> None:
        """Where `submit` was interrupted, the thread does not know of its job yet."""
        if self._waiting and self._stream is not None:
            self._stream.submit(self._work_off)

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            job.carry_out()

    def reorder(self) -> None:
        """What has not begun is done in the order of the chunks, but for what has been read ahead."""
        with self._lock:
            self._to_reorder = False
            if len(self._waiting) < 2:
                return
            waiting = {id(job) for job in self._waiting}
            begun = [job for job in self._pending if id(job) not in waiting]
            under_way = [job.index for job in begun if not job.settled and not job.done()]
            chunks = [job.index for job in self._waiting]
            order = sorted(chunks) if self.state is None else self.state.detour(under_way, chunks)
            if order is None:
                self._to_reorder = True
                return
            place = {index: number for number, index in enumerate(order)}
            self._waiting = deque(sorted(self._waiting, key=lambda job: place[job.index]))
            self._pending = deque([*begun, *self._waiting])

    def collect(self) -> None:
        """Settles what is over, and keeps state coming."""
        if self._to_reorder:
            self.reorder()
        if self.state is not None:
            self.state.advance()
        while self._pending and (self._pending[0].settled or self._pending[0].done()):
            self._pending.popleft().settle()

    def settle_oldest(self) -> bool:
        """Waits for one job; False where none is pending."""
        self._wake()
        while self._pending:
            job = self._pending.popleft()
            if not job.settled:
                job.settle()
                return True
        return False

    def flush(self) -> None:
        """Waits for all of them."""
        while self.settle_oldest():
            continue
        if self.state is not None:
            self.state.drain()

    def drop(self) -> None:
        """Lets everything end, whatever comes of it; `failed` says that."""
        self._wake()
        while self._pending:
            with suppress(Exception):
                self._pending.popleft().settle()
        if self.state is not None:
            with suppress(Exception):
                self.state.drain()
            self.state.failed = None

    def mend(self) -> None:
        """All weights were written anew: what was half-done is gone."""
        self.failed = ""
        if self.state is not None:
            self.state.failed = None

    def _fail(self, error: BaseException) -> None:
        self.failed = f"an update ended half-way ({error})"
