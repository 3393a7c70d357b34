"""A storage that forward saved for backward, and the saved tensors that are views of it.

Note [one copy, many views]: autograd saves tensors, and many of them share a storage. Each gets a handle of its own
that knows shape, strides and version; the storage behind them is copied once, and is given up when the last
handle goes. That can happen in any thread, so a storage that dies only leaves a note, which the next moment reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch

from ebbtide.devices.cpu_device import CopyEvent
from ebbtide.devices.device import Event
from ebbtide.memory.ssd_passage import Crossing
from ebbtide.planner.activation_trips import Trip
from ebbtide.runtime.activations.stores import StoredActivation
from ebbtide.tracing.hooks.observer import SavedTensor
from ebbtide.tracing.live_recorder import Recorder
from ebbtide.tracing.saved_storages import others

CANCELLED = (Crossing, CopyEvent)
"""What can be called off: all but a GPU's copies, which keep no memory."""


class Remains(NamedTuple):
    """What must be given back once copies under way are over; what they read and write stays until then."""

    copy: StoredActivation
    back: Event | None
    flat: torch.Tensor | None
    recorder: Recorder | None
    """That counts it as away."""

    @property
    def events(self) -> list[Event]:
        """Those that are not over."""
        return [one for one in (self.copy.out, self.back) if one is not None and not one.done()]

    @property
    def soon(self) -> bool:
        """What can be cancelled was: it is as good as over, and keeps the device's memory."""
        return any(isinstance(one, CANCELLED) for one in self.events)


class SavedStorage:
    """A storage that was saved for backward: on the device (`flat`), elsewhere (`copy`), or both.

    `back` is the event of the copy back; `landed` is the same once the computation waits for it, which on a GPU is
    before it is over; `away` says that the device's copy has gone.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "back",
        "copy",
        "dead",
        "flat",
        "key",
        "landed",
        "number",
        "part",
        "recorder",
        "size",
        "trip",
        "version",
    )

    def __init__(
        self, storage: torch.UntypedStorage, part: Hashable, number: int, version: int, dead: deque[Remains]
    ) -> None:
        """`part`: what of it is saved, as `spoken_for` says."""
        self.key, self.part = storage._cdata, part
        self.size = storage.nbytes()
        self.number = number
        self.version = version
        self.flat: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            storage
        )
        self.copy: StoredActivation | None = None
        self.back: Event | None = None
        self.landed: Event | None = None
        self.trip: Trip | None = None
        self.away = False
        self.recorder: Recorder | None = None
        self.dead = dead

    @property
    def shared(self) -> bool:
        """Others than backward still want it."""
        return others(self.key, 1)

    def stay(self) -> None:
        """It is wanted on the device: a copy that is not done is not needed, and would keep the memory once nobody
        wants it any more. On the CPU it is over then."""
        if self.copy is None or self.copied or not isinstance(self.copy.out, CANCELLED):
            return
        self.copy.out.cancel()
        if isinstance(self.copy.out, CopyEvent):
            interrupt = self.copy.out.outlast()
            if interrupt is not None:
                raise interrupt

    @property
    def copied(self) -> bool:
        return self.copy is not None and self.copy.out.done()

    def remains(self) -> Remains:
        assert self.copy is not None
        called_off = [one for one in (self.copy.out, self.back) if isinstance(one, CANCELLED)]
        for one in called_off:
            one.cancel()
        busy = self.back is not None or not all(one.done() for one in called_off)
        flat = self.flat if busy else None
        # What has landed may still be read from the host; the device's memory is safe, in the computation's order.
        back = self.landed if self.back is None else self.back
        return Remains(self.copy, back, flat, self.recorder if self.away else None)

    def __del__(self) -> None:
        if self.copy is not None:
            self.dead.append(self.remains())


class Brings(Protocol):
    def empty(self, dtype: torch.dtype) -> torch.Tensor: ...

    def bring(self, stored: SavedStorage) -> torch.Tensor: ...


class SavedActivation(SavedTensor):
    """A saved tensor, as a view of a storage that may be elsewhere."""

    __slots__ = ("_activations", "_dtype", "_offset", "_shape", "_stored", "_stride")

    def __init__(self, tensor: torch.Tensor, stored: SavedStorage, activations: Brings) -> None:
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
