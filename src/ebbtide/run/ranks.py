"""The processes that share chunks: what one sends to the others, and what they agree on before.

Collectives must be called by all ranks in one order. Ranks may want different things all the same: one skips a layer, or
only one has a gradient for some parameter. So before each collective every rank says what it wants (`agree`), on a
group of its own that needs no GPU; what to do then follows from what all said, and is the same everywhere.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ebbtide.backend import Event, Stream
from ebbtide.errors import ConfigError, RanksError, StateError
from ebbtide.memory.passage import alias
from ebbtide.run.wishes import Wish

Host = tuple[str, int]
ROLL_CALL = 5.0
"""Seconds that others have to say that they are there."""


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch know it by another name, and warn of the old one."""


def _lent(memory: torch.Tensor) -> torch.Tensor:
    """What a collective is given: on a CPU its thread holds the tensors a moment longer than its end, and use counts say
    who may be evicted. Whoever starts it keeps the memory."""
    return alias(memory.view(torch.uint8)) if memory.is_cpu else memory


class Pending:
    """A collective under way."""

    __slots__ = ("_ranks", "_work")

    def __init__(self, work: Any, ranks: Ranks) -> None:
        self._work, self._ranks = work, ranks

    def wait(self) -> None:
        with self._ranks.naming():
            self._ranks.wait(self._work)

    synchronize = wait

    def done(self) -> bool:
        return bool(self._work.is_completed())


class Saying:
    """A few integers of each rank, on their way."""

    __slots__ = ("_found", "_here", "_ranks", "_work")

    def __init__(self, work: Any, ranks: Ranks, here: torch.Tensor, found: torch.Tensor) -> None:
        self._work, self._ranks, self._here, self._found = work, ranks, here, found

    def heard(self) -> list[list[int]]:
        """By rank."""
        with self._ranks.naming():
            self._work.wait()
        rows: list[list[int]] = self._found.view(self._ranks.size, -1).tolist()
        return rows


