"""Updates as jobs: what one reads and writes is decided at once, the work may be done beside the computation.

A job has its chunks to itself until it is settled. The background thread sees memory only; the books are kept by
whoever settles the job, and whoever wants one of its chunks does (`ChunkStore.settle`). So pending work is
invisible: it can be late, never seen half-done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from traceback import clear_frames

from ebbtide.backend import Event
from ebbtide.backend.cpu import CopyEvent
from ebbtide.errors import StateError
from ebbtide.memory.chunk import Chunk


class _Handle:
    """A job as chunks know it: whoever drops an engine drops its jobs, though chunks outlive both for a moment."""

    __slots__ = ("_chunks", "_job")

    def __init__(self, job: Job, chunks: Sequence[Chunk]) -> None:
        self._job, self._chunks = weakref.ref(job), chunks

    def settle(self) -> None:
        job = self._job()
        if job is not None:
            job.settle()
        else:  # an interrupt came before anybody was given the job
            for chunk in self._chunks:
                if chunk.work is self:
                    chunk.work = None


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
        taken: Callable[[Job], bool],
    ) -> None:
        """`taken`: whether the other thread has the job or will get to it, which it sees to."""
        self._chunks = chunks
        self._waits = list(waits)
        self._work: Callable[[], None] | None = work
        self._finish = finish
        self._failed, self._taken = failed, taken
        self._event: CopyEvent | None = None
        self.begun = False
        """The other thread is at it, or was."""
        self.index = chunks[0].index
        for chunk in chunks:
            if chunk.work is not None:
                raise StateError(f"{chunk} is already being updated")
        handle = _Handle(self, chunks)
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
            _let_frames_go(caught)
            error = caught
        self._event.set(error)
        error = None  # else it would hold this frame, which holds it

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
        try:
            if error is not None:
                self._failed(error)
            self._let_go()
            self._finish(error is None)
            if error is not None or interrupt is not None:
                raise error or interrupt  # type: ignore[misc]
        except BaseException as caught:
            if caught is not interrupt:
                self._failed(caught)  # an interrupt that came among the books
            raise
        finally:
            del error, interrupt

    def _end(self) -> tuple[BaseException | None, BaseException | None]:
        """What the job raised, and what interrupted this."""
        if self._event is not None and self._taken(self):
            interrupt = self._event.outlast()
            return self._event.error, interrupt
        try:
            self.run()
        except BaseException as error:
            return error, None
        return None, None

    def _let_go(self) -> None:
        self._work = self._event = None
        for chunk in self._chunks:
            chunk.work = None
        self._chunks = ()


def _let_frames_go(error: BaseException) -> None:
    """What raised it keeps its lines, and no longer the memory that it worked on."""
    for one in (error, error.__cause__, error.__context__):
        if one is not None and one.__traceback__ is not None:
            clear_frames(one.__traceback__)
