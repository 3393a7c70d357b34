"""Chunks that ranks share: gathered before they are used, their gradients reduced to each rank's slice.

All ranks go through the same passes, and say what they want before each collective, but for gathers that follow as they
always do (`run.ahead`). Where they want the same, as they nearly always do, a collective serves all of
them. Where one wants a chunk that others do not use, they send it their slices; where ranks disagree on the order
in which gradients are complete, those chunks wait for the end of the pass, when all of them have all they will get.
A parameter that some ranks have no gradient for gets zeros from them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ebbtide.backend.base import Event
from ebbtide.backend.cpu import OVER
from ebbtide.errors import RanksError, StateError
from ebbtide.kernels import Kernels
from ebbtide.kernels.crc import crc32
from ebbtide.layout import Slicing
from ebbtide.memory.chunk import GATHERED, WIRE, Chunk
from ebbtide.memory.chunks import ChunkStore
from ebbtide.plan.shape import GRAD, WHOLE, WHOLE_GRAD
from ebbtide.run.ahead import Ahead
from ebbtide.run.model import ModelData, dense, laid_like
from ebbtide.run.places import Places
from ebbtide.run.ranks import BEGIN, END, FORWARD, GATHER, REDUCE, TOKENS, VALUES, Pending, Ranks, Wish
from ebbtide.run.unmanaged import Unmanaged

TAG = "exchange"
FAILED = 1


class _Gathering:
    """The end of a gather; the slice that is sent stays where it is until then."""

    __slots__ = ("_source", "_work")

    def __init__(self, work: Pending, source: Chunk) -> None:
        self._work, self._source = work, source
        source.pins += 1

    def wait(self) -> None:
        try:
            self._work.wait()
        finally:
            self.release()

    synchronize = wait

    def release(self) -> None:
        if self._source is not None:
            self._source.pins -= 1
            self._source = None  # type: ignore[assignment]

    def done(self) -> bool:
        return self._work.done()


class _Received:
    """Room on the device for what others send of one chunk's gradients, kept for good: plans count with what is left."""

    def __init__(self, store: ChunkStore) -> None:
        self._backend, self._ledger = store.backend, store.ledger
        self._size = 0
        self._memory: torch.Tensor | None = None

    def reserve(self, count: int) -> None:
        if count > self._size:
            self.close()
            self._ledger.reserve("device", TAG, count)
            self._size = count

    def take(self, count: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._backend.allocate("device", self._size)
        return self._memory[:count]

    def close(self) -> None:
        if self._memory is not None:
            self._backend.free("device", self._memory)
        self._memory = None
        self._ledger.release("device", TAG, self._size)
        self._size = 0


class Sharing:
    def __init__(self, data: ModelData, places: Places, ranks: Ranks, kernels: Kernels) -> None:
        """`kernels`: the device's."""
        self.ranks = ranks
        self._data, self._store, self._places, self._kernels = data, data.store, places, kernels
        self._received = _Received(data.store)
        self.close = weakref.finalize(self, self._received.close)
        self._round = 0
        self._ahead = Ahead()
        self._any_waits = False
        self._waiting: set[int] = set()
        """Chunks with gradients that wait for the end of the pass."""
        self.arrived: Callable[[int], list[bool]] = lambda index: []
        """By member of a chunk, whether it has a gradient here in this pass."""
        self.reduced: Callable[[int, Sequence[bool], Chunk], None] = lambda index, arrived, grad: None
        """Told of the gradients of a chunk's slice: which members have one on some rank, and where the sum is, with a
        mean's scale."""

    def reserve(self) -> None:
        """Room for the largest chunk, or its gradients."""
        wholes = (chunk.nbytes for chunk in self._store.chunks.values() if chunk.kind in GATHERED)
        self._received.reserve(max(wholes, default=0))

    # -- what a pass wants ----------------------------------------------------------------------------

    def turn(self) -> None:
        """A training pass begins, or a step's updates have all been given out."""
        while self._keep_promise(None) is not None:
            continue
        self._ahead.stop()
        self._round += 1

    def gather(self, index: int) -> None:
        """Starts bringing a whole chunk to the device; other ranks are served until it is this one's turn."""
        while self._serve(Wish(GATHER, index, self._round)) != (GATHER, index):
            continue

    def complete(self, index: int) -> None:
        """A chunk has all the gradients that it will get in this pass."""
        marks = zlib.crc32(bytes(self.arrived(index)))
        wish = Wish(REDUCE, index, self._round, marks)
        while True:
            served = self._serve(wish)
            if served == (REDUCE, index):
                return
            if served is None:
                self._waiting.add(index)
                return

    def end(self, left: Sequence[int]) -> None:
        """The pass is over; `left`: chunks with gradients that were not complete."""
        self._waiting.update(left)
        while self._serve(Wish(END, len(self._waiting), self._round)) != (END, len(self._waiting)):
            continue
        everywhere = self.ranks.objects(sorted(self._waiting)) if self._any_waits else []
        for index in sorted(set().union(*everywhere)):
            self._reduce(index, None)
        self._waiting.clear()

    # -- serving --------------------------------------------------------------------------------------

    def meet(self, deed: int, subject: int = 0) -> None:
        """All ranks do the same now; those that gather chunks before are served."""
        while self._serve(Wish(deed, subject, self._round)) != (deed, subject):
            continue

    def loads(self, exchange: int, mine: Sequence[int]) -> list[list[int]]:
        """How many rows each rank has for which expert."""
        self.meet(TOKENS, exchange)
        return self.ranks.numbers(mine)

    def swap(
        self,
        exchange: int,
        received: torch.Tensor,
        rows: torch.Tensor,
        came: Sequence[int],
        sent: Sequence[int],
    ) -> int:
        """Rows go to their experts, or come back: how many from and to each rank. Bytes that were sent to others."""
        self.meet(TOKENS, exchange)
        count = self.ranks.swap(received, rows, came, sent)
        self._store.traffic.moved[WIRE] += count
        return count

    def _serve(self, wish: Wish) -> tuple[int, int] | None:
        """One thing that all ranks do together, by what they want; None where that is nothing."""
        if (promised := self._keep_promise(wish)) is not None:
            return GATHER, promised
        wishes = self.ranks.agree(wish._replace(used=self._ahead.wanted))
        self._ahead.heard(max(one.used for one in wishes))
        # Who is behind goes first: it may still have to update what the others want.
        gathers = sorted((one.round, one.subject) for one in wishes if one.deed == GATHER)
        if gathers:
            index = gathers[0][1]
            wanting = [r for r, one in enumerate(wishes) if one[:2] == (GATHER, index)]
            if len(wanting) == self.ranks.size:
                self._ahead.gathered(index)
            else:
                self._ahead.agreed(GATHER, index)
            self._gather(index, wanting)
            return GATHER, index
        deeds = {one.deed for one in wishes}
        if deeds == {BEGIN}:
            self._ahead.begin()
        elif deeds == {END}:
            self._ahead.end()
        else:
            self._ahead.agreed(wishes[0].deed, wishes[0].subject if wishes[0].deed in (REDUCE, TOKENS) else 0)
        if FORWARD in deeds and len(deeds) > 1:  # somebody ran forward twice
            return wish[:2] if wish.deed == FORWARD else (FORWARD, -1)
        waits = REDUCE in deeds and deeds <= {REDUCE, TOKENS, END}
        if len({one.round for one in wishes}) > 1 or (len(deeds) > 1 and not waits):
            said = "; ".join(f"rank {rank} {one}" for rank, one in enumerate(wishes))
            raise StateError(
                f"ranks do not do the same: {said}. All of them must call the engine's methods alike, in the same order"
            )
        if wish.deed == END and deeds == {END}:
            self._any_waits = any(one.subject for one in wishes)
        elif any(one[:2] != wish[:2] for one in wishes):
            if waits:
                return None
            raise StateError(f"ranks ask for different things: {', '.join(map(str, wishes))}")
        if wish.deed == REDUCE:
            same = all(one.check == wish.check for one in wishes)
            self._reduce(wish.subject, self.arrived(wish.subject) if same else None)
        return wish.deed, wish.subject

    def _keep_promise(self, wish: Wish | None) -> int | None:
        """Gathers the chunk that was promised next, if there is one; it is not kept where it is not what is wanted."""
        index = self._ahead.promised
        if index is None:
            return None
        wanted = wish is not None and wish[:2] == (GATHER, index)
        if wanted:
            self._gather(index, range(self.ranks.size))
        else:
            self._take_part(index)
        self._ahead.kept(wanted)
        return index

    def _take_part(self, index: int) -> None:
        """In a gather that was promised, and that this rank has no use for."""
        source, whole = self._data.parameter_chunk(index), self._store.get(WHOLE, index)
        self._data.notice_writes(index)
        with self._places.placed(source, "device"):
            assert source.device is not None
            self.ranks.gather(self._received.take(whole.nbytes), source.device).wait()
        self._store.traffic.moved[WIRE] += (self.ranks.size - 1) * source.nbytes

    def _gather(self, index: int, wanting: Sequence[int]) -> None:
        source, whole = self._data.parameter_chunk(index), self._store.get(WHOLE, index)
        ranks, room = self.ranks, self._places.room
        self._data.notice_writes(index)
        with self._places.placed(source, "device"):
            mine = source.device
            assert mine is not None
            if ranks.rank not in wanting:
                ranks.pass_on(None, mine, wanting)
                return
            with room.together([source]):
                room.make_for(whole, "device")

            def start(memory: torch.Tensor) -> tuple[Event, int]:
                sent = (len(wanting) - 1) * source.nbytes
                if len(wanting) == ranks.size:
                    return _Gathering(ranks.gather(memory, mine), source), sent
                ranks.pass_on(memory, mine, wanting)
                return OVER, sent

            self._store.gather(whole, start)

    def _reduce(self, index: int, arrived: Sequence[bool] | None) -> None:
        """`arrived`: the same on all ranks, where that is known."""
        here = self.arrived(index)
        if arrived is None:
            arrived = [any(column) for column in zip(*self.ranks.objects(here), strict=True)]
        whole, grad = self._store.get(WHOLE_GRAD, index), self._store.get(GRAD, index)
        with self._places.room.together([whole, grad]):
            if not whole.device_valid:
                self._places.room.make_for(whole, "device")
                self._store.allocate(whole, "device")
            self._clear(whole, [m for m, has in zip(self._data.members[index], here, strict=True) if not has])
            assert whole.device is not None
            memory = self._received.take(whole.nbytes)
            self.ranks.exchange(memory, whole.device).wait()
            self._store.traffic.moved[WIRE] += whole.nbytes // self.ranks.size * (self.ranks.size - 1)
            self._store.free(whole)
            self._sum(grad, memory)
        self.reduced(index, arrived, grad)

    def _clear(self, whole: Chunk, members: Sequence[int]) -> None:
        view = whole.view()
        for member in members:
            place = self._data.places[member]
            view[place.offset : place.offset + place.numel].zero_()

    def _sum(self, grad: Chunk, memory: torch.Tensor) -> None:
        """The mean over the ranks, into the slice of the gradients or added to what is there."""
        received = memory.view(grad.dtype)
        first = grad.free
        if first:
            self._places.room.make_for(grad, "device")
            self._store.allocate(grad, "device")
        self._places.hold(grad)
        try:
            view, scale = grad.view(), 1.0 / self.ranks.size
            if first:
                self._kernels.sum_ranks(view, received, scale)
            else:
                part = received[: view.numel()]
                self._kernels.sum_ranks(part, received, scale)
                self._kernels.capture(view, part, True)
            self._store.written(grad, "device")
        finally:
            grad.pins -= 1

    # -- values by name -------------------------------------------------------------------------------

    def collect(self, member: int, flat: torch.Tensor) -> None:
        """Each rank's elements of a parameter, which is on the host, for all of them."""
        self.meet(VALUES, member)
        place = self._data.places[member]
        size = self._data.layout.chunks[place.chunk].size
        for rank in range(self.ranks.size):
            share = Slicing(self.ranks.size, rank).share(place.offset, place.numel, size)
            if share.numel:
                self.ranks.spread(flat[share.first : share.first + share.numel], rank)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Around what ranks begin with: one that cannot tells the others, which wait for it in `same`."""
        try:
            yield
        except RanksError:
            raise
        except BaseException:
            self.ranks.numbers((FAILED, 0))
            raise
        self._compare(0)

    def _compare(self, checksum: int) -> bool:
        """Whether all ranks have the same."""
        rows = self.ranks.numbers((0, checksum))
        failed = [rank for rank, row in enumerate(rows) if row[0] == FAILED]
        if failed:
            raise RanksError(f"rank {failed[0]} could not begin, and says why; this one ends, too")
        return all(row == rows[0] for row in rows)

    def same(self, flat: torch.Tensor) -> torch.Tensor:
        """The first rank's values, where ranks began with others."""
        here = flat.detach().to("cpu").contiguous()
        if self._compare(crc32(here.data_ptr(), here.nbytes)):
            return flat
        values = here.clone()
        self.ranks.spread(values, 0)
        return values.to(flat.device)

    def align(self, unmanaged: Unmanaged) -> None:
        """What every rank has for itself begins alike."""
        tensors = [p.detach() for p in unmanaged.parameters.values()] + list(unmanaged.masters.values())
        tensors += list(unmanaged.module.buffers())
        for tensor in tensors:
            if tensor.numel():
                tensor.copy_(self.same(tensor.reshape(-1)).view(tensor.shape))

    def average(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The mean gradients of parameters that every rank has."""
        here = [name for name, parameter in parameters.items() if parameter.grad is not None]
        for name in sorted(set().union(*self.ranks.objects(here))):
            parameter = parameters[name]
            shape, stride = tuple(parameter.shape), parameter.stride()
            flat = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            if parameter.grad is not None:
                flat = laid_like(parameter.grad, shape, stride, parameter.dtype)
            received = torch.empty(self.ranks.size * flat.numel(), dtype=flat.dtype, device=flat.device)
            self.ranks.gather(received, flat).wait()
            mean = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=parameter.device)
            self._kernels.sum_ranks(dense(mean), received, 1.0 / self.ranks.size)
            parameter.grad = mean
