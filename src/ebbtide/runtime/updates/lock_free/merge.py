"""What a lock-free update does with the gradients that wait: all since the last one, as one step; and the thread that
does it, one update after the other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ebbtide.devices.cpu_device import CopyEvent, Stream
from ebbtide.memory.chunk import Chunk
from ebbtide.runtime.updates.chunk_update import ChunkUpdates, Part
from ebbtide.runtime.updates.lock_free.waiting_gradients import WaitingGradients


@dataclass(slots=True, eq=False)
class ThreadedUpdate:
    """An update that the thread has, or will get to."""

    index: int
    gradients: WaitingGradients
    values: Chunk
    work: Callable[[], None] | None
    event: CopyEvent = field(default_factory=CopyEvent)
    told: bool = False
    """The thread knows of it."""

    def carry_out(self) -> None:
        """On the thread, which lets go of the tensors before it reports the end; once, however often it is called."""
        work, self.work = self.work, None
        if work is None:
            return
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        del work
        self.event.set(error)


class UpdateThread:
    def __init__(self) -> None:
        self.queue: deque[ThreadedUpdate] = deque()
        """In their order, until the books of them are kept."""
        self._stream: Stream | None = None

    def tell(self) -> None:
        """The thread is told of every update, of one again where an interrupt came before that was noted."""
        for turn in self.queue:
            if turn.told:
                continue
            if self._stream is None:
                self._stream = Stream("ebbtide-lock-free")
                weakref.finalize(self, self._stream.close)
            self._stream.submit(turn.carry_out)
            turn.told = True

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class Merge:
    def __init__(self, chunks: ChunkUpdates) -> None:
        self._chunks, self._data, self._near = chunks, chunks.data, chunks.store.near

    def work(self, index: int, waiting: WaitingGradients, values: Chunk) -> Callable[[], None]:
        """What the thread does for an update, which is counted as a step of its parameters."""
        parts = self._parts(waiting)
        run = self._chunks.stream if self._chunks.store.streams(index) else self._chunks.run
        tier = self._near

        def work() -> None:
            try:
                for event in waiting.added:
                    event.wait()
                run(tier, index, parts, values)
            finally:
                parts.clear()

        return work

    def makes_all(self, index: int, waiting: WaitingGradients) -> bool:
        """Whether an update makes every value that is here anew, from masters that are whole."""
        if self._data.master != "separate" or self._data.master_dtype(index) is None:
            return False
        return all(m in waiting.steps for m in self._data.members[index] if self._data.shares[m].numel)

    def _parts(self, waiting: WaitingGradients) -> list[Part]:
        """The mean over the steps that a parameter has gradients of counts as one step."""
        steps = self._chunks.param_groups
        alike: dict[int, list[int]] = {}
        for member, count in waiting.steps.items():
            steps.counts[member] += 1
            alike.setdefault(count, []).append(member)
        return [
            Part(segment, list(waiting.memory.slices(self._near, segment.offset, segment.count)))
            for count, members in alike.items()
            for segment in steps.segments(members, waiting.scale / count, waiting.groups)
        ]
