"""Gradients in, updates out: captured as they arrive, applied where the optimizer state lives.

Held gradients wait in chunks of their own, or in the parameter's space where a separate master makes the
parameter superfluous after its last use. `in-backward` consumes them as they arrive. The sum of squares
that clipping and the check for non-finite gradients need is taken while a gradient is copied, so no
second pass over the gradients is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.errors import NonFiniteError, StateError, UnsupportedError
from ebbtide.kernels import Kernels, Operands, Rule
from ebbtide.memory.chunks import Chunk, aligned
from ebbtide.run.executor import Executor
from ebbtide.run.kept import KeptGradients
from ebbtide.run.model import ModelData, dense, laid_like


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring parameters of a chunk that are updated alike."""

    offset: int
    count: int
    coefficients: tuple[float, ...]


class Updates:
    def __init__(
        self,
        data: ModelData,
        rule: Rule,
        kernels: Mapping[str, Kernels],
        groups: Sequence[Mapping[str, Any]],
        in_backward: bool,
    ) -> None:
        """`kernels` by tier; `groups` are the optimizer's live param groups."""
        self.data = data
        self.store = data.store
        self.rule = rule
        self.kernels = kernels
        self.groups = groups
        self.group_of: list[int] = [-1] * len(data.parameters)
        self.steps = [0] * len(data.parameters)
        self.arrived = [0] * len(data.parameters)
        self.squares: list[Any] = [0.0] * len(data.parameters)
        self.homes: list[str] = []
        self.in_backward = in_backward
        self.captured = 0
        """Gradients taken since the beginning."""
        self.applied = 0
        """Updates applied during this backward pass (in-backward)."""
        self.taken: set[int] = set()
        """Parameters whose space holds their gradient."""
        self.take_over = False
        self.stop_nonfinite = True
        self.norm_wanted = True
        self.scale = 1.0
        """What gradients are multiplied with in in-backward updates."""
        self.kept = KeptGradients(data.store.ledger)
        self.executor: Executor | None = None
        self._states = ("master", *rule.states)

    def regroup(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the optimizer's groups as they are now."""
        index = {id(p): i for i, p in enumerate(self.data.parameters)}
        self.groups = groups
        for place, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) in index:
                    self.group_of[index[id(parameter)]] = place

    def add_chunks(self) -> None:
        """Declares the chunks of every kind that training needs; nothing is allocated."""
        for index, trained in enumerate(self.data.trained):
            if trained:
                self.add_chunk(index)

    def add_chunk(self, index: int) -> None:
        """The kinds that a trained chunk has beside its parameters."""
        master = self.data.master_dtype(index)
        if master is not None:
            self.store.add("master", index, master)
        for kind in self.rule.states:
            self.store.add(kind, index, torch.float32)
        self.store.add("grad", index, self.data.parameter_chunk(index).dtype)

    def state_chunks(self, index: int) -> list[Chunk]:
        found = (self.store.chunks.get((kind, index)) for kind in self._states)
        return [chunk for chunk in found if chunk is not None]

    # -- gradients ------------------------------------------------------------------------------------

    def capture(self, member: int) -> None:
        """A gradient has arrived in `.grad`: takes it into its chunk, or applies it at once."""
        parameter = self.data.parameters[member]
        gradient = parameter.grad
        if gradient is None or self.group_of[member] < 0:
            return  # not the optimizer's: as in plain PyTorch, it accumulates where it is
        parameter.grad = None
        self.captured += 1
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        index = self.data.places[member].chunk
        if self.in_backward and self.arrived[member]:
            raise UnsupportedError(
                f"{self.data.names[member]} received a second gradient in one backward pass (a weight shared by "
                'reentrant checkpoints?), which updates = "in-backward" cannot take back; use updates = "exact"'
            )
        if self.in_backward and self.homes[index] == "device":
            self._apply_now(member, gradient)
            return
        self._hold(member, gradient)
        if self.in_backward and all(self.arrived[m] for m in self._expected(index)):
            self._apply_chunk(index)

    def _hold(self, member: int, gradient: torch.Tensor) -> None:
        """Copies or adds a gradient into the chunk that holds it until the update, or keeps it as it is."""
        executor = self._executor()
        place = self.data.places[member]
        if member in self.kept:
            self.squares[member] = self.kernels["device"].capture(self.kept[member], gradient, True)
            self.arrived[member] += 1
            return
        if self.kept.enabled and not self.take_over and not self.arrived[member]:
            self._keep(member, gradient)
            return
        chunk = self._gradient_chunk(member)
        if chunk.free:
            executor.make_room(self.store.room_needed(chunk, "device"))
            self.store.allocate(chunk, "device")
        executor.hold(chunk)
        try:
            view = chunk.view().as_strided(place.shape, place.stride, place.offset)
            add = self.arrived[member] > 0
            self.squares[member] = self.kernels["device"].capture(view, gradient, add)
            del view
            self.store.written(chunk, "device")
            self.arrived[member] += 1
        finally:
            chunk.pins -= 1

    def _keep(self, member: int, gradient: torch.Tensor) -> None:
        place = self.data.places[member]
        dtype = self.data.parameter_chunk(place.chunk).dtype
        self._executor().make_room(place.numel * dtype.itemsize)
        kept = self.kept.keep(member, gradient, place.shape, place.stride, dtype)
        kernels = self.kernels["device"]
        if self.norm_wanted:
            self.squares[member] = kernels.sum_of_squares(dense(kept))
        else:
            self.squares[member] = math.nan if kernels.nonfinite(dense(kept)) else 0.0
        self.arrived[member] = 1

    def _gradient_chunk(self, member: int) -> Chunk:
        index = self.data.places[member].chunk
        if self.take_over and (member in self.taken or not self.arrived[member]):
            self.taken.add(member)
            return self.data.parameter_chunk(index)
        return self.store.chunks["grad", index]

    def _expected(self, index: int) -> list[int]:
        return [
            m
            for m in self.data.members[index]
            if self.group_of[m] >= 0 and self.data.parameters[m].requires_grad
        ]

    # -- norm -----------------------------------------------------------------------------------------

    def square_sum(self) -> float:
        """The sum of squares of all gradients that arrived, added in the order of names."""
        total = 0.0
        sums = self._sums()
        for member in sorted(sums, key=lambda m: self.data.names[m]):
            total += sums[member]
        return total

    def _sums(self) -> dict[int, float]:
        """The sum of squares of each gradient that arrived; what is on the device is read in one go."""
        members = [m for m, count in enumerate(self.arrived) if count]
        waiting = [m for m in members if isinstance(self.squares[m], torch.Tensor)]
        if waiting:
            read = torch.stack([self.squares[m] for m in waiting]).tolist()
            for member, value in zip(waiting, read, strict=True):
                self.squares[member] = value
        return {m: float(self.squares[m]) for m in members}

    def nonfinite(self) -> list[str]:
        """The names of parameters whose gradient is not finite."""
        return [self.data.names[m] for m, total in self._sums().items() if not math.isfinite(total)]

    # -- updates --------------------------------------------------------------------------------------

    def apply(self, scale: float) -> None:
        """Updates every chunk that has gradients, in forward order."""
        executor = self._executor()
        for index in range(len(self.data.members)):
            members = [m for m in self.data.members[index] if self.arrived[m]]
            if members:
                executor.updating(index)
                for member in members:
                    self.steps[member] += 1
                self._update(index, members, scale)
        self.discard()

    def discard(self) -> None:
        """Forgets the gradients; parameters whose space they took come back from the master."""
        self._restore([m for m in self.taken if self.arrived[m]])
        self.taken.clear()
        self.kept.clear()
        for index in {self.data.places[m].chunk for m, count in enumerate(self.arrived) if count}:
            chunk = self.store.chunks["grad", index]
            self.store.free(chunk)
        for member in range(len(self.arrived)):
            self.arrived[member] = 0
            self.squares[member] = 0.0

    def _update(self, index: int, members: list[int], scale: float) -> None:
        tier = self.homes[index]
        param = self.data.parameter_chunk(index)
        grad = self.store.chunks["grad", index]
        states = self.state_chunks(index)
        executor = self._executor()
        taken = [m for m in members if m in self.taken]
        alone = [m for m in members if m in self.kept]
        own = [m for m in members if m not in self.taken and m not in self.kept]
        sources = [(param, taken)] if taken else []
        sources += [(grad, own)] if own else []
        self._place(param, tier)
        try:
            for source, group in sources:
                if source is not param:
                    self._place(source, tier)
                try:
                    self._run(tier, param, source, states, group, scale)
                finally:
                    if source is not param:
                        self._unplace(source, tier)
            for member in alone:
                self._run_alone(tier, member, dense(self.kept[member]), scale)
                self.kept.drop(member)
            self.store.written(param, tier)
        finally:
            self._unplace(param, tier)
        self.taken.difference_update(taken)
        if own:
            self.store.free(grad)
        if tier == "host":
            executor.leave_stale(param)

    def _place(self, chunk: Chunk, tier: str) -> None:
        """Makes a chunk's copy on `tier` valid, and keeps it there until `_unplace`."""
        if tier == "device":
            self._executor().hold(chunk)
        else:
            self._executor().to_host(chunk)

    def _unplace(self, chunk: Chunk, tier: str) -> None:
        if tier == "device":
            chunk.pins -= 1

    def _run(
        self, tier: str, param: Chunk, source: Chunk, states: list[Chunk], members: list[int], scale: float
    ) -> None:
        for state in states:
            if state.free:
                self._executor().allocate(state, tier)
        kernels = self.kernels[tier]
        copies = [(chunk, tier) for chunk in (param, source, *states)]
        has_master = states[0].kind == "master"
        for segment in self.segments(members, scale):
            for _, row in aligned(copies, segment.offset, segment.count):
                parameter, gradient, *rest = row
                master = rest.pop(0) if has_master else None
                operands = Operands(parameter, gradient, master, tuple(rest))
                kernels.update(self.rule, operands, segment.coefficients)

    def _run_alone(self, tier: str, member: int, gradient: torch.Tensor, scale: float) -> None:
        """Updates one parameter from a gradient that lies by itself, flat and in storage order."""
        place = self.data.places[member]
        states = self.state_chunks(place.chunk)
        for state in states:
            if state.free:
                self._executor().allocate(state, tier)
        [segment] = self.segments([member], scale)
        copies = [(chunk, tier) for chunk in (self.data.parameter_chunk(place.chunk), *states)]
        for start, row in aligned(copies, place.offset, place.numel):
            parameter, *rest = row
            master = rest.pop(0) if states[0].kind == "master" else None
            part = gradient[start : start + parameter.numel()]
            operands = Operands(parameter, part, master, tuple(rest))
            self.kernels[tier].update(self.rule, operands, segment.coefficients)

    def segments(self, members: Sequence[int], scale: float) -> Iterator[Segment]:
        """Neighbouring parameters with the same settings and step become one segment."""
        open_: Segment | None = None
        for member in sorted(members, key=lambda m: self.data.places[m].offset):
            place = self.data.places[member]
            group = self.groups[self.group_of[member]]
            coefficients = self.rule.coefficients(group, self.steps[member], scale)
            if open_ is not None:
                gap = place.offset - (open_.offset + open_.count)
                if 0 <= gap < 1024 and coefficients == open_.coefficients:
                    count = place.offset + place.numel - open_.offset
                    open_ = Segment(open_.offset, count, coefficients)
                    continue
                yield open_
            open_ = Segment(place.offset, place.numel, coefficients)
        if open_ is not None:
            yield open_

    # -- in backward ----------------------------------------------------------------------------------

    def _apply_now(self, member: int, gradient: torch.Tensor) -> None:
        """In-backward, state on the device: the gradient is consumed where autograd left it."""
        executor = self._executor()
        place = self.data.places[member]
        param = self.data.parameter_chunk(place.chunk)
        executor.hold(param)
        try:
            flat = laid_like(gradient, place.shape, place.stride, param.dtype)
            self.squares[member] = self.kernels["device"].sum_of_squares(flat)
            self._refuse_nonfinite(member)
            self.steps[member] += 1
            self._run_alone("device", member, flat, self.scale)
            self.store.written(param, "device")
        finally:
            param.pins -= 1
        self.arrived[member] = 1
        self.applied += 1

    def _apply_chunk(self, index: int) -> None:
        """In-backward, state on the host: all gradients of a chunk are there, they go to the host and through."""
        members = [m for m in self.data.members[index] if self.arrived[m]]
        for member in members:
            self._refuse_nonfinite(member)
            self.steps[member] += 1
        self._update(index, members, self.scale)
        self.applied += len(members)

    def finish_backward(self) -> None:
        """In-backward: chunks where some parameter got no gradient still wait for their update."""
        for index in range(len(self.data.members)):
            grad = self.store.chunks.get(("grad", index))
            if self.in_backward and grad is not None and not grad.free:
                self._apply_chunk(index)

    def _refuse_nonfinite(self, member: int) -> None:
        """In-backward an update cannot be taken back, so a bad gradient stops it before it is applied."""
        if self.stop_nonfinite and not math.isfinite(float(self.squares[member])):
            raise NonFiniteError(
                f"the gradient of {self.data.names[member]} is not finite; its update was not applied, those of the "
                'parameters before it were (updates = "in-backward"). Load a checkpoint, and look at the loss'
            )

    # -- taking the parameter's space -----------------------------------------------------------------

    def _restore(self, members: Sequence[int]) -> None:
        """Rebuilds parameters from their masters, where gradients had taken their space."""
        for member in members:
            place = self.data.places[member]
            index = place.chunk
            master = self.store.chunks["master", index]
            param = self.data.parameter_chunk(index)
            tier = self.homes[index]
            self._place(param, tier)
            try:
                for _, (target, source) in aligned(
                    [(param, tier), (master, tier)], place.offset, place.numel
                ):
                    self.kernels[tier].split(source, target, source)
                self.store.written(param, tier)
            finally:
                self._unplace(param, tier)
            if tier == "host":
                self._executor().leave_stale(param)

    def reclaim(self, run: int) -> None:
        """A run is about to be used whose parameters' space may be taken."""
        if self.taken and not self.taken.isdisjoint(self.data.runs[run].parameters):
            self.give_back()

    def give_back(self) -> None:
        """Parameters are wanted before the update: their gradients move to a space of their own."""
        for member in sorted(self.taken):
            place = self.data.places[member]
            param, grad = self.data.parameter_chunk(place.chunk), self.store.chunks["grad", place.chunk]
            tier = "device"
            if grad.free:
                self._executor().make_room(grad.nbytes)
                self.store.allocate(grad, tier, zero=True)
            self._place(param, tier)
            self._place(grad, tier)
            try:
                for _, (target, source) in aligned([(grad, tier), (param, tier)], place.offset, place.numel):
                    target.copy_(source)
                self.store.written(grad, tier)
            finally:
                self._unplace(grad, tier)
                self._unplace(param, tier)
        members, self.taken = sorted(self.taken), set()
        self._restore(members)

    def _executor(self) -> Executor:
        if self.executor is None:
            raise StateError("updates are used before they are connected to an executor")
        return self.executor
