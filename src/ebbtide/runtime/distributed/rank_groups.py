"""Ranks that have slices of the same chunks: what they send each other.

A crew is all ranks, or for experts that several ranks have, those that have the same ones: a few in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ebbtide.devices import Event, Stream
from ebbtide.runtime.distributed.ranks import Ranks, all_gather, lent, members_of, new_group

_groups: dict[tuple[int, ...], Any] = {}
"""By members, those of crews that are not all ranks."""
_crossings: dict[tuple[int, ...], tuple[Any, Stream]] = {}
"""By members: a group of their own for exchanges, and the thread that starts them."""


class FirstWait:
    """A collective's time, as far as it is known: until it was first waited for. It keeps no collective alive."""

    __slots__ = ("_begun", "_ended")

    def __init__(self) -> None:
        self._begun, self._ended = time.perf_counter(), 0.0

    def over(self) -> None:
        self._ended = self._ended or time.perf_counter()

    def span(self) -> tuple[float, float] | None:
        return (self._begun, self._ended) if self._ended else None


class Pending:
    """A collective under way."""

    __slots__ = ("_ranks", "_work", "timing")

    def __init__(self, work: Any, ranks: Ranks) -> None:
        self._work, self._ranks = work, ranks
        self.timing = FirstWait()

    def wait(self) -> None:
        with self._ranks.naming():
            self._ranks.wait(self._work)
        self.timing.over()

    synchronize = wait

    def done(self) -> bool:
        return bool(self._work.is_completed())


class RankGroup:
    def __init__(self, ranks: Ranks, size: int) -> None:
        """`size`: a divisor of the number of ranks."""
        self.ranks, self.size = ranks, size
        self.first = ranks.rank // size * size
        self.rank = ranks.rank - self.first
        world, *members = members_of(ranks.group)
        self.key = (world, *members[self.first : self.first + size])
        self.group = ranks.group if size == ranks.size else _group_of(self.key, ranks)

    def among(self, wanting: Sequence[int]) -> list[int]:
        """Those of the ranks that belong to the crew, by their place in it."""
        return [rank - self.first for rank in wanting if 0 <= rank - self.first < self.size]

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Starts filling `whole` with the slices of all."""
        self.ranks.sent += (self.size - 1) * mine.nbytes
        with self.ranks.naming(), _disable_current_modes():
            return Pending(all_gather(lent(whole), lent(mine), self.group, async_op=True), self.ranks)

    def fill(self, whole: torch.Tensor, mine: torch.Tensor, wanting: Sequence[int]) -> Pending | None:
        """Starts filling `whole` where this rank is one of those that want it; None where that is over already."""
        if len(wanting) == self.size:
            return self.gather(whole, mine)
        self.pass_on(whole, mine, wanting)
        return None

    def pass_on(self, whole: torch.Tensor | None, mine: torch.Tensor, wanting: Sequence[int]) -> None:
        """The same where only some want it, by their place in the crew; the others have no `whole`."""
        if whole is not None:
            self.part(whole, self.rank).copy_(mine)
        with self.ranks.naming(), _disable_current_modes():
            there, here = None if whole is None else lent(whole), lent(mine)
            moves = []
            for rank in range(self.size):
                if rank == self.rank:
                    continue
                if there is not None:
                    moves.append(self._p2p(dist.irecv, self.part(there, rank), rank))
                if rank in wanting:
                    moves.append(self._p2p(dist.isend, here, rank))
                    self.ranks.sent += mine.nbytes
            for work in dist.batch_isend_irecv(moves) if moves else ():
                self.ranks.wait(work)

    def _p2p(self, deed: Any, memory: torch.Tensor, rank: int) -> Any:
        return dist.P2POp(deed, memory, group=self.group, group_peer=rank)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        each = whole.numel() // self.size
        return whole[rank * each : (rank + 1) * each]


class Exchanges:
    """Exchanges of gradients, which a thread starts: one for all engines of the same members, so that they start in the
    order in which they were asked for. The group is our own: the user's has the user's collectives, at any place of a
    pass."""

    def __init__(self, crew: RankGroup) -> None:
        self._crew, ranks = crew, crew.ranks
        if crew.key not in _crossings:
            made = new_group(crew.key[1:], **_options(ranks))
            _crossings[crew.key] = made, Stream("ebbtide-exchange")
        self._group, self._stream = _crossings[crew.key]

    def submit(self, job: Callable[[], None]) -> Event:
        """On the thread."""
        return self._stream.submit(job)

    def trade(self, received: torch.Tensor, whole: torch.Tensor, at: int, count: int) -> None:
        """Sends each rank `count` bytes of its slice of `whole`, from the slice's byte `at` on, and receives as many of
        its own from all: by rank."""
        crew, ranks, moves = self._crew, self._crew.ranks, []
        for rank in range(crew.size):
            theirs = crew.part(whole, rank)[at : at + count]
            here = received[rank * count : (rank + 1) * count]
            if rank == crew.rank:
                here.copy_(theirs)
            else:
                moves.append(dist.P2POp(dist.irecv, lent(here), group=self._group, group_peer=rank))
                moves.append(dist.P2POp(dist.isend, lent(theirs), group=self._group, group_peer=rank))
        ranks.sent += count * (crew.size - 1)
        with ranks.naming(), _disable_current_modes():
            for work in dist.batch_isend_irecv(moves) if moves else ():
                ranks.wait(work)

    def exchange(self, received: torch.Tensor, whole: torch.Tensor) -> Pending:
        """Starts sending each rank its slice of `whole`, and receiving its own from all: by rank."""
        ranks, size = self._crew.ranks, self._crew.size
        ranks.sent += whole.nbytes // size * (size - 1)
        with ranks.naming(), _disable_current_modes():
            work = dist.all_to_all_single(lent(received), lent(whole), group=self._group, async_op=True)
            return Pending(work, ranks)


def _group_of(key: tuple[int, ...], ranks: Ranks) -> Any:
    if key not in _groups:
        _groups[key] = new_group(key[1:], **_options(ranks))
    return _groups[key]


def _options(ranks: Ranks) -> dict[str, Any]:
    return {"backend": dist.get_backend_config(ranks.group), "timeout": ranks.timeout}
