"""Where saved storages are while they are not on the device: on the host in one piece, or on SSD.

A shelf promises room for what a plan sends to it, takes storages, and gives them back. `Shelved.out` says when the
device's memory can go: not before the bytes are where they stay, so a write that fails loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from ebbtide.devices.device import Event
from ebbtide.errors import BudgetError, IntegrityError
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.memory.disk.space import Extent
from ebbtide.memory.links import SSD_READ, SSD_WRITE, TO_DEVICE, TO_HOST
from ebbtide.memory.ssd_passage import Passage
from ebbtide.planner.activation_trips import ActivationTrips
from ebbtide.planner.sizes import BLOCK, PASSAGE, PASSING, passage_slot
from ebbtide.units import round_up

TAG = "activations"
Clear = Callable[[], Callable[[int], None] | None]
"""Gives what makes room of so many bytes on the host, as far as that can be done."""


def _make_room(clear: Clear, count: int) -> None:
    made = clear()
    if made is not None:
        made(count)


@dataclass(slots=True, eq=False)
class StoredActivation:
    """A storage's copy elsewhere."""

    shelf: ActivationStore
    number: int
    nbytes: int
    out: Event
    memory: torch.Tensor | None = None
    extents: Sequence[Extent] = ()

    def back(self, flat: torch.Tensor) -> Event:
        return self.shelf.fetch(self, flat)

    def give_back(self) -> None:
        self.shelf.release(self)


class ActivationStore(Protocol):
    links: tuple[str, str]
    """What a storage waits for on its way here, and on its way back."""

    def prepare(self, plan: ActivationTrips | None) -> None:
        """Makes sure of room for a pass under the plan."""

    def end(self) -> None:
        """The pass is over."""

    def put(self, number: int, flat: torch.Tensor) -> StoredActivation:
        """Starts copying a storage here. Raises BudgetError where there is no room."""

    def fetch(self, copy: StoredActivation, flat: torch.Tensor) -> Event:
        """Starts filling `flat`."""

    def release(self, copy: StoredActivation) -> None:
        """Nobody wants the copy any more, and nothing reads or writes it."""

    def check(self) -> None: ...

    def close(self) -> None: ...


class HostStore:
    links = (TO_HOST, TO_DEVICE)

    def __init__(self, store: ChunkStore, clear: Clear) -> None:
        self._backend, self._ledger, self._traffic = store.backend, store.ledger, store.traffic
        self._clear = clear
        self._quota = 0
        """Bytes that are reserved for what the plan will send."""
        self._held = 0

    def prepare(self, plan: ActivationTrips | None) -> None:
        """As far as there is room by now."""
        if plan is not None:
            _make_room(self._clear, plan.host_bytes)
            self._quota = min(plan.host_bytes, max(0, self._ledger.room("host")))
            self._ledger.reserve("host", TAG, self._quota)

    def end(self) -> None:
        self._ledger.release("host", TAG, self._quota)
        self._quota = 0

    def put(self, number: int, flat: torch.Tensor) -> StoredActivation:
        count = flat.numel()
        beyond = count > self._quota
        if beyond:
            _make_room(self._clear, count)
            self._ledger.reserve("host", TAG, count)
        try:
            memory = self._backend.allocate("host", count)
        except BaseException:
            if beyond:
                self._ledger.release("host", TAG, count)
            raise
        self._quota -= 0 if beyond else count
        self._held += count
        out = self._backend.copy(memory, flat, TO_HOST)
        self._traffic.count(TO_HOST, count, None, TAG, [out])
        return StoredActivation(self, number, count, out, memory)

    def fetch(self, copy: StoredActivation, flat: torch.Tensor) -> Event:
        assert copy.memory is not None
        back = self._backend.copy(flat, copy.memory, TO_DEVICE)
        self._traffic.count(TO_DEVICE, copy.nbytes, None, TAG, [back])
        return back

    def release(self, copy: StoredActivation) -> None:
        assert copy.memory is not None
        self._held -= copy.nbytes
        self._backend.free("host", copy.memory)
        self._ledger.release("host", TAG, copy.nbytes)

    def check(self) -> None:
        held, reserved = self._held + self._quota, self._ledger.tags["host"][TAG]
        if held > reserved:  # other engines may reserve under the same tag
            raise IntegrityError(f"activations hold {held} bytes of host memory, reserved are {reserved}")

    def close(self) -> None:
        self.end()