class Ranks:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0
        """Bytes that this rank sent in collectives."""
        self.agreements = 0
        self.control, self._engine = _control_of(group)
        """Carries no data, and needs no GPU."""
        self.timeout = _timeout_of(group)

    @property
    def patience(self) -> float:
        """Seconds that others are waited for."""
        return (self.timeout or dist.default_pg_timeout).total_seconds()

    # -- agreeing -------------------------------------------------------------------------------------

    def agree(self, wish: Wish) -> list[Wish]:
        """What each rank wants, by rank."""
        self.agreements += 1
        return [Wish(*row) for row in self._of_this_engine(self.say((self._engine, *wish)))]

    def say_ready(self, ready: bool) -> Callable[[], bool]:
        """Starts telling the others; what is returned waits for theirs, and says whether all are ready."""
        said = self.say((self._engine, ready))
        return lambda: all(row[0] for row in self._of_this_engine(said))

    def _of_this_engine(self, said: Saying) -> list[list[int]]:
        found = said.heard()
        if any(row[0] != self._engine for row in found):
            raise StateError(
                "ranks are at different engines of theirs: all of them must call all engines' methods in the same order"
            )
        return [row[1:] for row in found]

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """A few integers of each rank."""
        return self.say(mine).heard()

    def say(self, mine: Sequence[int]) -> Saying:
        """Starts telling the others a few integers, and hearing theirs."""
        with self.naming(), _disable_current_modes():
            here = torch.tensor(mine, dtype=torch.int64)
            found = torch.empty(self.size * len(mine), dtype=torch.int64)
            work = _all_gather(found, here, self.control, async_op=True)
        return Saying(work, self, here, found)

    def objects(self, mine: Any) -> list[Any]:
        """Something small of each rank."""
        found: list[Any] = [None] * self.size
        with self.naming():
            dist.all_gather_object(found, mine, group=self.control)
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
        with self.naming():
            _all_gather(found, mine, self.control)
        self.sent += (self.size - 1) * mine.nbytes
        return found.view(self.size, -1)

    def spread(self, values: torch.Tensor, rank: int) -> None:
        """What one rank has, on the host, for all."""
        with self.naming():
            dist.broadcast(values, group=self.control, group_src=rank)

    # -- moving ---------------------------------------------------------------------------------------

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Starts filling `whole` with the slices of all ranks."""
        self.sent += (self.size - 1) * mine.nbytes
        with self.naming(), _disable_current_modes():
            return Pending(_all_gather(_lent(whole), _lent(mine), self.group, async_op=True), self)

    def pass_on(self, whole: torch.Tensor | None, mine: torch.Tensor, wanting: Sequence[int]) -> None:
        """The same where only some ranks want it; the others have no `whole`."""
        if whole is not None:
            self._part(whole, self.rank).copy_(mine)
        with self.naming(), _disable_current_modes():
            there, here = None if whole is None else _lent(whole), _lent(mine)
            moves = []
            for rank in range(self.size):
                if rank == self.rank:
                    continue
                if there is not None:
                    moves.append(self._p2p(dist.irecv, self._part(there, rank), rank))
                if rank in wanting:
                    moves.append(self._p2p(dist.isend, here, rank))
                    self.sent += mine.nbytes
            for work in dist.batch_isend_irecv(moves) if moves else ():
                self.wait(work)

    def wait(self, work: Any) -> None:
        """On a CPU not longer than the group's timeout: some of gloo's operations know none, and wait for ever where a
        link is cut without a word. On a machine with GPUs that is the watchdog's."""
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)

    def _p2p(self, deed: Any, memory: torch.Tensor, rank: int) -> Any:
        return dist.P2POp(deed, memory, group=self.group, group_peer=rank)

    def _part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        each = whole.numel() // self.size
        return whole[rank * each : (rank + 1) * each]

    def swap(
        self, received: torch.Tensor, rows: torch.Tensor, came: Sequence[int], sent: Sequence[int]
    ) -> int:
        """Sends each rank its rows, and receives others: how many of each rank, and to each rank. Bytes that were sent
        to others."""
        width = rows.shape[1] * rows.dtype.itemsize
        count = width * (sum(sent) - sent[self.rank])
        self.sent += count
        with self.naming(), _disable_current_modes():
            there, here = (one.reshape(-1).view(torch.uint8) for one in (received, rows))
            into, out = ([width * count for count in counts] for counts in (came, sent))
            work = dist.all_to_all_single(
                _lent(there), _lent(here), into, out, group=self.group, async_op=True
            )
            self.wait(work)
        return count

    # -- who is gone ----------------------------------------------------------------------------------

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A collective that fails says who is no longer there."""
        try:
            yield
        except RuntimeError as error:
            raise lost(self.rank, self.size, error) from error


class Exchanges:
    """Exchanges of gradients, which a thread starts: one for all engines of the same members, so that they start in the
    order in which they were asked for. The group is our own: the user's has the user's collectives, at any place of a
    pass."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        key = _members(ranks.group)
        if key not in _crossings:
            backend = dist.get_backend_config(ranks.group)
            made = _new_group(key[1:], backend=backend, timeout=ranks.timeout)
            _crossings[key] = made, Stream("ebbtide-exchange")
        self._group, self._stream = _crossings[key]

    def submit(self, job: Callable[[], None]) -> Event:
        """On the thread."""
        return self._stream.submit(job)

    def exchange(self, received: torch.Tensor, whole: torch.Tensor) -> Pending:
        """Starts sending each rank its slice of `whole`, and receiving its own from all: by rank."""
        ranks = self._ranks
        ranks.sent += whole.nbytes // ranks.size * (ranks.size - 1)
        with ranks.naming(), _disable_current_modes():
            work = dist.all_to_all_single(_lent(received), _lent(whole), group=self._group, async_op=True)
            return Pending(work, ranks)


