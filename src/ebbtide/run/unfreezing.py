"""Chunks that come to be trained after the beginning."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.run.elements import load_value, store_value
from ebbtide.run.homes import Homes
from ebbtide.run.model import dense
from ebbtide.run.room import Room
from ebbtide.run.sharing import Sharing
from ebbtide.run.terms import shape_of
from ebbtide.run.traces import Traces
from ebbtide.run.updates import Updates
from ebbtide.runtime.parameters.away import plainly


class Unfreezing:
    def __init__(
        self, updates: Updates, room: Room, homes: Homes, traces: Traces, sharing: Sharing | None
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
        if not data.store.ledger.budgets[homes.homes[index]]:
            homes.homes[index] = "device"  # a plan says nothing of state that there is not
        master = data.store.chunks.get(("master", index))
        if master is not None:
            values = [(m, load_value(data, m, kernels)) for m in data.members[index]]
            homes.give_place(master, homes.homes[index])
            for member, value in values:
                store_value(data, member, dense(value), kernels)
        if homes.homes[index] == "ssd":
            updates.drain()
            homes.restream()
