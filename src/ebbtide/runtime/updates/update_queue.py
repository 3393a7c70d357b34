"""The thread that carries out updates, and the order in which it does."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ebbtide.devices import Event, Stream
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.memory.state_stream import StateStream
from ebbtide.runtime.updates.update_jobs import Bring, UpdateJob

BEHIND = 2
"""Updates in backward that wait for the thread before one is put off: the state of so many is being read."""


class LockFreeUpdates(Protocol):
    """Updates that passes do not wait for."""

    def open(self, chunks: Sequence[int]) -> None:
        """These chunks are updated lock-free from now on, and no others; pending updates end."""

    def tick(self) -> None:
        """A moment begins."""

    def drain(self) -> None:
        """Waits until all that was handed over is in the values."""


class UpdateQueue:
    """Runs jobs one after the other: on a thread of its own, or at once.

    What is left at the end of a backward pass that updates is done in the order in which the next forward pass wants it:
    the first layers come last in backward, and first in forward. A disk that falls behind would leave just those, and
    have nothing to do as soon as forward has waited for them: so others, which forward wants later, are put off until
    backward is over.
    """

    def __init__(self, background: bool, store: ChunkStore) -> None:
        self._background, self._store = background, store
        self.failed = ""
        """Why the weights are no longer those of any step: an update ended half-way."""
        self._lock_free: LockFreeUpdates | None = None
        self._pending: deque[UpdateJob] = deque()
        """In the order in which they are done; the thread takes the first that nobody has begun, once what it works on
        comes."""
        self._put_off: list[UpdateJob] = []
        """They wait until backward is over, or somebody waits for them."""
        self._lock = threading.RLock()
        self._to_reorder = False
        """As soon as the stream of state can be told."""
        self._stream: Stream | None = None

    @property
    def stream(self) -> StateStream | None:
        return self._store.state_stream

    @property
    def ahead_of_passes(self) -> bool:
        """Whether passes do not wait for updates (lock-free)."""
        return self._lock_free is not None

    def run_ahead(self, updates: LockFreeUpdates) -> None:
        """From now on these are lock-free."""
        self._lock_free = updates

    def halt(self) -> None:
        """Waits for all of them, and nothing is updated lock-free until the next pass begins."""
        if self._lock_free is not None:
            self._lock_free.open([])
        self.flush()

    def submit(
        self,
        chunks: Sequence[Chunk],
        needs: Sequence[Event] | Bring,
        work: Callable[[], None],
        finish: Callable[[bool], None],
        at_once: bool = False,
    ) -> None:
        """A job may come before what it works on has room: with what brings that, as soon as others have left."""
        journal = self._store.traffic.journal
        job = UpdateJob(chunks, needs, work, finish, self._fail, self._taken, journal)
        if at_once or not self._background:
            job.settle()
            return
        if self._stream is None:
            self._stream = Stream("ebbtide-updates")
            weakref.finalize(self, self._stream.close)
        job.hand_over()
        with self._lock:
            self._pending.append(job)  # from here on, whatever interrupts this, it is carried out
        self._bring_next()
        self._stream.submit(self._work_off)

    def _bring_next(self) -> bool:
        """Has what jobs work on come, one after the other, as far as there is room; whether any does."""
        some = False
        for job in list(self._pending):
            if job.ready or job.settled:
                continue
            if not job.bring(wait=False):
                break
            some = True
        return some

    def bring_all(self) -> None:
        """What jobs work on comes now: soon there may be less room."""
        for job in [*self._pending, *self._put_off]:
            if not job.settled and not job.bringing:
                job.bring(wait=True)
        self.wake()

    def wake(self) -> None:
        """Where `submit` was interrupted, the thread does not know of its job yet."""
        with self._lock:
            waiting = self._first_waiting() is not None
        if waiting and self._stream is not None:
            self._stream.submit(self._work_off)

    def put_off(self, spare: int) -> None:
        """In a backward pass that updates: where too many jobs wait for state from SSD, one is left for the next forward
        pass, the longest waiting of those whose state is not on its way. `spare`: so many more gradients have room until
        backward is over; where less than none, that many of those that wait are not put off, and give it."""
        with self._lock:
            waiting = [job for job in self._pending if not job.begun]
            if self.stream is None or len(waiting) <= BEHIND + max(0, 1 - spare):
                return
            for job in waiting:
                if self.stream.put_off(job.index):
                    self._put_off.append(job)  # first: whatever interrupts this, one of the two has it
                    self._pending.remove(job)
                    return

    def _recall(self, job: UpdateJob) -> None:
        """Somebody waits for a job: one that was put off is the next, and none without room is before it."""
        with self._lock:
            jobs = [one for one in self._pending if one is not job]
            if job in self._put_off:
                ahead = sum(one.begun for one in jobs)
            elif job in self._pending and not job.begun:
                place = self._pending.index(job)
                ahead = next((n for n, one in enumerate(jobs[:place]) if not one.ready), place)
            else:
                return
            self._pending = deque([*jobs[:ahead], job, *jobs[ahead:]])
            if job in self._put_off:
                self._put_off.remove(job)

    def _taken(self, job: UpdateJob) -> bool:
        self._recall(job)
        self.wake()
        return job.begun or job in self._pending

    def _first_waiting(self) -> UpdateJob | None:
        job = next((job for job in self._pending if not job.begun and not job.settled), None)
        return job if job is not None and job.ready else None

    def _work_off(self) -> None:
        while True:
            with self._lock:
                job = self._first_waiting()
                if job is None:
                    return
                job.begun = True
            job.carry_out()

    def reorder(self) -> None:
        """What has not begun is done in the order of the chunks, but for what has been read ahead."""
        with self._lock:
            self._to_reorder = False
            waiting = [job for job in dict.fromkeys([*self._pending, *self._put_off]) if not job.begun]
            if len(waiting) < 2 and not self._put_off:
                return
            begun = [job for job in self._pending if job.begun]
            under_way = [job.index for job in begun if not job.settled and not job.done()]
            chunks = [job.index for job in waiting]
            order = sorted(chunks) if self.stream is None else self.stream.detour(under_way, chunks)
            if order is None:
                self._to_reorder = True
                return
            place = {index: number for number, index in enumerate(order)}
            self._pending = deque([*begun, *sorted(waiting, key=lambda job: place[job.index])])
            self._put_off.clear()
        self.wake()

    def moment(self) -> None:
        """A moment begins: settles what is over, and goes on with what passes do not wait for."""
        self.collect()
        if self._lock_free is not None:
            self._lock_free.tick()

    def drain(self) -> None:
        """Waits for all of them, those included that passes do not wait for."""
        if self._lock_free is not None:
            self._lock_free.drain()
        self.flush()

    def settle_values(self) -> None:
        """Before values are read or written by name: what passes do not wait for ends."""
        if self._lock_free is not None:
            self._lock_free.drain()

    def collect(self) -> None:
        """Settles what is over, and keeps state coming."""
        if self._to_reorder:
            self.reorder()
        if self.stream is not None:
            self.stream.advance()
        while self._pending and (self._pending[0].settled or self._pending[0].done()):
            self._settle(self._pending[0])
        if self._pending and self._bring_next():
            self.wake()

    def settle_oldest(self, ready: bool = False) -> bool:
        """Waits for one job; False where none is pending, or none that would give room and not take some first, which
        `ready` asks for."""
        while (job := self._oldest(ready)) is not None:
            if self._settle(job):
                return True
        return False

    def _oldest(self, ready: bool) -> UpdateJob | None:
        """Where one waits for room, only such as have theirs."""
        jobs = [*self._pending, *self._put_off]
        ready = ready or any(job.bringing for job in jobs)
        return next((job for job in jobs if job.ready or not ready), None)

    def _settle(self, job: UpdateJob) -> bool:
        """Whether it was not settled yet."""
        news = not job.settled
        try:
            job.settle()
        finally:
            # Whoever settles one may come here again, for another chunk's sake.
            if job.settled:
                self._forget(job)
        return news

    def _forget(self, job: UpdateJob) -> None:
        with self._lock:
            for jobs in (self._pending, self._put_off):
                if job in jobs:
                    jobs.remove(job)

    def flush(self) -> None:
        """Waits for all of them."""
        while self.settle_oldest():
            continue
        if self.stream is not None:
            self.stream.drain()

    def drop(self) -> None:
        """Lets everything end, whatever comes of it; `failed` says that."""
        while jobs := [*self._pending, *self._put_off]:
            try:
                self._settle(jobs[0])
            except Exception as error:
                if not jobs[0].settled:
                    with suppress(Exception):
                        jobs[0].give_up(error)
                    self._forget(jobs[0])
        if self.stream is not None:
            with suppress(Exception):
                self.stream.drain()
            self.stream.failed = None

    def close(self) -> None:
        self.drop()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def mend(self) -> None:
        """All weights were written anew: what was half-done is gone."""
        self.failed = ""
        if self.stream is not None:
            self.stream.failed = None

    def _fail(self, error: BaseException) -> None:
        self.failed = f"an update ended half-way ({error})"
