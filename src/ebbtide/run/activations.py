"""Saved activations leave for the host after forward and come back before backward needs them.

A storage that forward saves is copied as soon as it is saved, beside the computation. It is gone at the moment
that the plan names, once the copy is done and nobody else holds it, and is on its way back from the moment that the
plan names. Both are the starts of moments, so what is on the device in between is exactly what the plan says.
Without a plan, or where execution has left it, all that may leave does, and comes back when backward asks for it.

Note [one copy, many views]: autograd saves tensors, and many of them share a storage. Each gets a handle of its own
that knows shape, strides and version; the storage behind them is copied once, and is given up when the last
handle goes. That can happen in any thread, so a storage that dies only leaves a note, which the next moment reads.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import RLock

import torch

from ebbtide.backend.base import Event
from ebbtide.errors import BudgetError, IntegrityError, StateError
from ebbtide.intercept.kept import Kept
from ebbtide.memory.chunks import ChunkStore
from ebbtide.plan.activations import ALL, Away, Trip
from ebbtide.tracing.live import Recorder
from ebbtide.tracing.saved import is_checkpoint_input, movable, others

TAG = "activations"
Remains = tuple[torch.Tensor, Event | None, Event | None, torch.Tensor | None, Recorder | None]


class Stored:
    """A storage that was saved for backward: on the device (`flat`), on the host, or both.

    `out` and `back` are the copies' events; `away` says that the device's copy has gone.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "back",
        "dead",
        "flat",
        "host",
        "key",
        "number",
        "out",
        "recorder",
        "size",
        "trip",
        "version",
    )

    def __init__(
        self, storage: torch.UntypedStorage, number: int, version: int, dead: deque[Remains]
    ) -> None:
        self.key = storage._cdata
        self.size = storage.nbytes()
        self.number = number
        self.version = version
        self.flat: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            storage
        )
        self.host: torch.Tensor | None = None
        self.out: Event | None = None
        self.back: Event | None = None
        self.trip: Trip | None = None
        self.away = False
        self.recorder: Recorder | None = None
        self.dead = dead

    @property
    def shared(self) -> bool:
        """Others than backward still want it."""
        return others(self.key, 1)

    def remains(self) -> Remains:
        """What must be given back once copies under way are over; what is still being written stays until then."""
        assert self.host is not None
        flat = self.flat if self.back is not None else None
        return self.host, self.out, self.back, flat, self.recorder if self.away else None

    def __del__(self) -> None:
        if self.host is not None:
            self.dead.append(self.remains())


class Handle(Kept):
    """A saved tensor, as a view of a storage that may be elsewhere."""

    __slots__ = ("_activations", "_dtype", "_offset", "_shape", "_stored", "_stride")

    def __init__(self, tensor: torch.Tensor, stored: Stored, activations: Activations) -> None:
        super().__init__(tensor)
        # Without its memory it still shares the version.
        self._tensor.data = activations.empty(tensor.dtype)
        self._activations, self._stored = activations, stored
        self._dtype, self._shape = tensor.dtype, tuple(tensor.shape)
        self._stride, self._offset = tensor.stride(), int(tensor.storage_offset())

    def get(self) -> torch.Tensor:
        self.refuse_modified(self._shape)
        flat = self._activations.bring(self._stored)
        view = torch.empty(0, dtype=self._dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), self._offset, self._shape, self._stride)


