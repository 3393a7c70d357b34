"""The user's values on their way into chunks when an engine begins, and back where it cannot."""

from __future__ import annotations

from contextlib import suppress

import torch

from ebbtide.errors import DiskError, IntegrityError
from ebbtide.plan.shape import ModelShape
from ebbtide.run.elements import load_value, store_value
from ebbtide.run.homes import Homes
from ebbtide.run.model import TORCH_DTYPES, ModelData, dense
from ebbtide.run.room import Room
from ebbtide.run.setup import Choice
from ebbtide.run.sharing import Sharing
from ebbtide.run.source import Source
from ebbtide.run.unmanaged import Unmanaged
from ebbtide.run.updates import Updates


class Adoption:
    def __init__(
        self,
        data: ModelData,
        updates: Updates,
        homes: Homes,
        room: Room,
        unmanaged: Unmanaged,
        sharing: Sharing | None,
        source: Source | None,
    ) -> None:
        """`source`: has values that the module has not."""
        self._data, self._store, self._room, self._homes = data, data.store, room, homes
        self._kernels = updates.kernels["host"]
        self._unmanaged, self._sharing, self._source = unmanaged, sharing, source

    def take_over(self, shape: ModelShape, choice: Choice) -> None:
        """Moves the user's values, or the source's, into chunks, one chunk at a time."""
        for index, members in enumerate(self._data.members):
            self._give_places(shape, index)
            for member in members:
                store_value(self._data, member, self._first_value(member), self._kernels)
                self._data.release_original(member)
            if self._data.parameter_chunk(index).device is not None and self._sharing is None:
                self._data.bind(index)
        self._homes.restream()
        if self._source is not None:
            self._source.fill()
        self._unmanaged.take_over(choice)
        if self._sharing is not None:
            self._sharing.align(self._unmanaged)
        level = max(self._homes.level_before_batch(shape), self._room.level)
        self._room.raise_level(level, guess=True)

    def _give_places(self, shape: ModelShape, index: int) -> None:
        """The chunk's parameters, and their masters, get a copy on some tier."""
        home = self._homes.first(shape, index)
        self._homes.homes.append(home)
        param = self._data.parameter_chunk(index)
        tier = self._store.near if home == "ssd" else home
        self._room.make_for(param, tier)
        self._store.allocate(param, tier)
        master = self._store.chunks.get(("master", index))
        if master is not None:
            self._homes.give_place(master, home)

    def _first_value(self, member: int) -> torch.Tensor:
        """Flat; the same on all ranks."""
        value = self._value_here(member)
        if not self._data.parameters[member].requires_grad:
            value = self._as_computed(member, value)
        return value if self._sharing is None else self._sharing.same(value)

    def _as_computed(self, member: int, value: torch.Tensor) -> torch.Tensor:
        """Frozen parameters have no master, but for those in a chunk with others that are trained: rounded at once, they
        are the same in every layout."""
        dtype = TORCH_DTYPES[self._data.layout.chunks[self._data.places[member].chunk].dtype]
        if dtype == torch.float32:
            return value
        rounded = torch.empty(value.shape, dtype=dtype)
        self._kernels.split(value.to("cpu", torch.float32), rounded, None)
        return rounded

    def _value_here(self, member: int) -> torch.Tensor:
        value = None if self._source is None else self._source.value(self._data.names[member])
        if value is None:
            return dense(self._data.memory[member])
        place = self._data.places[member]
        if tuple(value.stride()) != place.stride:
            value = torch.empty_strided(place.shape, place.stride, dtype=value.dtype).copy_(value)
        return dense(value)

    def give_back(self) -> None:
        """It failed: the user's module is as it was. Values that a broken disk has are lost with it."""
        data = self._data
        for member in range(len(data.parameters)):
            if data.taken[member] and data.on_meta[member]:
                place, dtype = data.places[member], data.originals[member]
                meta = torch.empty_strided(place.shape, place.stride, dtype=dtype, device="meta")
                data.give_memory(member, meta)
            elif data.taken[member] and self._sharing is None:  # else others have some of it
                with suppress(DiskError, IntegrityError):
                    value = load_value(data, member, self._kernels)
                    data.give_memory(member, value.to(data.originals[member]))
        if self._source is not None:
            self._source.undo()