class SsdStore:
    """Extents are reserved once for a plan, and used in every pass again; what passes are buffers."""

    links = (SSD_WRITE, SSD_READ)

    def __init__(self, store: ChunkStore, clear: Clear) -> None:
        assert store.ssd_space is not None
        self._store, self._ledger, self._disk = store, store.ledger, store.ssd_space.disk
        self._staged = store.has_host
        self._clear = clear
        self._wanted: Mapping[int, int] = {}
        """By number, bytes of what the plan sends here."""
        self._places: dict[int, Sequence[Extent]] = {}
        """Of these, the extents that nobody uses now."""
        self._held = 0
        """Bytes of all extents."""
        self._used = 0
        """Copies that are kept here."""
        self._passage: Passage | None = None
        self._staging = 0

    # -- room -----------------------------------------------------------------------------------------

    def plan(self, plan: ActivationTrips | None) -> None:
        """What another plan had sent here gives its room back."""
        wanted = {} if plan is None else {t.number: t.bytes for t in plan.on_ssd}
        if wanted != self._wanted:
            self._wanted = wanted
            for number in [n for n, extents in self._places.items() if _bytes(extents) != wanted.get(n)]:
                self._free(self._places.pop(number))
        if not self._used and (not wanted or self._slot_for(wanted) != self._slot):
            self._close_passage()

    def prepare(self, plan: ActivationTrips | None) -> None:
        if plan is None:
            return
        self.plan(plan)
        if self._wanted:
            self._open_passage(max(self._wanted.values()))
        # What is short now may be there when it is wanted: a graph that somebody still holds may be gone by then.
        with suppress(BudgetError):
            for number, count in self._wanted.items():
                if number not in self._places:
                    self._places[number] = self._allocate(count)

    def end(self) -> None:
        """Places stay: the next pass wants them, too."""

    def _allocate(self, count: int) -> Sequence[Extent]:
        """In pieces, so that room which is not in one piece is room."""
        self._store.clear_ssd(round_up(count, BLOCK))
        made: list[Extent] = []
        try:
            for first in range(0, count, PASSAGE):
                size = min(PASSAGE, count - first)
                self._ledger.reserve("ssd", TAG, round_up(size, BLOCK))
                try:
                    made.append(self._disk.allocate(size))
                except BaseException:
                    self._ledger.release("ssd", TAG, round_up(size, BLOCK))
                    raise
                self._held += round_up(size, BLOCK)
        except BaseException:
            self._free(made)
            raise
        return made

    def _free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._disk.free(extent)
            self._ledger.release("ssd", TAG, round_up(extent.nbytes, BLOCK))
            self._held -= round_up(extent.nbytes, BLOCK)

    # -- what passes ----------------------------------------------------------------------------------

    @property
    def _slot(self) -> int:
        return self._passage.slot if self._passage is not None else 0

    def _slot_for(self, wanted: Mapping[int, int]) -> int:
        return passage_slot(max(wanted.values())) if self._staged else PASSAGE

    def open(self, largest: int) -> None:
        """Buffers, if there is room, for storages that nobody has foreseen."""
        with suppress(BudgetError):
            self._open_passage(largest)

    def _open_passage(self, largest: int) -> Passage:
        if self._passage is None:
            buffers: list[torch.Tensor] = []
            if self._staged:
                size = passage_slot(largest)
                _make_room(self._clear, 2 * PASSING * size)
                self._ledger.reserve("host", TAG, 2 * PASSING * size)
                try:
                    for _ in range(2 * PASSING):
                        buffers.append(self._store.backend.allocate("host", size))
                except BaseException:
                    for memory in buffers:
                        self._store.backend.free("host", memory)
                    self._ledger.release("host", TAG, 2 * PASSING * size)
                    raise
                self._staging = 2 * PASSING * size
            self._passage = Passage(self._store.backend, self._disk, buffers)
        return self._passage

    def _close_passage(self) -> None:
        if self._passage is not None:
            for memory in self._passage.close():
                self._store.backend.free("host", memory)
            self._passage = None
            self._ledger.release("host", TAG, self._staging)
            self._staging = 0

    def put(self, number: int, flat: torch.Tensor) -> StoredActivation:
        count = flat.numel()
        passage = self._open_passage(count)
        planned = self._wanted.get(number) == count and number in self._places
        extents = self._places.pop(number) if planned else self._allocate(count)
        self._used += 1
        out = passage.put(flat, extents)
        self._count(count, out, TO_HOST, SSD_WRITE)
        return StoredActivation(self, number, count, out, extents=extents)

    def fetch(self, copy: StoredActivation, flat: torch.Tensor) -> Event:
        assert self._passage is not None
        back = self._passage.get(flat, copy.extents)
        self._count(copy.nbytes, back, SSD_READ, TO_DEVICE)
        return back

    def _count(self, count: int, crossing: Event, *links: str) -> None:
        for link in links:
            if self._staged or link in (SSD_READ, SSD_WRITE):
                self._store.traffic.count(link, count, None, TAG, [crossing])

    def release(self, copy: StoredActivation) -> None:
        self._used -= 1
        if self._wanted.get(copy.number) == copy.nbytes and copy.number not in self._places:
            self._places[copy.number] = copy.extents
        else:
            self._free(copy.extents)

    def check(self) -> None:
        kept = sum(round_up(e.nbytes, BLOCK) for extents in self._places.values() for e in extents)
        if kept > self._held or (not self._used and kept != self._held):
            raise IntegrityError(f"ssd: activations hold {self._held} bytes, their places have {kept}")
        for tier, held in (("ssd", self._held), ("host", self._staging)):
            if tier in self._ledger.tags and held > self._ledger.tags[tier][TAG]:
                raise IntegrityError(
                    f"activations hold {held} bytes of {tier} memory, reserved are {self._ledger.tags[tier][TAG]}"
                )

    def close(self) -> None:
        self.plan(None)
        self._close_passage()


def _bytes(extents: Sequence[Extent]) -> int:
    return sum(extent.nbytes for extent in extents)
