"""The processes that share chunks: what one sends to the others, and what they agree on before.

Collectives must be called by all ranks in one order. Ranks may want different things all the same: one skips a layer, or
only one has a gradient for some parameter. So before each collective every rank says what it wants (`agree`), on a
group of its own that needs no GPU; what to do then follows from what all said, and is the same everywhere.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ebbtide.errors import ConfigError, StateError

GATHER, REDUCE, END, LOSS, STEP, VALUES, START = range(1, 8)
WISHES = {
    GATHER: "gathers chunk",
    REDUCE: "reduces the gradients of chunk",
    END: "ends a backward pass; chunks left:",
    LOSS: "begins a backward pass, number",
    STEP: "takes a step, number",
    VALUES: "reads or writes values by name, of parameter",
    START: "begins with model",
}


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch know it by another name, and warn of the old one."""


class Wish(NamedTuple):
    """What a rank wants next."""

    deed: int
    subject: int
    """A chunk, or what else it is about; at the end of a pass, how many chunks wait."""
    round: int
    """How many passes it has begun, and steps it has ended."""
    check: int = 0
    """Equal where ranks know the same of what they want."""

    def __str__(self) -> str:
        return f"{WISHES[self.deed]} {self.subject} (round {self.round})"


class Ranks:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0
        """Bytes that this rank sent in collectives."""
        self._control, self._engine = _control_of(group)

    # -- agreeing -------------------------------------------------------------------------------------

    def agree(self, wish: Wish) -> list[Wish]:
        """What each rank wants, by rank."""
        found = self.numbers((self._engine, *wish))
        if any(row[0] != self._engine for row in found):
            raise StateError(
                "ranks are at different engines of theirs: all of them must call all engines' methods in the same order"
            )
        return [Wish(*row[1:]) for row in found]

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

    def require_same(self, what: Mapping[str, Any]) -> None:
        """Raises on all ranks where one has something else, and says what."""
        everywhere = self.objects(dict(what))
        for rank, theirs in enumerate(everywhere):
            for key in sorted({*everywhere[0], *theirs}):
                first, other = everywhere[0].get(key), theirs.get(key)
                if first != other:
                    raise ConfigError(
                        f"ranks must be started alike: {key} is {first!r} on rank 0 and {other!r} on rank {rank}"
                    )

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


_controls: dict[tuple[int, ...], list[Any]] = {}
"""By the members of a group: one of their own for what they agree on, and the engines that they have had."""


def _control_of(group: dist.ProcessGroup | None) -> tuple[Any, int]:
    """A group that needs no GPU and carries no data, and the number of the engine that asks."""
    members = tuple(dist.get_process_group_ranks(group))
    key = (id(dist.group.WORLD), *members)
    if key not in _controls:
        made = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        _controls[key] = [made, 0]
    _controls[key][1] += 1
    return _controls[key][0], _controls[key][1]


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
