"""Flat memory of the device on its way to SSD and back, in pieces, beside the computation.

Where the device is RAM with no host beside it, a piece is written from where it lies (`disk` takes care of alignment).
Else it passes over the link into one of a few buffers on the host, which is free again once it is written; on the way
back the other way round. A thread for each direction issues copies and requests, and waits for buffers.

Note [no more users]: whether others hold a storage is read from its use count, so a piece must not count as a user. It
is a tensor over the same address instead, and who starts a crossing keeps the memory until that is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ebbtide.devices import Backend, Event, Stream
from ebbtide.devices.cpu_device import OVER
from ebbtide.devices.device import wait_for_all
from ebbtide.memory.disk.space import DiskSpace, Extent
from ebbtide.memory.links import TO_DEVICE, TO_HOST
from ebbtide.planner.sizes import PASSAGE, PASSING

Piece = tuple[Extent, int, int]
"""(extent, first byte, bytes)."""


class Crossing:
    """An event: all bytes of one storage are on SSD, or back."""

    __slots__ = ("_cancelled", "_flat", "_lock", "_submitted", "requests")

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat: torch.Tensor | None = flat
        self._lock = threading.RLock()
        self._cancelled = False
        self._submitted: Event | None = None
        self.requests: list[Event] = []

    def begin(self, submitted: Event) -> None:
        """`submitted`: the thread has started all of it."""
        self._submitted = submitted

    def take(self) -> torch.Tensor | None:
        """The thread's turn has come; None where nobody wants it any more."""
        with self._lock:
            flat, self._flat = self._flat, None
            return flat

    def cancel(self) -> None:
        """Nobody wants it any more: what has not started does not, and the rest is over soon."""
        with self._lock:
            self._cancelled = True
            if self._flat is not None:
                self._flat, self._submitted = None, OVER

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        started = self._submitted is not None and self._submitted.done()
        return started and all(one.done() for one in self.requests)

    def wait(self) -> None:
        failed = wait_for_all(self._events())
        if failed is not None:
            raise failed.with_traceback(None)

    synchronize = wait

    @property
    def timing(self) -> Crossing:
        return self

    def span(self) -> tuple[float, float] | None:
        spans = [found for one in self.requests if (found := one.timing.span()) is not None]
        if not spans or not self.done():
            return None
        return min(begin for begin, _ in spans), max(end for _, end in spans)

    def _events(self) -> Iterator[Event]:
        assert self._submitted is not None
        yield self._submitted
        yield from self.requests  # complete by now


@dataclass(slots=True, eq=False)
class _Slot:
    memory: torch.Tensor | None
    """None where pieces need no buffer: the slot then only says how many are under way."""
    event: Event | None = None
    """Of what uses it."""

    def wait(self) -> None:
        """What uses it is over, whatever became of it: whoever waits for that crossing is told."""
        event, self.event = self.event, None
        if event is not None:
            wait_for_all([event])


class _Ring:
    """Slots in turn."""

    def __init__(self, memories: Sequence[torch.Tensor | None]) -> None:
        self.slots = deque(_Slot(memory) for memory in memories)

    def __len__(self) -> int:
        return len(self.slots)

    def next(self) -> _Slot:
        slot = self.slots[0]
        self.slots.rotate(-1)
        slot.wait()
        return slot


Work = Callable[[torch.Tensor, Sequence[Extent], Event, Crossing], None]


def _begin(work: Work, extents: Sequence[Extent], after: Event, crossing: Crossing) -> None:
    flat = crossing.take()
    if flat is not None:
        work(alias(flat), extents, after, crossing)


class Passage:
    def __init__(self, backend: Backend, disk: DiskSpace, buffers: Sequence[torch.Tensor]) -> None:
        """`buffers` in host memory, all of one size; none where the device's memory is next to SSD."""
        self._backend, self._disk = backend, disk
        self.slot = buffers[0].numel() if buffers else PASSAGE
        memories: Sequence[torch.Tensor | None] = buffers or [None] * (2 * PASSING)
        self._out, self._back = _Ring(memories[:PASSING]), _Ring(memories[PASSING:])
        self._threads = {name: Stream(f"ebbtide-activations-{name}") for name in ("out", "back")}

    def put(self, flat: torch.Tensor, extents: Sequence[Extent]) -> Crossing:
        """Starts writing `flat`, which the caller keeps as it is until the crossing is over."""
        return self._start("out", self._write, flat, extents)

    def get(self, flat: torch.Tensor, extents: Sequence[Extent]) -> Crossing:
        """Starts filling `flat`, which the caller keeps until the crossing is over."""
        return self._start("back", self._read, flat, extents)

    def _start(self, thread: str, work: Work, flat: torch.Tensor, extents: Sequence[Extent]) -> Crossing:
        crossing = Crossing(flat)
        job = partial(_begin, work, extents, self._backend.mark(), crossing)
        crossing.begin(self._threads[thread].submit(job))
        return crossing

    def close(self) -> list[torch.Tensor]:
        """Waits for what is under way, and gives the buffers back."""
        for thread in self._threads.values():
            thread.close()
        slots = [*self._out.slots, *self._back.slots]
        for slot in slots:
            slot.wait()
        return [slot.memory for slot in slots if slot.memory is not None]

    # -- the threads ----------------------------------------------------------------------------------

    def _write(self, flat: torch.Tensor, extents: Sequence[Extent], after: Event, crossing: Crossing) -> None:
        place = 0
        for extent, offset, count in self._pieces(extents):
            if crossing.cancelled:
                return
            slot, part = self._out.next(), flat[place : place + count]
            place += count
            if slot.memory is not None:
                held = slot.memory[:count]
                self._backend.copy(held, part, TO_HOST, after).synchronize()
                part = held
            slot.event = self._disk.write(extent, [part], offset)
            crossing.requests.append(slot.event)

    def _read(self, flat: torch.Tensor, extents: Sequence[Extent], after: Event, crossing: Crossing) -> None:
        place = 0
        ahead: deque[tuple[_Slot, torch.Tensor]] = deque()
        for extent, offset, count in self._pieces(extents):
            if crossing.cancelled:
                return
            if len(ahead) == len(self._back):
                self._land(*ahead.popleft(), after)
            slot, part = self._back.next(), flat[place : place + count]
            place += count
            slot.event = self._disk.read(
                extent, [part if slot.memory is None else slot.memory[:count]], offset
            )
            crossing.requests.append(slot.event)
            if slot.memory is not None:
                ahead.append((slot, part))
        while ahead:
            self._land(*ahead.popleft(), after)

    def _land(self, slot: _Slot, part: torch.Tensor, after: Event) -> None:
        """A piece is in its buffer, and goes on to the device."""
        assert slot.event is not None and slot.memory is not None
        slot.event.wait()
        self._backend.copy(part, slot.memory[: part.numel()], TO_DEVICE, after).synchronize()

    def _pieces(self, extents: Sequence[Extent]) -> Iterator[Piece]:
        for extent in extents:
            for first in range(0, extent.nbytes, self.slot):
                yield extent, first, min(self.slot, extent.nbytes - first)


def alias(flat: torch.Tensor) -> torch.Tensor:
    """See Note [no more users]. Where nobody traces what is made."""
    storage = torch._C._construct_storage_from_data_pointer(flat.data_ptr(), flat.device, flat.numel())
    return torch.empty(0, dtype=torch.uint8, device=flat.device).set_(storage)