class Activations:
    """`which`: all that is saved, or only checkpoints' inputs."""

    def __init__(self, store: ChunkStore, which: str, lock: RLock) -> None:
        self.which = which
        self.backend, self.ledger, self.traffic = store.backend, store.ledger, store.traffic
        self.offloaded_bytes = 0
        self.surprise = ""
        """What was saved otherwise than planned."""
        self.spare: weakref.WeakMethod[Callable[[int], None]] | None = None
        """Called where the host has too little room: others may give up what they can do without."""
        self.late = 0
        """Bytes that should have left by now: on their way, or held by others."""
        self._lock = lock
        self._plan: Away | None = None
        self._recorder: Recorder | None = None
        self._quota = 0
        """Bytes that are reserved on the host for what the plan will send."""
        self._count = 0
        self._known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._all: weakref.WeakSet[Stored] = weakref.WeakSet()
        self._leaving: dict[int, weakref.ref[Stored]] = {}
        self._returns: dict[int, list[weakref.ref[Stored]]] = {}
        self._held: dict[int, weakref.ref[Stored]] = {}
        """By others, too; watched where the pass is recorded."""
        self._dead: deque[Remains] = deque()
        self._host_bytes = 0
        self._empties: dict[torch.dtype, torch.Tensor] = {}

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._empties:
            self._empties[dtype] = torch.empty(0, dtype=dtype, device=self.backend.device)
        return self._empties[dtype]

    # -- passes ---------------------------------------------------------------------------------------

    def begin(self, plan: Away | None, recorder: Recorder | None) -> None:
        """A pass starts; the host's room for what the plan sends is reserved, as far as it is there by now."""
        self.finish()
        if plan is not None:
            self._make_room(plan.bytes)
            self._quota = min(plan.bytes, max(0, self.ledger.room("host")))
            self.ledger.reserve("host", TAG, self._quota)
        self._plan, self._recorder, self.surprise = plan, recorder, ""
        self._count = 0

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
        self.ledger.release("host", TAG, self._quota)
        self._quota = 0
        self.drain()

    def close(self) -> None:
        """Gives all memory back, that of graphs which somebody still holds, too: their weights go as well."""
        with self._lock:
            self.finish()
            for stored in list(self._all):
                if stored.host is not None:
                    self._dead.append(stored.remains())
                    stored.host = stored.flat = None
            self.drain(wait=True)

    def __del__(self) -> None:
        # Nobody holds the engine any more, nor a graph of its. When Python ends, nobody would end a copy either.
        if not sys.is_finalizing():
            self.close()

    # -- saving ---------------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> Kept | None:
        storage = movable(tensor, self.backend.device)
        if storage is None or self.backend.owns(storage._cdata):
            return None
        stored = self._known.get(storage._cdata)
        if stored is None or stored.version != tensor._version:
            stored = self._admit(storage, tensor._version)
        return Handle(tensor, stored, self)

    def _admit(self, storage: torch.UntypedStorage, version: int) -> Stored:
        number, self._count = self._count, self._count + 1
        stored = Stored(storage, number, version, self._dead)
        self._known[stored.key] = stored
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

    def _send(self, stored: Stored) -> None:
        """Starts the copy to the host."""
        if stored.size <= self._quota:
            self._quota -= stored.size
        else:
            try:
                self._make_room(stored.size)
                self.ledger.reserve("host", TAG, stored.size)
            except BudgetError:
                if stored.trip is not None:
                    raise
                return  # nobody has promised that it leaves
        assert stored.flat is not None
        self._host_bytes += stored.size
        stored.host = self.backend.allocate("host", stored.size)
        stored.out = self.backend.copy(stored.host, stored.flat, "device_to_host")
        self.traffic.moved["device_to_host"] += stored.size
        self.offloaded_bytes += stored.size
        reference = weakref.ref(stored)
        self._leaving[stored.number] = reference
        if stored.trip is not None:
            self._returns.setdefault(stored.trip.come, []).append(reference)

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
                if not stored.shared and stored.out is not None and stored.out.done():
                    self._leave(stored)

    def _home(self) -> list[Stored]:
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
            elif stored.shared or not (wait or (stored.out is not None and stored.out.done())):
                self.late += stored.size
            else:
                self._leave(stored)

    def _leave(self, stored: Stored) -> None:
        """The device's copy goes. Where the copy to the host has failed, it stays and that is raised."""
        del self._leaving[stored.number]
        assert stored.out is not None
        self._wait(stored.out, "device_to_host")
        self._known.pop(stored.key, None)  # the address will be another storage's
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

    def _start_back(self, stored: Stored) -> None:
        if not stored.away or stored.host is None:
            return
        # It was waited for when it left, and copies start after what is waited for.
        if stored.recorder is not None:
            stored.recorder.shift(-stored.size)
        stored.away = False
        stored.flat = torch.empty(stored.size, dtype=torch.uint8, device=self.backend.device)
        stored.back = self.backend.copy(stored.flat, stored.host, "host_to_device")
        self.traffic.moved["host_to_device"] += stored.size

    def bring(self, stored: Stored) -> torch.Tensor:
        """Backward wants it now: its bytes on the device."""
        with self._lock:
            if stored.recorder is not None:
                stored.recorder.wanted(stored.number)
            self._held.pop(stored.number, None)
            self._leaving.pop(stored.number, None)
            self._start_back(stored)
            back, stored.back = stored.back, None
            if back is not None:
                try:
                    self._wait(back, "host_to_device")
                except BaseException:
                    self._give_up_return(stored)
                    raise
            if stored.flat is None:
                raise StateError(
                    "backward after engine.close(): what the graph saved is gone; close the engine later"
                )
            return stored.flat

    def _give_up_return(self, stored: Stored) -> None:
        """The copy back has failed; the host's is still good."""
        stored.flat = None
        stored.away = True
        if stored.recorder is not None:
            stored.recorder.shift(stored.size)

    def _wait(self, event: Event, link: str) -> None:
        start = time.perf_counter()
        event.wait()
        self.traffic.stalls[link] += time.perf_counter() - start

    # -- books ----------------------------------------------------------------------------------------

    def drain(self, wait: bool = False) -> None:
        """Gives back what storages that have died had on the host, once no copy reads or writes it any more."""
        for _ in range(len(self._dead)):
            remains = self._dead.popleft()
            host, out, back, _, recorder = remains
            if wait:
                _quietly(out)
                _quietly(back)
            elif not all(event is None or event.done() for event in (out, back)):
                self._dead.append(remains)
                continue
            if recorder is not None:
                recorder.shift(-host.numel())
            self._host_bytes -= host.numel()
            self.backend.free("host", host)
            self.ledger.release("host", TAG, host.numel())

    def _make_room(self, count: int) -> None:
        """On the host, where there is too little for the ledger to grant it."""
        if self.ledger.room("host") < count:
            self.drain(wait=True)
            spare = self.spare() if self.spare is not None else None
            if spare is not None:
                spare(count)

    def check(self) -> None:
        """Raises unless what is on the host is what is reserved there."""
        with self._lock:
            self.drain(wait=True)
            held, reserved = self._host_bytes + self._quota, self.ledger.tags["host"][TAG]
            if held > reserved:  # other engines may reserve under the same tag
                raise IntegrityError(f"activations hold {held} bytes of host memory, reserved are {reserved}")


def _quietly(event: Event | None) -> None:
    """Nobody wants what was copied any more; it only has to be over."""
    try:
        if event is not None:
            event.synchronize()
    except Exception:  # a copy that failed is over, too
        return
