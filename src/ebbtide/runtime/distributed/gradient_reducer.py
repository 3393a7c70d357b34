"""Gradients on their way from whole chunks to slices: exchanged between ranks beside the computation, and added up.

One reduction is under way at a time. Where it was promised, each rank says whether it has the gradients that it is to
have, and goes on; a thread hears what the others say, and starts the exchange where all are ready. Where only some are,
the chunk waits for the end of the pass; where none is, it is as if nothing had been promised. What came is *summed*
into the slice when the next reduction begins, when ranks agree on something else, or as soon as the room of the whole
is wanted.

Note [order]: each group of ranks has a process group and a thread for exchanges, which starts them in the order in
which they were asked for. Before its next collective a rank waits until the exchange has started, and before its next
exchange until this one is over, so there is never a second one. While the pass goes on a rank waits only for what
another must have come to before: so user code that talks to other ranks in between cannot make two of them wait for
each other.

Note [in slices]: room for what all send of a whole chunk is kept for good. Where some rank has no plan with that much
less, or none yet, all of them send each other a block of their slices at a time (`trade_slices`), and one slice of room
is kept. The sum goes over the rank's own slice of the whole. Sums come out the same; it is slower. Nothing is promised
then, for a rank that has no use for a gather has no room either.

Note [at once]: updates in backward follow from a sum, and ask all ranks something. They wait for the sum where they
are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ebbtide.devices import Event
from ebbtide.devices.device import wait_for_all
from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import GATHERED, Chunk
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.memory.journal import RANKS
from ebbtide.memory.links import WIRE
from ebbtide.planner.shape import GRAD, WHOLE_GRAD
from ebbtide.runtime.distributed.rank_groups import Exchanges, RankGroup
from ebbtide.runtime.movement.eviction import EXCHANGE
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.parameters.binding import ModelData

LANE = 64
"""Elements; blocks are whole lanes where they can be."""


def block_of(each: int, ranks: int) -> int:
    """Elements of a block, of slices of `each`: those of all ranks take one slice of memory."""
    return each // ranks // LANE * LANE or each // ranks or 1


def room_for(each: int, ranks: int) -> int:
    """Elements that a rank receives at a time, or keeps in the end."""
    return max(each, ranks * block_of(each, ranks))


def trade_slices(
    exchanges: Exchanges,
    kernels: Kernels,
    memory: torch.Tensor,
    whole: torch.Tensor,
    dtype: torch.dtype,
    crew: RankGroup,
) -> None:
    """Leaves the mean of this rank's slice over all ranks in `memory`. `whole` is of no use after it."""
    size, width = crew.size, dtype.itemsize
    own = crew.part(whole, crew.rank)
    each = own.numel() // width
    block = block_of(each, size)
    for at in range(0, each, block):
        count = min(block, each - at)
        received = memory[: size * count * width]
        exchanges.trade(received, whole, at * width, count * width)
        sums = own.view(dtype)[at : at + count]
        kernels.sum_ranks(sums, received.view(dtype), 1.0 / size)
    memory[: own.numel()].copy_(own)