def lost(rank: int, size: int, error: RuntimeError) -> RanksError:
    """What a collective's failure means, for this rank."""
    gone = _roll_call(rank, size)
    who = ", ".join(f"rank {one}" for one in gone) or "another rank"
    first = str(error).strip().splitlines()[0]
    return RanksError(
        f"{who} of {size} is gone or does not answer ({first}); this one cannot go on. Started again by torchrun "
        "(--max-restarts), `ebbtide train --resume auto` goes on from the newest checkpoint"
    )


def _roll_call(rank: int, size: int) -> list[int]:
    """Who does not answer another way: the store that brought the ranks together. It may be gone itself, or out of
    reach, and then keeps whoever asks it waiting: another thread asks."""
    gone: list[int] = []
    asking = threading.Thread(
        target=_ask_for_all, args=(rank, size, gone), name="ebbtide-roll-call", daemon=True
    )
    asking.start()
    asking.join(2 * ROLL_CALL)
    return [] if asking.is_alive() else gone


def _ask_for_all(rank: int, size: int, gone: list[int]) -> None:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"ebbtide/here/{rank}", "")
    except Exception:
        return
    until = time.monotonic() + ROLL_CALL
    for other in range(size):
        left = max(0.1, until - time.monotonic())
        try:
            store.wait([f"ebbtide/here/{other}"], timedelta(seconds=left))
        except Exception:
            gone.append(other)


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Of what moves memory of the host; None where there are GPUs, for nobody waits for their streams here."""
    members = group or dist.group.WORLD
    if torch.cuda.is_available() or members is None:
        return None
    try:
        backend = members._get_backend(torch.device("cpu"))
        found: timedelta = backend.options._timeout
    except (RuntimeError, AttributeError):
        return None
    return found


_controls: dict[tuple[int, ...], list[Any]] = {}
"""By the members of a group: one of their own for what they agree on, and the engines that they have had."""
_crossings: dict[tuple[int, ...], tuple[Any, Stream]] = {}
"""By members: a group of their own for exchanges, and the thread that starts them."""


def _control_of(group: dist.ProcessGroup | None) -> tuple[Any, int]:
    """A group that needs no GPU and carries no data, and the number of the engine that asks."""
    key = _members(group)
    if key not in _controls:
        _controls[key] = [_new_group(key[1:], backend="gloo"), 0]
    _controls[key][1] += 1
    return _controls[key][0], _controls[key][1]


def _members(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Of this world."""
    return (id(dist.group.WORLD), *dist.get_process_group_ranks(group))


def _new_group(members: Sequence[int], **options: Any) -> Any:
    """With the ranks that the members have in the user's group."""
    if list(members) != sorted(members):
        options["sort_ranks"] = False
    return dist.new_group(list(members), use_local_synchronization=True, **options)


def open_ranks(group: dist.ProcessGroup | None) -> Ranks | None:
    """The processes of a group (left out, all that torch.distributed has); None where this one is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    return Ranks(group)


def neighbours(ranks: Ranks) -> tuple[int, int]:
    """Which of the ranks on this machine this one is, and how many they are."""
    return among(dict(enumerate(ranks.objects(host()))), ranks.rank)


def host() -> Host:
    """What tells this machine from others."""
    return socket.gethostname(), uuid.getnode()


def among(hosts: Mapping[int, Host], rank: int) -> tuple[int, int]:
    """Which of those on its machine a rank is, and how many they are."""
    here = sorted(other for other, host in hosts.items() if host == hosts[rank])
    return here.index(rank), len(here)


@contextmanager
def all_or_none(ranks: Ranks | None) -> Iterator[None]:
    """What is raised within on one rank is raised on all, for the others would wait for it."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    everywhere = [failed] if ranks is None else ranks.objects(failed)
    if failed is not None:
        raise failed
    for theirs in everywhere:
        if theirs is not None:
            raise theirs
