"""Updates that a thread carries out one after the other, and what is known of each when it is over."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ebbtide.backend.cpu import CopyEvent, Stream
from ebbtide.memory.chunk import Chunk
from ebbtide.run.progress import Waiting


@dataclass(slots=True, eq=False)
class Turn:
    """An update that the thread has, or will get to."""

    index: int
    gradients: Waiting
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


class Turns:
    def __init__(self) -> None:
        self.queue: deque[Turn] = deque()
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