class Received:
    """Room on the device for what others send of one chunk, kept for good: plans count with what is left."""

    def __init__(self, store: ChunkStore) -> None:
        self._backend, self._ledger = store.backend, store.ledger
        self.size = 0
        self._memory: torch.Tensor | None = None
        self.filling: _GradientExchange | None = None

    def resize(self, count: int) -> None:
        if count != self.size:
            self.close()
            self._ledger.reserve("device", EXCHANGE, count)
            self.size = count

    def take(self, count: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._backend.allocate("device", self.size)
        return self._memory[:count]

    def close(self) -> None:
        if self.filling is not None:
            self.filling.settle()
        if self._memory is not None:
            self._backend.free("device", self._memory)
        self._memory = None
        self._ledger.release("device", EXCHANGE, self.size)
        self.size = 0


class _GradientExchange:
    """One chunk's gradients on their way. It has the whole and the slice to itself meanwhile."""

    def __init__(
        self,
        index: int,
        arrived: Sequence[bool],
        whole: Chunk,
        grad: Chunk,
        memory: torch.Tensor,
        crew: RankGroup,
    ) -> None:
        self.index, self.arrived, self.whole, self.memory = index, arrived, whole, memory
        self.crew = crew
        self.begun: Event | None = None
        """When it is known whether it has started."""
        self.work: Event | None = None
        self.dropped = False
        self.waiting = False
        self._lock = threading.Lock()
        self._cancelled = False
        self._owned = [chunk for chunk in (whole, grad) if chunk.work is None]
        for chunk in self._owned:
            chunk.work = self

    def begin(self, start: Callable[[], Event]) -> None:
        """On the thread: all ranks are ready."""
        with self._lock:
            if not self._cancelled:
                self.work = start()

    def settle(self) -> None:
        """Whoever has the memory gives it up: what has not started never will, or is waited for."""
        with self._lock:
            self._cancelled = True
        self.let_go()
        if self.work is not None:
            self.work.wait()

    def drop(self) -> None:
        """The pass was given up: what comes is not wanted, and the slice is somebody else's."""
        self.dropped = True
        self._release(self._owned[1:])

    def let_go(self) -> None:
        self._release(self._owned)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.work is self:
                chunk.work = None


class ReducedGradients(Protocol):
    """Gradients that come whole, and are reduced to slices."""

    def here(self, index: int) -> list[bool]:
        """By member of a chunk, whether it has a gradient here in this pass."""

    def claimed(self, index: int) -> list[bool]:
        """The same of a chunk that has all it is to have; of experts that other ranks have, that they say so."""

    def summed(self, index: int, arrived: Sequence[bool], grad: Chunk) -> None:
        """The mean of a chunk's slice is in `grad`; `arrived`: which members have a gradient on some rank."""


class GradientReducer:
    def __init__(
        self,
        data: ModelData,
        places: FetchOnDemand,
        crews: Mapping[int, RankGroup],
        kernels: Kernels,
        at_once: bool,
        refused: Callable[[], None],
    ) -> None:
        """`crews`: by size. `kernels`: the device's. `at_once`: what follows from a sum cannot wait (Note [at once]).
        `refused`: told where some rank was not ready for what was announced."""
        self._data, self._store, self._places, self._kernels = data, data.store, places, kernels
        self._crews, self._ranks = crews, crews[data.store.slicing.ranks].ranks
        self._exchanges = {size: Exchanges(crew) for size, crew in crews.items()}
        self._at_once = at_once
        self.received = Received(data.store)
        self.in_slices = True
        """Note [in slices]; until the first pass."""
        self._current: _GradientExchange | None = None
        self._denied: tuple[int, Callable[[], list[bool]]] | None = None
        """A promised chunk that this rank was not ready for, and how to hear which ranks were."""
        self.waiting: set[int] = set()
        """Chunks that are reduced at the end of the pass, where some rank has gradients."""
        self._refused = refused
        self._gradients: ReducedGradients | None = None

    @property
    def gradients(self) -> ReducedGradients:
        assert self._gradients is not None
        return self._gradients

    def reduce_for(self, gradients: ReducedGradients) -> None:
        """Whose gradients are reduced."""
        self._gradients = gradients

    def reserve(self) -> None:
        """Room for the largest chunk, or its gradients; in slices, for the largest slice of them."""
        needed = self._needed(self.in_slices)
        if needed > self.received.size:
            self._places.room.make("device", needed - self.received.size)
        self.received.resize(needed)

    def go(self, in_slices: bool) -> None:
        """From now on; all ranks, between passes."""
        self.in_slices = in_slices
        self.reserve()

    def extra(self) -> int:
        """What exchanges of whole chunks take of the device beside what those in slices do."""
        return self._needed(False) - self._needed(True)

    def _needed(self, in_slices: bool) -> int:
        wholes = [chunk for chunk in self._store.chunks.values() if chunk.kind in GATHERED]
        if not in_slices:
            return max((chunk.nbytes for chunk in wholes), default=0)
        grads = [chunk for chunk in wholes if chunk.kind == WHOLE_GRAD]
        return max((self._in_slices(chunk) for chunk in grads), default=0)

    def _in_slices(self, whole: Chunk) -> int:
        size = self._crews[self._store.crew(whole.index)].size
        return room_for(whole.nbytes // whole.dtype.itemsize // size, size) * whole.dtype.itemsize

    # -- steps ----------------------------------------------------------------------------------------

    def announce(self, index: int, ready: bool) -> None:
        """Tells the others that this rank has all of a promised chunk's gradients, or that it has not."""
        try:
            self.finish()
            made = self._prepare(index, self.gradients.claimed(index)) if ready else None
        except BaseException:
            self._say_no(index)
            raise
        if made is None:
            self._say_no(index)
        else:
            ready_ranks = self._ranks.say_ready(True)
            self._begin(made, lambda: all(ready_ranks()))

    def start(self, index: int, arrived: Sequence[bool]) -> None:
        """All ranks have what they will have. `arrived`: by member, whether some rank has a gradient."""
        self.finish()
        self._begin(self._prepare(index, arrived), lambda: True)

    def end(self, index: int, arrived: Sequence[bool]) -> None:
        """The same, at the end of a pass. Where no rank of the crew has anything, it is for others."""
        if self._concerns_us(index, arrived):
            self.start(index, arrived)
        else:
            self.gradients.summed(index, arrived, self._store.get(GRAD, index))

    def hear(self) -> None:
        """Waits until it is known whether what began last is exchanged, or has to wait."""
        if self._denied is not None:
            (index, ready_ranks), self._denied = self._denied, None
            with self._store.traffic.journal.at(RANKS):
                some_are_ready = any(ready_ranks())
            if some_are_ready:
                self.waiting.add(index)
        current = self._current
        if current is None or current.begun is None:
            return
        # The thread has the memory until then, whatever interrupts this one.
        with self._store.traffic.journal.at(RANKS):
            failed = wait_for_all([current.begun])
        current.begun = None
        if current.work is None:
            self._let_go()
            if current.dropped:
                self._store.free(current.whole)  # the pass that it was for is over
            if failed is None:
                self.waiting.add(current.index)
                self._refused()
        else:
            size = current.crew.size
            count = current.whole.nbytes // size * (size - 1)
            self._store.traffic.count(WIRE, count, current.index, GRAD, [current.work])
        if failed is not None:
            raise failed

    def finish(self) -> bool:
        """Nothing is under way any more: what came is added up, and its whole given back. Whether there was some."""
        self.hear()
        current = self._current
        if current is None:
            return False
        assert current.work is not None
        with self._store.traffic.waiting(WIRE, current.index):
            failed = wait_for_all([current.work])
        self._let_go()
        if failed is not None:
            raise failed
        self._store.free(current.whole)
        if not current.dropped:
            grad = self._store.get(GRAD, current.index)
            with self._places.room.together([grad]):
                self._sum(grad, current.memory, current.crew.size)
            self.gradients.summed(current.index, current.arrived, grad)
        return True

    def give_room(self, short: int) -> bool:
        return self.finish()

    def awaits(self, index: int) -> bool:
        """Whether a chunk's gradients are on their way."""
        return self._current is not None and self._current.index == index

    def drop(self) -> None:
        """The pass is given up. The others still get what was promised to them."""
        if self._current is not None:
            self._current.drop()
        self.waiting.clear()

    def _begin(self, made: _GradientExchange, all_ready: Callable[[], bool]) -> None:
        backend, exchanges, in_slices = self._store.backend, self._exchanges[made.crew.size], self.in_slices
        mark, whole, memory = backend.mark(), made.whole.device, made.memory
        assert whole is not None

        def start() -> Event:
            with backend.apart(mark):
                if not in_slices:
                    return exchanges.exchange(memory, whole)
                trade_slices(exchanges, self._kernels, memory, whole, made.whole.dtype, made.crew)
                return backend.mark()

        def begin() -> None:
            if all_ready():
                made.begin(start)

        made.begun = exchanges.submit(begin)
        self._current = made
        if self._at_once:
            self.finish()

    def _say_no(self, index: int) -> None:
        """What the others say is heard before the next collective: user code may talk to them until then."""
        self._denied = index, self._ranks.say_ready(False)
        self._refused()

    def _let_go(self) -> None:
        if self._current is not None:
            self._current.let_go()
        self._current = self.received.filling = None

    # -- memory ---------------------------------------------------------------------------------------

    def _prepare(self, index: int, arrived: Sequence[bool]) -> _GradientExchange:
        """The whole with zeros where this rank has no gradient."""
        whole, grad = self._store.get(WHOLE_GRAD, index), self._store.get(GRAD, index)
        if not whole.device_valid:
            self._places.room.make_for(whole, "device")
            self._store.allocate(whole, "device")
        here = zip(self._data.members[index], self.gradients.here(index), strict=True)
        self._clear(whole, [member for member, has in here if not has])
        memory = self.received.take(self._in_slices(whole) if self.in_slices else whole.nbytes)
        made = _GradientExchange(index, arrived, whole, grad, memory, self._crews[self._store.crew(index)])
        self.received.filling = made
        return made

    def _clear(self, whole: Chunk, members: Sequence[int]) -> None:
        view = whole.view()
        for member in members:
            place = self._data.views[member]
            if place is not None:
                view[place.offset : place.offset + place.numel].zero_()

    def _concerns_us(self, index: int, arrived: Sequence[bool]) -> bool:
        """Whether some rank has a gradient of what this crew has."""
        members = zip(self._data.members[index], arrived, strict=True)
        return any(has and self._data.views[member] is not None for member, has in members)

    def _sum(self, grad: Chunk, memory: torch.Tensor, size: int) -> None:
        """The mean over the ranks, into the slice of the gradients or added to what is there."""
        received = memory.view(grad.dtype)
        if grad.work is not None:
            grad.work.settle()  # the last step's gradients are being added to those that wait for an update
        first = grad.free
        if first:
            self._places.room.make_for(grad, "device")
            self._store.allocate(grad, "device")
        with self._places.hold(grad):
            view, scale = grad.view(), 1.0 / size
            part = received[: view.numel()]
            if self.in_slices:  # they are added up
                self._kernels.capture(view, part, not first)
            elif first:
                self._kernels.sum_ranks(view, received, scale)
            else:
                self._kernels.sum_ranks(part, received, scale)
                self._kernels.capture(view, part, True)
            self._store.written(grad, "device")
