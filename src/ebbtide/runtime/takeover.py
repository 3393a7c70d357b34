"""The user's values on their way into chunks, at the beginning or when a parameter is unfrozen, and back where that
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from ebbtide.errors import DiskError, IntegrityError
from ebbtide.planner.shape import ModelShape
from ebbtide.runtime.distributed.gather import ChunkSharing
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.movement.state_placement import StatePlacement
from ebbtide.runtime.parameters.binding import TORCH_DTYPES, ModelData, dense
from ebbtide.runtime.parameters.element_access import load_value, store_value
from ebbtide.runtime.parameters.initial_values import Source
from ebbtide.runtime.parameters.parameter_classes import plainly
from ebbtide.runtime.parameters.selection import Choice
from ebbtide.runtime.parameters.unmanaged import Unmanaged
from ebbtide.runtime.planning.plan_cache import PlanCache
from ebbtide.runtime.planning.planner_inputs import shape_of
from ebbtide.runtime.updates.updates import Updates


class Takeover:
    def __init__(
        self,
        data: ModelData,
        updates: Updates,
        homes: StatePlacement,
        room: Room,
        unmanaged: Unmanaged,
        sharing: ChunkSharing | None,
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
        level = max(self._homes.level_before_batch(shape), self._room.claims.level)
        self._room.raise_level(level, guess=True)

    def _give_places(self, shape: ModelShape, index: int) -> None:
        """The chunk's parameters, and their masters, get a copy on some tier."""
        home = self._homes.first(shape, index)
        self._store.state_homes.append(home)
        param = self._data.parameter_chunk(index)
        tier = self._store.update_tier(index)
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
        rounded = torch.empty(value.shape, dtype=dtype, device="cpu")
        self._kernels.split(value.to("cpu", torch.float32), rounded, None)
        return rounded

    def _value_here(self, member: int) -> torch.Tensor:
        value = None if self._source is None else self._source.value(self._data.names[member])
        if value is None:
            return dense(self._data.memory[member])
        place = self._data.places[member]
        if tuple(value.stride()) != place.stride:
            value = torch.empty_strided(place.shape, place.stride, dtype=value.dtype, device="cpu").copy_(
                value
            )
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


class Unfreeze:
    def __init__(
        self,
        updates: Updates,
        room: Room,
        homes: StatePlacement,
        traces: PlanCache,
        sharing: ChunkSharing | None,
    ) -> None:
        self._data, self._updates, self._room = updates.data, updates, room
        self._homes, self._traces, self._sharing = homes, traces, sharing

    def notice(self) -> None:
        """Chunks whose first parameter has come to require gradients are trained from now on."""
        with plainly():
            trained = [m for m, parameter in enumerate(self._data.parameters) if parameter.requires_grad]
        self.wake(trained)

    def wake(self, members: Sequence[int]) -> None:
        """The chunks of these parameters get master, moments and gradient, where they have none. Ranks that share chunks
        call it together."""
        data = self._data
        woken = sorted({index for m in members if not data.trained[index := data.places[m].chunk]})
        for index in woken:
            self._wake(index)
        if not woken:
            return
        if self._sharing is not None:
            self._sharing.reductions.reserve()
        self._traces.replan(shape_of(data, self._updates), self._room.budget("device"))

    def _wake(self, index: int) -> None:
        data, updates, homes = self._data, self._updates, self._homes
        kernels = updates.kernels["host"]
        data.trained[index] = True
        updates.add_chunk(index)
        if not data.store.ledger.budgets[data.store.state_homes[index]]:
            data.store.state_homes[index] = "device"  # a plan says nothing of state that there is not
        master = data.store.chunks.get(("master", index))
        if master is not None:
            values = [(m, load_value(data, m, kernels)) for m in data.members[index]]
            homes.give_place(master, data.store.state_homes[index])
            for member, value in values:
                store_value(data, member, dense(value), kernels)
        if data.store.streams(index):
            updates.queue.drain()
            homes.restream()
