"""Updates as jobs: what one reads and writes is decided at once, the work may be done beside the computation.

A job has its chunks to itself until it is settled. The background thread sees memory only; the books are kept by
whoever settles the job, and whoever wants one of its chunks does (`ChunkStore.settle`). So pending work is
invisible: it can be late, never seen half-done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from traceback import clear_frames

from ebbtide.devices import Event
from ebbtide.devices.cpu_device import CopyEvent
from ebbtide.errors import StateError
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.journal import UPDATE_WAIT, Journal


class _JobHandle:
    """A job as chunks know it: whoever drops an engine drops its jobs, though chunks outlive both for a moment."""

    __slots__ = ("_chunks", "_job")

    def __init__(self, job: UpdateJob, chunks: Sequence[Chunk]) -> None:
        self._job, self._chunks = weakref.ref(job), chunks

    @property
    def waiting(self) -> bool:
        job = self._job()
        return job is not None and not job.ready

    def settle(self) -> None:
        job = self._job()
        if job is not None:
            job.settle()
        else:  # an interrupt came before anybody was given the job
            for chunk in self._chunks:
                if chunk.work is self:
                    chunk.work = None


Bring = Callable[[bool], Sequence[Event] | None]
"""Starts bringing what a job works on, and gives what must be over before the work. Called without leave to wait, None
where others would have to leave first."""


def brought(bring: Bring) -> Sequence[Event]:
    """With leave to wait it comes."""
    found = bring(True)
    assert found is not None
    return found


class UpdateJob:
    """`work` runs once, on whatever thread, after what it needs is over; `finish` keeps the books, and is told whether
    the work was done. Whoever calls `bring` or `finish` holds the lock."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        needs: Sequence[Event] | Bring,
        work: Callable[[], None],
        finish: Callable[[bool], None],
        failed: Callable[[BaseException], None],
        taken: Callable[[UpdateJob], bool],
        journal: Journal,
    ) -> None:
        """`needs`: what must be over, where the chunks are there or on their way, or else what brings them. `taken`:
        whether the other thread has the job or will get to it, which it sees to."""
        self._chunks, self._journal = chunks, journal
        self._bring: Bring | None = needs if callable(needs) else None
        self._waits: Sequence[Event] = () if callable(needs) else needs
        self.bringing = False
        """Somebody waits for room for it."""
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
        handle = _JobHandle(self, chunks)
        for chunk in chunks:
            chunk.work = handle

    @property
    def ready(self) -> bool:
        """What it works on is there, or on its way."""
        return self._bring is None

    def bring(self, wait: bool) -> bool:
        """Sees to it that what it works on comes, however often it is called; whether it does."""
        if self._bring is None or self.bringing:
            return self._bring is None
        self.bringing = wait
        try:
            with ExitStack() as stack:
                for chunk in self._chunks:
                    stack.enter_context(chunk.apart())
                found = self._bring(wait)
        finally:
            self.bringing = False
        if found is not None:
            self._waits = found
            self._bring = None  # from here on the thread may have it
        return found is not None

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
        """Whatever interrupts this, a job that is ready is carried out to its end: the thread has the chunks until then.
        One that there is no room for stays what it is."""
        if self.settled:
            return
        if not self.bring(wait=True):
            raise StateError(f"the update of chunk {self.index} was waited for by what it waits for")
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
            with self._journal.at(UPDATE_WAIT, self.index):
                interrupt = self._event.outlast()
            return self._event.error, interrupt
        try:
            self.run()
        except BaseException as error:
            return error, None
        return None, None

    def give_up(self, error: BaseException) -> None:
        """What it works on never comes."""
        self._failed(error)
        self._let_go()
        self._finish(False)

    def _let_go(self) -> None:
        self._work = self._event = self._bring = None
        for chunk in self._chunks:
            chunk.work = None
        self._chunks = ()


def _let_frames_go(error: BaseException) -> None:
    """What raised it keeps its lines, and no longer the memory that it worked on."""
    for one in (error, error.__cause__, error.__context__):
        if one is not None and one.__traceback__ is not None:
            clear_frames(one.__traceback__)
