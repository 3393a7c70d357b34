"""Lock-free updates (Angel-PTM, Algorithm 2): the passes wait for none.

`step` hands gradients over and returns. They are added to those of earlier steps that no update has consumed yet; an
update takes what a chunk has, as the mean over its steps, and makes new values in a buffer while state streams
past. The computation takes them over where the chunk is not in use: never between its forward and its backward.

Note [one thread decides]: the thread that issues the computation decides everything: which gradients an update
consumes, in which order chunks are updated, when values are taken over. It does so at every moment, in `tick`, which
looks and never waits. The other two threads only work: one adds gradients when they have arrived, one updates. So
no lock guards these books, a gradient is consumed once, and none is lost. What can fail or be interrupted (Ctrl-C) comes
before the lines that change the books, which call nothing but what is last: so no interrupt comes between them, and what
it left undone is done at the next moment.

Note [lock-free ranks]: each rank updates its slices when it comes to it. New values are taken over at the start of a
pass only, when all ranks are between two: else one of them would gather other values in backward than in forward. What
was gathered before is out of date then, whoever changed his slice, and goes.

Note [staleness]: of a chunk at the start of a pass, the steps whose gradients are not in the values that the pass
uses. Where it would exceed its bound, and nowhere else, the pass waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ebbtide.errors import IntegrityError, StateError
from ebbtide.memory.chunk import Chunk, aligned
from ebbtide.planner.sizes import AHEAD, lock_free_bytes
from ebbtide.planner.states import State
from ebbtide.runtime.movement.executor import Executor
from ebbtide.runtime.movement.plan_cursor import IDLE, REVERSING, RUNNING
from ebbtide.runtime.updates.chunk_update import ChunkUpdates
from ebbtide.runtime.updates.lock_free.buffers import GRADIENTS, VALUES, LockFreeBuffers
from ebbtide.runtime.updates.lock_free.merge import Merge, ThreadedUpdate, UpdateThread
from ebbtide.runtime.updates.lock_free.waiting_gradients import ChunkProgress, WaitingSums


class LockFree:
    def __init__(self, chunks: ChunkUpdates, executor: Executor, max_staleness: int, width: int) -> None:
        self.chunks, self.executor, self.places = chunks, executor, executor.places
        self.data, self.store, self.near = chunks.data, chunks.store, chunks.store.near
        self.kernels = chunks.kernels
        self.max_staleness, self._width = max_staleness, width
        self._queue = chunks.queue
        self._queue.run_ahead(self)
        self.buffers = LockFreeBuffers(self.store)
        self._gatherer = WaitingSums(self.data, self.places, chunks.queue, self.buffers, self.kernels)
        self._shared = self.store.slicing.shared
        self.progress: dict[int, ChunkProgress] = {}
        """By chunk; those that are, or were, updated lock-free."""
        self.waits = 0
        """Passes that waited for updates."""
        self.staleness_max, self._staleness_sum, self._looks = 0, 0, 0
        self._order: list[int] = []
        """The chunks that are updated lock-free, in the order in which their state streams."""
        self._next = 0
        self._settings: list[dict[str, Any]] = []
        self._turns = UpdateThread()
        self._merging = Merge(chunks)
        self._busy = False
        self._runs: list[list[int]] = [[] for _ in self.data.members]
        for run, indices in enumerate(self.data.run_chunks):
            for index in indices:
                self._runs[index].append(run)

    # -- which chunks ---------------------------------------------------------------------------------

    def open(self, chunks: Sequence[int]) -> None:
        """These chunks are updated lock-free from now on, and no others."""
        if list(chunks) == self._order:
            return
        self.drain()
        self._order, self._next = [], 0
        self.buffers.close()
        params = [self.data.parameter_chunk(i).nbytes for i in chunks]
        sizes = lock_free_bytes(params, params, self._width)
        self.executor.room.make(self.near, sum(sizes))
        self.buffers.open(*sizes)
        self._order = list(chunks)
        for index in chunks:
            self.progress.setdefault(index, ChunkProgress())

    # -- gradients ------------------------------------------------------------------------------------

    def begin_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Gradients are about to be handed over, to be applied with the settings that the groups have now."""
        self._settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.tick()

    def give(self, index: int, members: Sequence[int], scale: float) -> None:
        """Takes the gradients of one step, to be multiplied with `scale`, off a chunk."""
        if index not in self._order:  # its home was given without a plan
            self.open(sorted({*self._order, index}))
        progress = self.progress[index]
        waiting = self._gatherer.give(index, members, scale, progress.waiting)
        waiting.groups = self._settings
        progress.waiting = waiting
        progress.produced += 1
        self.tick()

    # -- what happens beside the passes ---------------------------------------------------------------

    def tick(self) -> None:
        """Ends updates that are over, takes over values where nobody can tell, makes the next ones ready."""
        if self._busy or self._queue.failed or not self._order:
            return
        self._busy = True
        try:
            while self._turns.queue and self._turns.queue[0].event.done():
                self._finish()
            for index in self._finished():
                if not self._shared and not self._overwritten(index) and self._unnoticed(index):
                    self._take_over(index)
            self._make_ready()
        except BaseException:
            self._sweep()
            raise
        finally:
            self._busy = False

    def begin_pass(self) -> None:
        """A training pass is about to start: no chunk's values are older than the bound says."""
        if self._order:
            self._keep_bound()
        self._forget_gathered(refill=True)

    def _keep_bound(self) -> None:
        self.tick()
        self._take_over_between(self._finished())
        late = [i for i in self._order if self._staleness(i) > self.max_staleness]
        if late:
            self.waits += 1
            self._wait(lambda: all(self._staleness(i) <= self.max_staleness for i in late), late)
        found = [self._staleness(i) for i in self._order]
        self.staleness_max = max(self.staleness_max, *found)
        self._staleness_sum += sum(found)
        self._looks += len(found)

    def begin_evaluation(self) -> None:
        """It sees the newest values that are ready; on many ranks those of the last pass."""
        if self.executor.cursor.phase == IDLE:
            self.tick()
            if not self._shared:
                self._take_over_between([i for i in self._finished() if not self._overwritten(i)])
            self._forget_gathered()

    def _forget_gathered(self, refill: bool = False) -> None:
        """`refill`: what is pinned, on all ranks alike, is gathered again."""
        for index in self.progress if self._shared else ():
            self.places.forget(index)
            if refill:
                self.places.refresh(index)

    def _staleness(self, index: int) -> int:
        progress = self.progress[index]
        return progress.produced - progress.visible - progress.dropped

    def _finished(self) -> list[int]:
        return [i for i in self._order if self.progress[i].values is not None]

    def _take_over_between(self, indices: Iterable[int]) -> None:
        """Between passes nothing is in use; what the device has a copy of stays, where that would have to come again."""
        try:
            for index in indices:
                alone = not self.store.has_host or self.data.parameter_chunk(index).device is None
                if alone and self._quiet(index):
                    self._take_over(index)
            self._make_ready()
        except BaseException:
            self._sweep()
            raise

    def _quiet(self, index: int) -> bool:
        """Whether the chunk's copy can be written at once."""
        chunk = self.data.parameter_chunk(index)
        return (
            chunk.move is None
            and chunk.valid_on(self.near)
            and not self.store.in_use(chunk)
            and all(event.done() for event in chunk.pending)
        )

    def _unnoticed(self, index: int) -> bool:
        """Whether nobody can tell, now in the middle of a pass, that the chunk's values change."""
        executor, chunk = self.executor, self.data.parameter_chunk(index)
        if not self._quiet(index) or executor.cursor.phase == IDLE:
            return False
        if executor.cursor.phase == RUNNING:
            # On a device with memory of its own a copy that is there already would have to come again.
            unused = all(executor.states.state(run) is State.HOLD for run in self._runs[index])
            return unused and (not self.store.has_host or chunk.device is None)
        return executor.cursor.phase != REVERSING or executor.cursor.done_with(chunk)

    # -- one update -----------------------------------------------------------------------------------

    def _make_ready(self, first: Iterable[int] = (), forced: bool = False) -> None:
        """Hands as many updates to the thread as it may have; `forced`: parameters come where they can be read."""
        self._turns.tell()
        while len(self._turns.queue) <= AHEAD:
            index = self._choose(first, forced)
            if index is None:
                return
            self._start(index)
            self._turns.tell()

    def _bring(self, chunk: Chunk) -> None:
        """Makes the chunk's copy on the tier next to SSD valid, and quiet."""
        if not self.store.has_host:
            self.places.bring(chunk)
        else:
            self.places.toward_host(chunk)
            self.store.settle(chunk, host=True)

    def _choose(self, first: Iterable[int], forced: bool) -> int | None:
        """The next in the order in which state streams; where a pass waits for some, these."""
        length = len(self._order)
        ring = [self._order[(self._next + k) % length] for k in range(length)]
        wanted = set(first)
        for index in [i for i in ring if i in wanted] + [i for i in ring if i not in wanted]:
            progress, chunk = self.progress[index], self.data.parameter_chunk(index)
            if progress.waiting is None or progress.values is not None or progress.running:
                continue
            if chunk.nbytes > self.buffers.room(VALUES):
                return None
            if forced or (chunk.move is None and chunk.valid_on(self.near)):
                return index
        return None

    def _start(self, index: int) -> None:
        """The update of a chunk is the thread's to carry out, or nothing has changed."""
        progress, chunk = self.progress[index], self.data.parameter_chunk(index)
        waiting, counts = progress.waiting, self.chunks.param_groups.counts
        assert waiting is not None
        self.data.notice_writes(index)
        with self.executor.room.together([chunk]):  # it is not to go for the sake of its own state
            if chunk.move is not None or not chunk.valid_on(self.near):
                self._bring(chunk)
            elif chunk.pending:
                self.store.settle(chunk, host=True)
            self.chunks.open_states(index)
        before = {member: counts[member] for member in waiting.steps}
        try:
            values = self.buffers.take(VALUES, chunk, chunk.dtype)
            if not self._merging.makes_all(index, waiting):
                self._copy(values, chunk)
            turn = ThreadedUpdate(index, waiting, values, self._merging.work(index, waiting, values))
            self._next = (self._order.index(index) + 1) % len(self._order)
        except BaseException:
            for member, count in before.items():
                counts[member] = count
            raise
        progress.waiting, progress.running = None, True
        progress.writes = self.data.writes[index]
        self._turns.queue.append(turn)

    def _copy(self, target: Chunk, source: Chunk) -> None:
        used = self.data.store.used(target.index)
        for _, (to, values) in aligned([(target, self.near), (source, self.near)], 0, used):
            self.kernels[self.near].copy(to.view(torch.uint8), values.view(torch.uint8))

    def _finish(self) -> None:
        """Waits for the oldest update, whatever interrupts this, and keeps the books of it."""
        self._turns.tell()
        turn = self._turns.queue[0]
        progress, count = self.progress[turn.index], turn.gradients.count
        interrupt, error = turn.event.outlast(), turn.event.error
        self.buffers.give(GRADIENTS, turn.gradients.memory)
        if self.store.streams(turn.index):
            self.store.updated_on_ssd(turn.index)
        if error is not None:
            self._queue.failed = f"a lock-free update ended half-way ({error})"
        progress.running, progress.values = False, turn.values
        if error is None:
            progress.applied += count
            progress.updates += 1
        else:
            progress.dropped += count
        self._turns.queue.popleft()
        if error is not None or interrupt is not None:
            raise error or interrupt  # type: ignore[misc]

    def _overwritten(self, index: int) -> bool:
        """Whether the user has written in place what an update was made without."""
        return self.data.written(index) or self.data.writes[index] != self.progress[index].writes

    def _take_over(self, index: int) -> None:
        """The computation has the new values from now on."""
        progress, chunk = self.progress[index], self.data.parameter_chunk(index)
        values = progress.values
        assert values is not None
        if self._overwritten(index):
            progress.writes = self.data.writes[index]
            self.data.forget_writes(index)  # said once: who goes on has the update
            names = ", ".join(self.data.names[m] for m in self.data.members[index])
            raise StateError(
                f"one of {names} was written in place while a lock-free update was under way, so the write is lost; "
                "write through engine.weights(name, write=True)"
            )
        self.store.written(chunk, self.near)
        if not self.store.has_host and not self.store.in_use(chunk):
            self._exchange(values, chunk)
        else:
            self._copy(chunk, values)
        if self.store.has_host:
            self.places.leave_stale(chunk)
        progress.values, progress.visible = None, progress.applied
        self.buffers.give(VALUES, values)

    def _exchange(self, values: Chunk, chunk: Chunk) -> None:
        """Half-done it could not be gone on with, and done twice it would be undone."""
        if chunk is self.data.computed(chunk.index):
            self.data.unbind(chunk.index)
        try:
            self.buffers.exchange(values, chunk)
        except BaseException:
            self._queue.failed = "an interrupt came while new values were taken over"
            raise

    def _sweep(self) -> None:
        """Buffers that an interrupt left to nobody."""
        self.buffers.sweep(self._owners())

    def check(self) -> None:
        self.buffers.check(self._owners())

    def _owners(self) -> list[Chunk]:
        owners = [chunk for turn in self._turns.queue for chunk in (turn.values, turn.gradients.memory)]
        for progress in self.progress.values():
            owners += [progress.values] if progress.values is not None else []
            owners += [progress.waiting.memory] if progress.waiting is not None else []
        return owners

    # -- waiting --------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Gradients that the values do not have yet."""
        return sum(map(self._staleness, self.progress))

    def drain(self) -> None:
        """Waits until all that was handed over is in the values."""
        if self._queue.failed:
            self.give_up()
        elif not self._busy and self.pending:
            self._wait(lambda: not self.pending)
            self._queue.flush()

    def _wait(self, done: Callable[[], bool], first: Sequence[int] = ()) -> None:
        """Until it is done: nothing is in use meanwhile, so values are taken over wherever they are."""
        self._busy = True
        try:
            while not done():
                self._queue.wake()
                self._force()
                self._make_ready(first, forced=True)
                if self._turns.queue:
                    self._finish()
                elif not done():
                    raise IntegrityError("lock-free updates are pending, and none can be made ready")
                self._force()
        except BaseException:
            self._sweep()
            raise
        finally:
            self._busy = False

    def _force(self) -> None:
        for index in self._finished():
            self._bring(self.data.parameter_chunk(index))
            self._take_over(index)

    def give_up(self) -> None:
        """After an update that failed, or what else left the engine broken: what updates made is taken over as
        far as it came (state on SSD has come as far), gradients that wait are dropped."""
        while self._turns.queue:
            with suppress(Exception):
                self._finish()
        with suppress(Exception):
            self._force()
        self._queue.drop()
        if self._queue.stream is not None:
            self._queue.stream.forget()
        for progress in self.progress.values():
            progress.waiting, progress.values, progress.running = None, None, False
            progress.dropped = progress.produced - progress.applied
            progress.visible = progress.applied
        self._sweep()

    def close(self) -> None:
        """Applies what waits, and gives all buffers back."""
        with suppress(Exception):  # memory is given back whatever comes of it
            self.drain()
        self.give_up()
        self._turns.close()
        self._order = []
        self.buffers.close()

    def stats(self) -> dict[str, Any]:
        books = self.progress.values()
        return {
            "staleness_max": self.staleness_max,
            "staleness_mean": self._staleness_sum / self._looks if self._looks else 0.0,
            "waits": self.waits,
            "gradients_produced": sum(one.produced for one in books),
            "gradients_applied": sum(one.applied for one in books),
            "gradients_dropped": sum(one.dropped for one in books),
            "updates": sum(one.updates for one in books),
            "pending": self.pending,
        }
