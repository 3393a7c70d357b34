"""Chunks that ranks share: gathered before they are used, their gradients reduced to each rank's slice.

All ranks go through the same passes, and say what they want before each collective, but for those that follow as they
always do (`run.ahead`). Where they want the same, as they nearly always do, a collective serves all of
them. Where one wants a chunk that others do not use, they send it their slices; where ranks disagree on the order
in which gradients are complete, those chunks wait for the end of the pass, when all of them have all they will get.
A parameter that some ranks have no gradient for gets zeros from them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ebbtide.devices.cpu_device import OVER
from ebbtide.devices.device import Event
from ebbtide.errors import BudgetError, RanksError
from ebbtide.kernels import Kernels
from ebbtide.kernels.crc import crc32
from ebbtide.layout import Slicing
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunk_access import copy_out, portions
from ebbtide.memory.journal import RANKS
from ebbtide.memory.links import WIRE
from ebbtide.planner.shape import WHOLE
from ebbtide.runtime.distributed.agreement import BEGIN, END, GATHER, REDUCE, TOKENS, VALUES, Wish, judge
from ebbtide.runtime.distributed.collective_cache import CollectiveCache
from ebbtide.runtime.distributed.gradient_reducer import GradientReducer
from ebbtide.runtime.distributed.rank_groups import FirstWait, Pending, RankGroup
from ebbtide.runtime.distributed.ranks import Ranks
from ebbtide.runtime.movement.eviction import EXCHANGE
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.parameters.binding import ModelData, laid_like
from ebbtide.runtime.parameters.unmanaged import Unmanaged

FAILED = 1
APART = 4096
"""Elements that ranks send each other at a time where exchanges have no room for them."""


class _Gathering:
    """The end of a gather; the slice that is sent stays where it is until then."""

    __slots__ = ("_lease", "_work")

    def __init__(self, work: Pending, source: Chunk) -> None:
        self._work, self._lease = work, source.lease()

    def wait(self) -> None:
        with self._lease:
            self._work.wait()

    synchronize = wait

    def done(self) -> bool:
        return self._work.done()

    @property
    def timing(self) -> FirstWait:
        return self._work.timing


class ChunkSharing:
    def __init__(
        self, data: ModelData, places: FetchOnDemand, ranks: Ranks, kernels: Kernels, in_backward: bool
    ) -> None:
        """`kernels`: the device's. `in_backward`: an update follows as soon as gradients are reduced."""
        self.ranks = ranks
        self._data, self._store, self._places, self._kernels = data, data.store, places, kernels
        self._round = 0
        self._ahead = CollectiveCache()
        self._any_waits = False
        self._short = False
        """Some rank lacks room."""
        self._checks: Sequence[int] = ()
        """By rank, of what they agreed on last."""
        self._crews = {size: RankGroup(ranks, size) for size in _crew_sizes(data, ranks)}
        self.reductions = GradientReducer(
            data, places, self._crews, kernels, in_backward, self._ahead.refused
        )
        data.complete_by(self)
        places.gather_by(self)
        places.room.add_giver(EXCHANGE, self.reductions)
        self.close = weakref.finalize(self, self.reductions.received.close)

    # -- what a pass wants ----------------------------------------------------------------------------

    def turn(self) -> None:
        """A training pass begins, or a step's updates have all been given out."""
        self._keep_all()
        self.reductions.waiting.clear()
        self._ahead.stop()
        self._round += 1

    def begin(self, micro: int, short: bool) -> bool:
        """A forward pass begins on all ranks. `short`: this one has no room for it but with exchanges in slices; whether
        some rank says so."""
        while self._serve(Wish(BEGIN, micro, self._round, int(short))) != (BEGIN, micro):
            continue
        return self._short

    def gather(self, index: int) -> None:
        """Starts bringing a whole chunk to the device; other ranks are served until it is this one's turn."""
        if self.reductions.in_slices:
            self._make_room(index)  # before they count on it, for nothing could be received elsewhere
        while self._serve(Wish(GATHER, index, self._round)) != (GATHER, index):
            continue

    def complete(self, index: int) -> None:
        """A chunk has all the gradients that it will get in this pass."""
        reductions = self.reductions
        marks = zlib.crc32(bytes(reductions.gradients.claimed(index)))
        wish = Wish(REDUCE, index, self._round, marks)
        while True:
            reductions.hear()
            if index in reductions.waiting:
                return  # it was not complete when it was to be reduced
            served = self._serve(wish)
            if served == wish.what:
                return
            if served is None:
                reductions.waiting.add(index)

    def end(self, left: Callable[[], Iterable[int]]) -> None:
        """The pass is over; `left`: chunks with gradients that were not reduced."""
        wish: Wish | None = None
        mine: list[int] = []
        while wish is None or self._serve(wish) != wish.what:
            self._keep_all()
            mine = sorted(left())
            wish = Wish(END, len(mine), self._round)
        everywhere = self.ranks.objects(mine) if self._any_waits else []
        for index in sorted(set().union(*everywhere)):
            self.reductions.end(index, self._some(index))
        self.reductions.finish()
        self.reductions.waiting.clear()

    # -- serving --------------------------------------------------------------------------------------

    def meet(self, deed: int, subject: int = 0, check: int = 0) -> Sequence[int]:
        """All ranks do the same now; those that gather chunks before are served. The `check` that each rank gave."""
        while self._serve(Wish(deed, subject, self._round, check)) != (deed, subject):
            continue
        return self._checks

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
        self._store.traffic.count(WIRE, count)
        return count

    def _serve(self, wish: Wish) -> tuple[int, int] | None:
        """One thing that all ranks do together, by what they want; None where that is nothing."""
        promised = self._keep_promise(wish)
        if promised is not None:
            return promised
        self.reductions.finish()
        with self._store.traffic.journal.at(RANKS):
            wishes = self.ranks.agree(wish._replace(used=self._ahead.wanted))
        self._ahead.heard(max(one.used for one in wishes))
        served = judge(wish, wishes)
        wanting = [rank for rank, one in enumerate(wishes) if one.what == served]
        self._checks = [one.check for one in wishes]
        self._remember(wishes, len(wanting))
        if served is None:
            return None
        deed, subject = served
        if deed == GATHER:
            self._gather(subject, wanting)
        elif deed == END:
            self._any_waits = any(one.subject for one in wishes)
        elif deed == BEGIN:
            self._short = any(one.check for one in wishes)
        elif deed == REDUCE:
            same = len(set(self._checks)) == 1
            claimed = self.reductions.gradients.claimed(subject) if same else self._some(subject)
            self.reductions.start(subject, claimed)
        return served

    def _remember(self, wishes: Sequence[Wish], wanting: int) -> None:
        """What was agreed on, for the next time. `wanting`: how many ranks want what is done."""
        first = min(wishes, key=lambda one: (one.deed != GATHER, one.round, one.subject))
        alike = wanting == self.ranks.size and all(one.check == first.check for one in wishes)
        if first.deed in (GATHER, REDUCE) and alike:
            self._ahead.did(first.item)
        elif first.deed == BEGIN and alike and not first.check:  # in slices there is no room for promises
            self._ahead.begin()
        elif all(one.deed == END for one in wishes):
            self._ahead.end()
        else:
            self._ahead.agreed(first.deed, first.subject if first.deed in (GATHER, REDUCE, TOKENS) else 0)

    def _keep_all(self) -> None:
        """What is promised is done, and nothing is under way any more."""
        while self._keep_promise(None) is not None:
            continue
        self.reductions.finish()

    def _keep_promise(self, wish: Wish | None) -> tuple[int, int] | None:
        """Does what was promised next, if there is something, whether it is what is wanted or not."""
        self.reductions.hear()
        item = self._ahead.promised
        if item is None:
            return None
        deed, index, _ = item
        wanted = wish is not None and wish.item == item
        if deed == REDUCE:
            self._ahead.kept(wanted)
            self.reductions.announce(index, wanted)
            return deed, index
        if wanted:
            self._gather(index, range(self.ranks.size))
        else:
            self._take_part(index)
        self._ahead.kept(wanted)
        return deed, index

    def _make_room(self, index: int) -> None:
        """For a slice and what is gathered from all."""
        source, room = self._data.parameter_chunk(index), self._places.room
        with self._places.placed(source, "device"), room.together([source]):
            room.make_for(self._store.get(WHOLE, index), "device")

    def _gather_beside(self, source: Chunk, crew: RankGroup, wanting: Sequence[int]) -> bool:
        """Takes part in a gather for which this rank has no room: the others would wait for it. False where gradients
        are exchanged in slices, for then it has none for this either."""
        count = crew.size * source.nbytes
        if self.reductions.in_slices or self.reductions.received.size < count:
            return False
        self.reductions.finish()
        memory = self.reductions.received.take(count)
        mine = crew.part(memory, crew.rank)
        copy_out(self._store, source, 0, mine.view(source.dtype))
        if len(wanting) == crew.size:
            crew.gather(memory, mine).wait()
        else:
            crew.pass_on(memory if crew.rank in wanting else None, mine, wanting)
        return True

    def _take_part(self, index: int) -> None:
        """In a gather that was promised, and that this rank has no use for."""
        source, whole = self._data.parameter_chunk(index), self._store.get(WHOLE, index)
        self._data.notice_writes(index)
        self.reductions.finish()  # what came of it is where this goes
        crew = self._crew(index)
        try:
            with self._places.placed(source, "device"):
                assert source.device is not None
                crew.gather(self.reductions.received.take(whole.nbytes), source.device).wait()
        except BudgetError:
            if not self._gather_beside(source, crew, range(crew.size)):
                raise
        self._store.traffic.count(WIRE, (crew.size - 1) * source.nbytes, index)

    def _gather(self, index: int, wanting: Sequence[int]) -> None:
        """`wanting`: of all ranks."""
        source, whole = self._data.parameter_chunk(index), self._store.get(WHOLE, index)
        crew = self._crew(index)
        wanting = crew.among(wanting)
        if not wanting:
            return
        wants = crew.rank in wanting
        self._data.notice_writes(index)
        with ExitStack() as placed:
            try:
                if wants:
                    self._make_room(index)
                placed.enter_context(self._places.placed(source, "device"))
            except BudgetError:
                if wants and self._gather_straight(source, whole, crew, wanting):
                    return
                if not self._gather_beside(source, crew, wanting) or wants:
                    raise
                return
            mine = source.device
            assert mine is not None
            if not wants:
                crew.pass_on(None, mine, wanting)
                return

            def start(memory: torch.Tensor) -> tuple[Event, int]:
                work = crew.fill(memory, mine, wanting)
                return OVER if work is None else _Gathering(work, source), (len(wanting) - 1) * source.nbytes

            self._store.gather(whole, start)

    def _gather_straight(self, source: Chunk, whole: Chunk, crew: RankGroup, wanting: Sequence[int]) -> bool:
        """Without room for the slice beside the whole: it goes from where it is to its place there. Plans do not foresee
        it where they had the whole stay from its last use on, and it left for something that came in another order."""
        try:
            self._places.room.make_for(whole, "device")
        except BudgetError:
            return False

        def start(memory: torch.Tensor) -> tuple[Event, int]:
            mine = crew.part(memory, crew.rank)
            copy_out(self._store, source, 0, mine.view(source.dtype))
            return crew.fill(memory, mine, wanting) or OVER, (len(wanting) - 1) * source.nbytes

        self._store.gather(whole, start)
        return True

    def _crew(self, index: int) -> RankGroup:
        return self._crews[self._store.crew(index)]

    def _some(self, index: int) -> list[bool]:
        """By member of a chunk, whether some rank has a gradient."""
        everywhere = self.ranks.objects(self.reductions.gradients.here(index))
        return [any(column) for column in zip(*everywhere, strict=True)]

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
            flat = tensor.reshape(-1)
            if tensor.numel() and (found := self.same(flat)) is not flat:
                tensor.copy_(found.view(tensor.shape))

    def average(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Parameters that every rank has get their mean gradients, where those lie."""
        here = [name for name, parameter in parameters.items() if parameter.grad is not None]
        found, room = self._told(here)
        for name in sorted(set().union(*found)):
            parameters[name].grad = self._mean(parameters[name], room, in_place=True)

    def mean(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The mean gradient over the ranks of one of them, if some rank has one."""
        found, room = self._told(parameter.grad is not None)
        return self._mean(parameter, room, in_place=False) if any(found) else None

    def _told(self, mine: Any) -> tuple[list[Any], int]:
        """What each rank has, and the bytes that all of them have for exchanges, while there is none."""
        self.reductions.finish()
        rows = self.ranks.objects((mine, self.reductions.received.size))
        return [row[0] for row in rows], min(row[1] for row in rows)

    def _mean(self, parameter: nn.Parameter, room: int, in_place: bool) -> torch.Tensor:
        shape, stride, grad = tuple(parameter.shape), parameter.stride(), parameter.grad
        if grad is None:
            flat = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        else:
            flat = laid_like(grad.detach(), shape, stride, parameter.dtype)
        into = flat if in_place else torch.empty_like(flat)
        crew = self._crews[self.ranks.size]
        memory = self._received(flat, room)
        for start, count in portions(flat.numel(), memory.numel() // crew.size):
            received = memory[: crew.size * count]
            crew.gather(received, flat[start : start + count]).wait()
            self._kernels.sum_ranks(into[start : start + count], received, 1.0 / crew.size)
        return into.as_strided(shape, stride)

    def _received(self, flat: torch.Tensor, room: int) -> torch.Tensor:
        """Where parts of it come from all ranks, as many on each of them."""
        each = self.ranks.size * flat.dtype.itemsize
        if room >= each and flat.device == self._store.backend.device:
            return self.reductions.received.take(room // each * each).view(flat.dtype)
        return torch.empty(self.ranks.size * min(flat.numel(), APART), dtype=flat.dtype, device=flat.device)


def _crew_sizes(data: ModelData, ranks: Ranks) -> list[int]:
    """In the order in which all ranks make their groups."""
    return sorted({ranks.size, *(size for size in data.layout.spread.values() if size > 1)}, reverse=True)
