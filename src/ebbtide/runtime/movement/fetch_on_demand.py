"""Brings a chunk to where somebody needs it, whatever it takes: access on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.devices import Event
from ebbtide.errors import BudgetError
from ebbtide.memory.chunk import Chunk, Lease
from ebbtide.memory.links import SSD_WRITE, TO_DEVICE
from ebbtide.planner.shape import PARAM, TIERS, WHOLE
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.movement.protocols import Gathers
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.units import format_size


class FetchOnDemand:
    def __init__(self, data: ModelData, cursor: PlanCursor, room: Room) -> None:
        self.data, self.store, self.room = data, data.store, room
        self._cursor = cursor
        self._gathers: Gathers | None = None
        self.residing = [0] * len(data.members)
        """How often each chunk is pinned by `resident`."""

    # -- the device -----------------------------------------------------------------------------------

    def gather_by(self, gathers: Gathers) -> None:
        """Who brings chunks that ranks share."""
        self._gathers = gathers

    def gather(self, index: int) -> None:
        """Starts bringing a chunk that ranks share to the device as a whole."""
        assert self._gathers is not None
        self._gathers.gather(index)

    def hold(self, chunk: Chunk) -> Lease:
        """Brings a chunk to the device, where it stays until the lease ends."""
        self.bring(chunk)
        return chunk.lease()

    def bring(self, chunk: Chunk) -> None:
        """Makes the chunk's device copy valid and, for parameters, bound."""
        if torch.is_inference_mode_enabled():
            # What is made in inference mode could never be trained again.
            with torch.inference_mode(False):
                self.bring(chunk)
            return
        if chunk.move is not None or chunk.work is not None:
            self.store.turn_back(chunk)
        if not chunk.device_valid:
            if chunk.kind == WHOLE:
                self.gather(chunk.index)
            else:
                with self.room.together([chunk]):
                    # First what leaves the device for it: that may need the very room on the host that it comes through.
                    self.room.make_for(chunk, "device")
                    self._load(chunk)
                    self.store.fetch(chunk)
            self.store.settle(chunk)
        if chunk.kind in (PARAM, WHOLE):
            self._cursor.touch(chunk)
            if chunk is self.data.computed(chunk.index) and not self.data.bound[chunk.index]:
                self.data.bind(chunk.index)

    def _load(self, chunk: Chunk) -> None:
        """What is on SSD only comes to the host, where there is one."""
        if self.store.has_host and chunk.ssd_valid and not chunk.host_valid:
            self.room.make_for(chunk, "host")
            self.store.load(chunk)
            self.store.settle(chunk)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """All parameters are on the device, and stay there meanwhile."""
        held: list[tuple[int, Lease]] = []
        short = self.short_of_all()  # before chunks take of the level, as they may while it is a guess
        try:
            for index in range(len(self.data.members)):
                try:
                    lease = self.hold(self.data.computed(index))
                except BudgetError as error:
                    raise self._too_many(error, short) from error
                self.residing[index] += 1
                held.append((index, lease))
            yield
        finally:
            for index, lease in held:
                self.residing[index] -= 1
                lease.end()

    def short_of_all(self) -> int:
        """Bytes that the device is too small by for all parameters beside what is computed."""
        chunks = {self.data.computed(index) for index in range(len(self.data.members))}
        needed = sum(chunk.nbytes for chunk in chunks) + self.store.ledger.level["device"]
        return needed - self.store.ledger.budgets["device"]

    def _too_many(self, error: BudgetError, short: int) -> BudgetError:
        """Not what is short for one of them, but for all."""
        short = max(error.short, short)
        return BudgetError(
            f"engine.resident() keeps all parameters on the device, and they do not fit: short by {format_size(short)}",
            tier="device",
            short=short,
            advice=f"raise device.memory by {short} bytes; to merge or save after training take engine.release(), which "
            "gives the module back with its weights in RAM; forward and generate() work without resident(), too",
        )

    def all_reside(self) -> bool:
        """Whether it is the time of `resident()`."""
        return all(self.residing)

    # -- the tier where an update is done -------------------------------------------------------------

    @contextmanager
    def placed(self, chunk: Chunk, tier: str) -> Iterator[None]:
        """Makes a chunk's copy on `tier` valid, quiet on the host, and keeps it there meanwhile."""
        if tier == "device":
            with self.hold(chunk):
                yield
        else:
            self.settle_on_host(chunk)
            yield

    def toward(self, chunk: Chunk, tier: str) -> list[Event]:
        """Starts making the chunk's copy on a tier valid: what must be over before an update there touches it."""
        return self.toward_host(chunk) if tier == "host" else self._toward_device(chunk)

    def can_come(self, chunks: Sequence[Chunk]) -> bool:
        """Whether those that are not on the device have room there, and nobody waits for one that is leaving it."""
        if any(c.move is not None and c.move[0] == SSD_WRITE and not c.arrived for c in chunks):
            return False
        away = sum(self.store.room_needed(c, "device") for c in chunks if not c.device_valid)
        return not away or self.room.left(away, sparing=chunks)

    def _toward_device(self, chunk: Chunk) -> list[Event]:
        if chunk.work is not None or (chunk.move is not None and chunk.move[0] == SSD_WRITE):
            self.store.turn_back(chunk)
        if not chunk.device_valid and chunk.move is None:
            self.room.make_for(chunk, "device")
            self.store.fetch(chunk)
        if chunk.kind == PARAM:
            self._cursor.touch(chunk)
        return chunk.move[1] if chunk.move is not None else []

    def toward_host(self, chunk: Chunk) -> list[Event]:
        """Starts making the chunk's host copy valid: what must be over before the host itself touches it."""
        if chunk.kind == "param":
            self.data.notice_writes(chunk.index)
        if chunk.work is not None or (chunk.move is not None and chunk.move[0] in (TO_DEVICE, SSD_WRITE)):
            self.store.turn_back(chunk)
        if not chunk.host_valid and chunk.move is None:
            if chunk.device_valid and chunk.pins:
                self.room.make_for(chunk, "host")
                self.store.mirror(chunk)
            elif chunk.device_valid:
                self.room.evict(chunk)
            if chunk.move is None and not chunk.host_valid:  # SSD has it, so nothing was moved
                self.room.make_for(chunk, "host")
                self.store.load(chunk)
        return chunk.move[1] if chunk.move is not None else chunk.pending

    def settle_on_host(self, chunk: Chunk) -> None:
        """Makes the chunk's host copy valid, and the host's to read or write."""
        self.toward_host(chunk)
        self.store.settle(chunk, host=True)

    def put_away(self, chunk: Chunk) -> None:
        """A parameter is about to be updated beside the computation: nobody is to see it meanwhile, and where the host
        updates it, its device copy goes. Not where it is pinned: then its user waits."""
        if chunk.device is None or chunk.pins:
            return
        if not self.store.has_host:
            self._unbind(chunk)
        elif chunk.move is None:
            self._unbind(chunk)
            self.store.drop(chunk, "device")

    def _unbind(self, chunk: Chunk) -> None:
        if chunk is self.data.computed(chunk.index):
            self.data.unbind(chunk.index)

    def forget(self, index: int) -> None:
        """The parameters of a chunk are about to change: what was gathered of it is out of date. Not where it is pinned:
        then it is filled again."""
        whole = self.data.computed(index)
        if whole.kind != WHOLE or whole.device is None:
            return
        self.data.notice_writes(index)
        if not whole.pins:
            self.data.unbind(index)
            self.store.free(whole)

    def refresh(self, index: int) -> None:
        """They have changed: what is pinned of the gathered chunk is filled again."""
        whole = self.data.computed(index)
        if whole.kind == WHOLE and whole.pins:
            self.store.outdate(whole)
            self.gather(index)
            self.store.settle(whole)

    def leave_stale(self, chunk: Chunk) -> None:
        """A parameter was updated on the host: its device copy goes, or is filled again where it is pinned."""
        if chunk.device is None:
            return
        if chunk.pins:
            self.store.fetch(chunk)
            self.store.settle(chunk)
            return
        self._unbind(chunk)
        self.store.drop(chunk, "device")

    # -- optimizer state ------------------------------------------------------------------------------

    def allocate(self, chunk: Chunk, tier: str) -> None:
        """First payload of an optimizer-state chunk: zeros."""
        self.room.make_for(chunk, tier)
        self.store.allocate(chunk, tier, zero=True)

    def go_home(self, chunk: Chunk, tier: str) -> None:
        """Moves an optimizer-state chunk to where the plan wants it, however far an attempt before this one came."""
        self.store.settle(chunk)
        if not chunk.free and not chunk.valid_on(tier):
            self._go(chunk, tier)
            self.store.settle(chunk)
        for other in TIERS:
            # One that is free may have a place on SSD that nothing was written to.
            if other != tier and getattr(chunk, other) is not None:
                self.store.drop(chunk, other)

    def _go(self, chunk: Chunk, tier: str) -> None:
        near = self.store.near
        if tier == "ssd":
            if not chunk.valid_on(near):
                self.go_home(chunk, near)
            self.store.save(chunk)
            return
        if tier != near and not (chunk.device_valid or chunk.host_valid):
            self.go_home(chunk, near)
        self.room.make_for(chunk, tier)
        if tier == near and chunk.ssd_valid:
            self.store.load(chunk)
        elif tier == "device":
            self.store.fetch(chunk)
        else:
            self.store.evict(chunk)
