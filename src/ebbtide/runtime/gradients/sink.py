"""The one place where gradients go between backward and their update.

A gradient has one of these destinations, and the sink knows which: where autograd made it (in place), the host directly,
its parameter's space, or a chunk of gradients on the device. The sum of squares that clipping and the check for
non-finite gradients need is taken while a gradient is copied, so no second pass over the gradients is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import Chunk
from ebbtide.runtime.gradients.destinations import HostDirect, InParameterSpace, InPlaceGradients
from ebbtide.runtime.gradients.stand_ins import StandIns
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.movement.protocols import PendingUpdates
from ebbtide.runtime.parameters.binding import dense
from ebbtide.runtime.parameters.param_groups import ParamGroups
from ebbtide.runtime.parameters.parameter_classes import plainly


class GradientSink:
    def __init__(
        self,
        kernels: Mapping[str, Kernels],
        places: FetchOnDemand,
        cursor: PlanCursor,
        updates: PendingUpdates,
        groups: ParamGroups,
    ) -> None:
        """`kernels` by tier."""
        data = self.data = places.data
        self.store, self.kernels = data.store, kernels
        self._places, self._room, self._cursor, self._groups = places, places.room, cursor, groups
        self.arrived = [0] * len(data.parameters)
        """By parameter: gradients that are in the sum."""
        self.squares: list[Any] = [0.0] * len(data.parameters)
        """By parameter: the sum of squares, as the device has it; None where nobody has looked."""
        self.captured = 0
        """Gradients taken since the beginning; one more, while autograd may be adding to what is held."""
        self.sparse = False
        """Whether one of them was."""
        self.norm_wanted = True
        self.in_parameter_space = False
        """Whether the plan has gradients lie in their parameters' space."""
        self.in_place = InPlaceGradients(data.store.ledger)
        self.host_direct = HostDirect(places.room, updates, kernels)
        self.parameter_space = InParameterSpace(data, kernels, places)
        self.stand_ins = StandIns(data.names, data.parameters)

    def keep_in_place(self, alone: bool, in_backward: bool) -> None:
        """Where gradients may stay as autograd made them: nothing else, or no other rank, has to see them in a chunk."""
        # On a GPU the copy is a thousandth of a step, and the allocator's counters could not tell them apart.
        as_they_are = alone and self.store.backend.kind == "cpu"
        self.in_place.always = as_they_are and self.store.ledger.device_alone
        self.in_place.where_planned = as_they_are and in_backward and not self.store.has_host

    # -- in -------------------------------------------------------------------------------------------

    def hold(self, member: int, gradient: torch.Tensor) -> None:
        """Copies or adds a gradient into the chunk that holds it until the update, or keeps it as it is."""
        place = self.data.views[member]
        assert place is not None
        if member in self.in_place:
            self.squares[member] = self.kernels["device"].capture(self.in_place[member], gradient, True)
            self.arrived[member] += 1
            return
        if not self.arrived[member] and self._stays(place.chunk):
            self._keep(member, gradient)
            return
        chunk = self._chunk(member)
        if chunk.work is not None:
            chunk.work.settle()  # the last step's gradients are being added to those that wait for an update
        direct = self.host_direct.leads(chunk)
        tier, add = "host" if direct else "device", self.arrived[member] > 0
        if chunk.free:
            self._room.make_for(chunk, tier)
            self.store.allocate(chunk, tier)
        if direct:
            self._places.settle_on_host(chunk)
            self.squares[member] = self.host_direct.take(chunk, place, gradient, add)
        else:
            self._places.bring(chunk)
            view = chunk.view().as_strided(place.shape, place.stride, place.offset)
            self.squares[member] = self.kernels["device"].capture(view, gradient, add)
        self.store.written(chunk, tier)
        self.arrived[member] += 1

    def _stays(self, index: int) -> bool:
        """Whether a gradient of the chunk is on the device until its update."""
        if self.in_parameter_space:
            return False
        planned = self.in_place.where_planned and self._cursor.stays("grad", index)
        return self.in_place.always or planned

    def _keep(self, member: int, gradient: torch.Tensor) -> None:
        place = self.data.places[member]
        dtype = self.data.parameter_chunk(place.chunk).dtype
        self._room.make("device", self.gradient_bytes(member))
        self.in_place.keep(member, gradient, place.shape, place.stride, dtype)
        self.squares[member] = None
        self.arrived[member] = 1

    def _chunk(self, member: int) -> Chunk:
        """The one that a gradient goes to."""
        index, taken = self.data.places[member].chunk, self.parameter_space.members
        if self.in_parameter_space and (member in taken or not self.arrived[member]):
            if taken.isdisjoint(self.data.members[index]):
                self.data.notice_writes(index)  # what a user wrote goes to the master, while it is there
            self.parameter_space.take(member)
            return self.data.parameter_chunk(index)
        return self.store.chunks["grad", index]

    # -- what there is --------------------------------------------------------------------------------

    def gradient_bytes(self, member: int) -> int:
        place = self.data.places[member]
        return place.numel * self.data.parameter_chunk(place.chunk).dtype.itemsize

    def is_trained(self, member: int) -> bool:
        """Whether the optimizer has the parameter."""
        return self._groups.group_of[member] >= 0

    def expected(self, index: int) -> list[int]:
        """Members of a chunk whose gradients come here."""
        return [m for m in self.expected_anywhere(index) if self.data.views[m] is not None]

    def expected_anywhere(self, index: int) -> list[int]:
        """Those whose gradients come on some rank."""
        parameters = self.data.parameters
        return [m for m in self.data.members[index] if self.is_trained(m) and parameters[m].requires_grad]

    def arrived_in(self, index: int) -> list[int]:
        """Members of a chunk that have a gradient."""
        return [m for m in self.data.members[index] if self.arrived[m]]

    def chunks_of(self, index: int, members: Iterable[int]) -> dict[Chunk, list[int]]:
        """The chunks that hold gradients of these members, but for those that are kept as they came."""
        found: dict[Chunk, list[int]] = {}
        for member in members:
            if member not in self.in_place:
                kind = "param" if member in self.parameter_space.members else "grad"
                found.setdefault(self.store.chunks[kind, index], []).append(member)
        return found

    def look(self) -> None:
        """At gradients in place that nobody has looked at yet, all in one go."""
        unseen = [m for m, square in enumerate(self.squares) if square is None]
        tensors = [dense(self.in_place[m]) for m in unseen]
        for member, square in zip(
            unseen, self.kernels["device"].look(tensors, self.norm_wanted), strict=True
        ):
            self.squares[member] = square

    def sums(self) -> dict[int, float]:
        """The sum of squares of each gradient that is here. What is on the device is read in one go."""
        self.look()
        members = [m for m, count in enumerate(self.arrived) if count]
        found = self.kernels["device"].read([self.squares[m] for m in members])
        for member, value in zip(members, found, strict=True):
            self.squares[member] = value
        return dict(zip(members, found, strict=True))

    def show(self) -> None:
        """Backward is over: parameters show that their gradients are held."""
        memory, parameters = self.data.memory, self.data.parameters
        self.stand_ins.show(m for m, count in enumerate(self.arrived) if count and memory[m] is parameters[m])

    # -- out ------------------------------------------------------------------------------------------

    def forget(self, members: Iterable[int]) -> None:
        """Drops the gradients of some parameters."""
        for member in members:
            if member in self.in_place:
                self.in_place.drop(member)
            self.parameter_space.forget(member)
            self.arrived[member], self.squares[member] = 0, 0.0

    def discard(self) -> None:
        """Forgets all gradients but those that an update consumes; parameters whose space they took come back from their
        masters, once `parameter_space.restore` is called."""
        self.stand_ins.forget()
        self.parameter_space.drop()
        with plainly():
            for member, parameter in enumerate(self.data.parameters):
                self.arrived[member], self.squares[member] = 0, 0.0
                if parameter.grad is not None and self.is_trained(member):
                    parameter.grad = None  # of a backward pass before anybody watched
        self.in_place.clear()
        for chunk in self.store.chunks.values():
            if chunk.kind == "grad" and not chunk.free and chunk.work is None:
                self.store.free(chunk)
