"""The processes that share chunks: what one sends to the others, and what they agree on before.

Collectives must be called by all ranks in one order. Ranks may want different things all the same: one skips a layer, or
only one has a gradient for some parameter. So before each collective every rank says what it wants (`agree`), on a
group of its own that needs no GPU; what to do then follows from what all said, and is the same everywhere.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

GATHER, REDUCE, END = 1, 2, 3
WISHES = {GATHER: "gathers chunk", REDUCE: "reduces gradients of chunk", END: "ends its pass, waiting for"}


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch know it by another name, and warn of the old one."""


class Wish(NamedTuple):
    """What a rank wants next."""

    deed: int
    subject: int
    """A chunk; at the end, how many of them wait."""
    round: int
    """How many passes it has begun."""
    check: int = 0
    """Equal where ranks know the same of what they want."""

    def __str__(self) -> str:
        return f"{WISHES[self.deed]} {self.subject} in round {self.round}"


class Ranks:
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0
        """Bytes that this rank sent in collectives."""
        self._control = group
        if dist.get_backend(group) != "gloo":
            members = dist.get_process_group_ranks(group)
            self._control = dist.new_group(members, backend="gloo", use_local_synchronization=True)

    # -- agreeing -------------------------------------------------------------------------------------

    def agree(self, wish: Wish) -> list[Wish]:
        """What each rank wants, by rank."""
        return [Wish(*row) for row in self.numbers(wish)]

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """A few integers of each rank."""
        here = torch.tensor(mine, dtype=torch.int64)
        found = torch.empty(self.size * len(mine), dtype=torch.int64)
        _all_gather(found, here, self._control)
        return [[int(number) for number in row] for row in found.view(self.size, -1).tolist()]

    def objects(self, mine: Any) -> list[Any]:
        """Something small of each rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._control)
        return found

    def sums(self, mine: torch.Tensor) -> torch.Tensor:
        """Numbers of each rank, which are on the host: (rank, number)."""
        found = torch.empty(self.size * mine.numel(), dtype=mine.dtype)
        _all_gather(found, mine, self._control)
        self.sent += (self.size - 1) * mine.nbytes
        return found.view(self.size, -1)

    def spread(self, values: torch.Tensor, rank: int) -> None:
        """What one rank has, on the host, for all."""
        dist.broadcast(values, group=self._control, group_src=rank)

    # -- moving ---------------------------------------------------------------------------------------

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        """Starts filling `whole` with the slices of all ranks."""
        self.sent += (self.size - 1) * mine.nbytes
        return _all_gather(whole, mine, self.group, async_op=True)

    def pass_on(self, whole: torch.Tensor | None, mine: torch.Tensor, wanting: Sequence[int]) -> None:
        """The same where only some ranks want it; the others have no `whole`."""
        moves = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if whole is not None:
                moves.append(self._p2p(dist.irecv, self._part(whole, rank), rank))
            if rank in wanting:
                moves.append(self._p2p(dist.isend, mine, rank))
                self.sent += mine.nbytes
        if whole is not None:
            self._part(whole, self.rank).copy_(mine)
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()

    def _p2p(self, deed: Any, memory: torch.Tensor, rank: int) -> Any:
        return dist.P2POp(deed, memory, group=self.group, group_peer=rank)

    def _part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        each = whole.numel() // self.size
        return whole[rank * each : (rank + 1) * each]

    def exchange(self, received: torch.Tensor, whole: torch.Tensor) -> Any:
        """Starts sending each rank its slice of `whole`, and receiving its own from all: by rank."""
        self.sent += whole.nbytes // self.size * (self.size - 1)
        return dist.all_to_all_single(received, whole, group=self.group, async_op=True)


def open_ranks(group: dist.ProcessGroup | None) -> Ranks | None:
    """The processes of a group (left out, all that torch.distributed has); None where this one is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    return Ranks(group)


def neighbours(ranks: Ranks) -> tuple[int, int]:
    """Which of the ranks on this machine this one is, and how many they are."""
    hosts = ranks.objects((socket.gethostname(), uuid.getnode()))
    here = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    return here.index(ranks.rank), len(here)
