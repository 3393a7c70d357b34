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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ebbtide.errors import ConfigError, RanksError, StateError
from ebbtide.memory.ssd_passage import alias
from ebbtide.runtime.distributed.agreement import Wish
from ebbtide.runtime.distributed.keep_alive import watched

Host = tuple[str, int]
ROLL_CALL = 5.0
"""Seconds that others have to say that they are there."""


all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch know it by another name, and warn of the old one."""


def lent(memory: torch.Tensor) -> torch.Tensor:
    """What a collective is given: on a CPU its thread holds the tensors a moment longer than its end, and use counts say
    who may be evicted. Whoever starts it keeps the memory."""
    return alias(memory.view(torch.uint8)) if memory.is_cpu else memory


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
        self.members, self._world = members_of(group)[1:], dist.get_world_size()
        self.broken = False
        """Whether a collective failed, for a rank is gone."""
        self.sent = 0
        """Bytes that this rank sent in collectives."""
        self.agreements = 0
        self.control, self._engine = _control_of(group)
        """Carries no data, and needs no GPU."""
        self.timeout = _timeout_of(group)

    @property
    def patience(self) -> float:
        """Seconds that others are waited for who may be writing a large file."""
        return _half_an_hour_or(self.timeout).total_seconds()

    # -- agreeing -------------------------------------------------------------------------------------

    def agree(self, wish: Wish) -> list[Wish]:
        """What each rank wants, by rank."""
        self.agreements += 1
        return [Wish(*row) for row in self._of_this_engine(self.say((self._engine, *wish)))]

    def say_ready(self, ready: bool) -> Callable[[], list[bool]]:
        """Starts telling the others; what is returned waits for theirs, and says which ranks are ready."""
        said = self.say((self._engine, ready))
        return lambda: [bool(row[0]) for row in self._of_this_engine(said)]

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
            here = torch.tensor(mine, dtype=torch.int64, device="cpu")
            found = torch.empty(self.size * len(mine), dtype=torch.int64, device="cpu")
            work = all_gather(found, here, self.control, async_op=True)
        return Saying(work, self, here, found)

    def objects(self, mine: Any) -> list[Any]:
        """Something small of each rank."""
        found: list[Any] = [None] * self.size
        with self.naming():
            dist.all_gather_object(found, mine, group=self.control)
        return found

    def require_same(self, what: Mapping[str, Any]) -> None:
        """Raises on all ranks where one has something else, and says what."""
        refuse_unlike(self.objects(dict(what)))

    def sums(self, mine: torch.Tensor) -> torch.Tensor:
        """Numbers of each rank, which are on the host: (rank, number)."""
        found = torch.empty(self.size * mine.numel(), dtype=mine.dtype, device="cpu")
        with self.naming():
            all_gather(found, mine, self.control)
        self.sent += (self.size - 1) * mine.nbytes
        return found.view(self.size, -1)

    def spread(self, values: torch.Tensor, rank: int) -> None:
        """What one rank has, on the host, for all."""
        with self.naming():
            dist.broadcast(values, group=self.control, group_src=rank)

    # -- moving ---------------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """On a CPU not longer than the group's timeout: some of gloo's operations know none, and wait for ever where a
        link is cut without a word. On a machine with GPUs that is the watchdog's."""
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)

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
            work = dist.all_to_all_single(lent(there), lent(here), into, out, group=self.group, async_op=True)
            self.wait(work)
        return count

    # -- who is gone ----------------------------------------------------------------------------------

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A collective that fails says who is no longer there."""
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise lost(self.members, self.members[self.rank], self._world, error) from error


def refuse_unlike(everywhere: Sequence[Mapping[str, Any]]) -> None:
    """What each rank was started with, by what to call it."""
    for rank, theirs in enumerate(everywhere):
        for key in sorted({*everywhere[0], *theirs}):
            first, other = everywhere[0].get(key), theirs.get(key)
            if first != other:
                raise ConfigError(
                    f"ranks must be started alike: {key} is {first!r} on rank 0 and {other!r} on rank {rank}"
                )


def naming(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Around collectives that torch's code calls on the ranks' control group."""
    return nullcontext() if ranks is None else ranks.naming()


def lost(members: Sequence[int], rank: int, size: int, error: RuntimeError) -> RanksError:
    """What a collective's failure means, for this one of the members. All numbers are the launcher's."""
    gone = _roll_call(members, rank)
    who = ", ".join(f"rank {one}" for one in gone) or "another rank"
    first = str(error).strip().splitlines()[0]
    return RanksError(
        f"{who} of {size} is gone or does not answer ({first}); this one cannot go on. Started again by torchrun "
        "(--max-restarts), `ebbtide train --resume auto` goes on from the newest checkpoint"
    )


def _roll_call(members: Sequence[int], rank: int) -> list[int]:
    """Who does not answer another way: the store that brought the ranks together. It may be gone itself, or out of
    reach, and then keeps whoever asks it waiting: another thread asks."""
    gone: list[int] = []
    asking = threading.Thread(
        target=_ask_for_all, args=(members, rank, gone), name="ebbtide-roll-call", daemon=True
    )
    asking.start()
    asking.join(2 * ROLL_CALL)
    return [] if asking.is_alive() else gone


def _ask_for_all(members: Sequence[int], rank: int, gone: list[int]) -> None:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"ebbtide/here/{rank}", "")
    except Exception:
        return
    until = time.monotonic() + ROLL_CALL
    for other in members:
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


def _control_of(group: dist.ProcessGroup | None) -> tuple[Any, int]:
    """A group that needs no GPU and carries no data, and the number of the engine that asks."""
    key = members_of(group)
    if key not in _controls:
        # Whoever is late for a word may be evaluating, or writing a large file: half an hour at least.
        timeout = _timeout_of(group)
        with watched((timeout or dist.default_pg_timeout).total_seconds()):
            made = new_group(key[1:], backend="gloo", timeout=_half_an_hour_or(timeout))
            dist.barrier(made)  # now at the latest they are connected
        _controls[key] = [made, 0]
    _controls[key][1] += 1
    return _controls[key][0], _controls[key][1]


def _half_an_hour_or(timeout: timedelta | None) -> timedelta:
    """At least torch's own patience; the group's, where that is longer."""
    return max(timeout or dist.default_pg_timeout, dist.default_pg_timeout)


def members_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Of this world."""
    return (id(dist.group.WORLD), *dist.get_process_group_ranks(group))


def new_group(members: Sequence[int], **options: Any) -> Any:
    """With the ranks that the members have in the user's group."""
    _know_as_many(members)
    if list(members) != sorted(members):
        options["sort_ranks"] = False
    return dist.new_group(list(members), use_local_synchronization=True, **options)


_rounds: dict[tuple[int, ...], int] = {}


def _know_as_many(members: Sequence[int]) -> None:
    """A group that only its members make is named by how many groups a process knows of, and they wait for each other
    under that name. Where some have been in more groups of the user's, the others make some of their own."""
    world = dist.distributed_c10d._world
    key = tuple(members)
    _rounds[key] = _rounds.get(key, 0) + 1  # another world may find what this one left in the store
    store, here = dist.distributed_c10d._get_default_store(), dist.get_rank()
    place = f"ebbtide/groups/{'-'.join(map(str, members))}/{_rounds[key]}"
    store.set(f"{place}/{here}", str(len(world.pg_names)))
    most = max(int(store.get(f"{place}/{member}")) for member in members)
    while len(world.pg_names) < most:
        dist.new_group([here], backend="gloo", use_local_synchronization=True)


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
