"""Saved activations leave the device after forward and come back before backward needs them.

A storage that forward saves is copied as soon as it is saved, beside the computation, to the host or to SSD. It is
gone at the moment that the plan names, once the copy is done and nobody else holds it, and is on its way back from the
moment that the plan names. Both are the starts of moments, so what is on the device in between is exactly what the
plan says. Without a plan, or where execution has left it, all that may leave does, and comes back when backward asks
for it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from threading import RLock

import torch

from ebbtide.devices.device import Event, wait_for_all
from ebbtide.errors import BudgetError, StateError
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.planner.activation_trips import ALL, HOST, SSD, ActivationTrips
from ebbtide.runtime.activations.saved_storage import Remains, SavedActivation, SavedStorage
from ebbtide.runtime.activations.stores import ActivationStore, HostStore, SsdStore
from ebbtide.tracing.hooks.observer import SavedTensor
from ebbtide.tracing.live_recorder import Recorder
from ebbtide.tracing.saved_storages import is_checkpoint_input, movable, spoken_for


class ActivationOffload:
    """`which`: all that is saved, or only checkpoints' inputs."""

    def __init__(self, store: ChunkStore, which: str, lock: RLock, spare: Callable[[int], None]) -> None:
        """`spare`: called where the host has too little room, for others may give up what they can do without."""
        self.which = which
        self._store = store
        self.backend, self.ledger, self.traffic = store.backend, store.ledger, store.traffic
        self.offloaded_bytes = 0
        self.surprise = ""
        """What was saved otherwise than planned."""
        self._spare = weakref.WeakMethod(spare)
        self.late = 0
        """Bytes that should have left by now: on their way, or held by others."""
        self._lock = lock
        self._plan: ActivationTrips | None = None
        self._recorder: Recorder | None = None
        self._count = 0
        self._known: weakref.WeakValueDictionary[Hashable, SavedStorage] = weakref.WeakValueDictionary()
        self._all: weakref.WeakSet[SavedStorage] = weakref.WeakSet()
        self._leaving: dict[int, weakref.ref[SavedStorage]] = {}
        self._returns: dict[int, list[weakref.ref[SavedStorage]]] = {}
        self._held: dict[int, weakref.ref[SavedStorage]] = {}
        """By others, too; watched where the pass is recorded."""
        self._dead: deque[Remains] = deque()
        self._shelves: dict[str, ActivationStore] = {}
        """By tier, those with room free first."""
        clear = weakref.WeakMethod(self._make_room)  # what nobody holds must go at once
        if store.has_host:
            self._shelves[HOST] = HostStore(store, clear)
        self._ssd = SsdStore(store, clear) if store.ssd_space is not None else None
        if self._ssd is not None:
            self._shelves[SSD] = self._ssd
        self._empties: dict[torch.dtype, torch.Tensor] = {}

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._empties:
            self._empties[dtype] = torch.empty(0, dtype=dtype, device=self.backend.device)
        return self._empties[dtype]

    # -- passes ---------------------------------------------------------------------------------------

    def begin(self, plan: ActivationTrips | None, recorder: Recorder | None) -> None:
        """A pass starts; the room for what the plan sends is reserved, as far as it is there by now."""
        self.finish()
        for shelf in reversed(self._shelves.values()):  # what passes to SSD is little, and needs its room
            shelf.prepare(plan)
        self._plan, self._recorder, self.surprise = plan, recorder, ""
        self._count = 0

    def foresee(self, plan: ActivationTrips | None) -> None:
        """Passes will have this plan: what only the last one wanted gives its room back before others look for some."""
        self.drain()
        if self._ssd is not None:
            self._ssd.plan(plan)

    def leave_plan(self) -> None:
        """Execution is not what was planned: from now on all leaves when it can and comes back when it is asked for."""
        self._plan = None
        self._returns.clear()
        self.late = 0

    def finish(self) -> None:
        """A pass is over, or was given up. What a graph still holds stays where it is until the graph goes."""
        self.leave_plan()
        self._recorder = None
        self._leaving.clear()
        self._held.clear()
        self._known = weakref.WeakValueDictionary()
        for shelf in self._shelves.values():
            shelf.end()
        self.drain()

    def close(self) -> None:
        """Gives all memory back, that of graphs which somebody still holds, too: their weights go as well."""
        with self._lock:
            self.finish()
            for stored in list(self._all):
                if stored.copy is not None:
                    self._dead.append(stored.remains())
                    stored.copy = stored.flat = None
            self.drain(wait=True)
            for shelf in self._shelves.values():
                shelf.close()

    def __del__(self) -> None:
        # Nobody holds the engine any more, nor a graph of its. When Python ends, nobody would end a copy either.
        if not sys.is_finalizing():
            self.close()

    # -- saving ---------------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> SavedTensor | None:
        storage = movable(tensor, self.backend.device)
        if storage is None or self.backend.owns(storage._cdata):
            return None
        part = spoken_for(tensor, storage)
        stored = self._known.get(part)
        if stored is None or stored.version != tensor._version:
            stored = self._admit(storage, part, tensor._version)
        return SavedActivation(tensor, stored, self)

    def _admit(self, storage: torch.UntypedStorage, part: Hashable, version: int) -> SavedStorage:
        number, self._count = self._count, self._count + 1
        stored = SavedStorage(storage, part, number, version, self._dead)
        self._known[part] = stored
        self._all.add(stored)
        checkpoint = (self._plan is None or self._recorder is not None) and is_checkpoint_input()
        if self._recorder is not None:
            self._recorder.save(stored.size, checkpoint)
            stored.recorder = self._recorder
            self._held[number] = weakref.ref(stored)
        if self._plan is not None and self._plan.sizes[number : number + 1] != (stored.size,):
            self.surprise = f"saved tensor {number}: {stored.size} bytes were not expected"
            self.leave_plan()
        if self._plan is not None:
            stored.trip = self._plan.trips.get(number)
        if stored.trip is not None or (self._plan is None and (self.which == ALL or checkpoint)):
            self._send(stored)
        return stored

    def _send(self, stored: SavedStorage) -> None:
        """Starts the copy to where the plan wants it; without a plan, to where there is room."""
        assert stored.flat is not None
        trip = stored.trip
        if trip is None and self._ssd is not None:
            self._ssd.open(stored.size)  # before the host is full
        for tier, shelf in self._shelves.items():
            if not self._may_go(stored, tier):
                continue
            try:
                stored.copy = shelf.put(stored.number, stored.flat)
            except BudgetError:
                if trip is not None:
                    raise
                continue  # nobody has promised that it leaves
            break
        if stored.copy is None:
            return
        self.offloaded_bytes += stored.size
        reference = weakref.ref(stored)
        self._leaving[stored.number] = reference
        if trip is not None:
            self._returns.setdefault(trip.come, []).append(reference)

    def _may_go(self, stored: SavedStorage, tier: str) -> bool:
        """As planned. Without a plan model data may still want the host, and activations can go to SSD as well."""
        if stored.trip is not None:
            return stored.trip.tier == tier
        if tier == SSD or self._ssd is None:
            return True
        chunks = [c for c in self._store.chunks.values() if c.kind in ("param", "grad")]
        needed = sum(self._store.room_needed(chunk, HOST) for chunk in chunks)
        return self.ledger.room(HOST) >= stored.size + needed

    # -- moments --------------------------------------------------------------------------------------

    def moment(self) -> None:
        """A moment begins."""
        self.drain()
        if self._recorder is not None:
            for number, reference in list(self._held.items()):
                stored = reference()
                if stored is None or not stored.shared:
                    del self._held[number]
                if stored is not None and not stored.shared:
                    self._recorder.alone(number)
        if self._plan is None:
            for stored in self._home():
                if stored.copied and not stored.shared:
                    self._leave(stored)

    def _home(self) -> list[SavedStorage]:
        """What is to leave and has not."""
        found = []
        for number, reference in list(self._leaving.items()):
            stored = reference()
            if stored is None:
                del self._leaving[number]
            else:
                found.append(stored)
        return found

    def depart(self, place: int, room: int) -> int:
        """What the plan sends off by the start of moment `place` is gone. Gives the bytes that are late; where they
        are more than `room`, their copies are waited for."""
        self._depart(place, False)
        if self.late > room:
            self._depart(place, True)
        return self.late

    def _depart(self, place: int, wait: bool) -> None:
        self.late = 0
        for stored in self._home():
            trip = stored.trip
            if trip is None or trip.gone > place:
                continue
            if trip.come <= place:
                del self._leaving[stored.number]  # it was late until it was wanted back
                stored.stay()
            elif stored.shared or not (wait or stored.copied):
                self.late += stored.size
            else:
                self._leave(stored)

    def _leave(self, stored: SavedStorage) -> None:
        """The device's copy goes. Where the other one has failed, it stays and that is raised."""
        del self._leaving[stored.number]
        assert stored.copy is not None
        self._wait(stored.copy.out, stored.copy.shelf.links[0])
        self._known.pop(stored.part, None)  # the address will be another storage's
        self._held.pop(stored.number, None)
        stored.flat = None
        stored.away = True
        if stored.recorder is not None:
            stored.recorder.shift(stored.size)

    def arrive(self, place: int) -> None:
        """What the plan brings back from the start of moment `place` on starts on its way."""
        for reference in self._returns.pop(place, []):
            stored = reference()
            if stored is not None:
                self._leaving.pop(stored.number, None)
                self._start_back(stored)

    def _start_back(self, stored: SavedStorage) -> None:
        if not stored.away or stored.copy is None:
            return
        # It was waited for when it left, and copies start after what is waited for.
        if stored.recorder is not None:
            stored.recorder.shift(-stored.size)
        stored.away = False
        stored.flat = torch.empty(stored.size, dtype=torch.uint8, device=self.backend.device)
        stored.back = stored.copy.back(stored.flat)

    def bring(self, stored: SavedStorage) -> torch.Tensor:
        """Backward wants it now: its bytes on the device."""
        with self._lock:
            if stored.recorder is not None:
                stored.recorder.wanted(stored.number)
            self._held.pop(stored.number, None)
            self._leaving.pop(stored.number, None)
            stored.stay()
            self._start_back(stored)
            back, stored.back = stored.back, None
            if back is not None and stored.copy is not None:
                try:
                    self._wait(back, stored.copy.shelf.links[1])
                except BaseException:
                    self._give_up_return(stored)
                    raise
                stored.landed = back
            if stored.flat is None:
                raise StateError(
                    "backward after engine.close(): what the graph saved is gone; close the engine later"
                )
            return stored.flat

    def _give_up_return(self, stored: SavedStorage) -> None:
        """The copy back has failed; the other one is as good as it was."""
        stored.flat = None
        stored.away = True
        if stored.recorder is not None:
            stored.recorder.shift(stored.size)

    def _wait(self, event: Event, link: str) -> None:
        with self.traffic.waiting(link):
            event.wait()

    # -- books ----------------------------------------------------------------------------------------

    def drain(self, wait: bool = False) -> None:
        """Gives back what storages that have died had elsewhere, once no copy reads or writes it any more."""
        for _ in range(len(self._dead)):
            remains = self._dead.popleft()
            if not wait and remains.events and not remains.soon:
                self._dead.append(remains)
                continue
            # Nobody wants what was copied; it only has to be over, for the host's memory is anybody's then.
            failed = wait_for_all(remains.events, host=True)
            if remains.recorder is not None:
                remains.recorder.shift(-remains.copy.nbytes)
            remains.copy.give_back()
            if failed is not None and not isinstance(failed, Exception):
                raise failed

    def _make_room(self, count: int) -> None:
        """On the host, where there is too little for the ledger to grant it."""
        if self.ledger.room("host") < count:
            self.drain(wait=True)
            spare = self._spare()
            if spare is not None:
                spare(count)

    def check(self) -> None:
        """Raises unless what is elsewhere is what is reserved there."""
        with self._lock:
            self.drain(wait=True)
            for shelf in self._shelves.values():
                shelf.check()
