"""Gradients in, updates out: taken as they arrive, applied where the optimizer state lives.

The sink holds gradients until the step; `in-backward` consumes them as they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.config import Config
from ebbtide.errors import NonFiniteError, StateError, UnsupportedError, imagined_kept, second_gradient
from ebbtide.kernels import Guarded, Kernels, Rule, Scaling
from ebbtide.memory.dtensors import part_like
from ebbtide.planner.shape import WHOLE_GRAD
from ebbtide.runtime.gradients.sink import GradientSink
from ebbtide.runtime.gradients.stand_ins import is_led
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import REVERSING, PlanCursor
from ebbtide.runtime.parameters.binding import laid_like
from ebbtide.runtime.parameters.param_groups import ParamGroups
from ebbtide.runtime.updates.chunk_update import ChunkUpdates
from ebbtide.runtime.updates.lock_free.policy import LockFree
from ebbtide.runtime.updates.update_queue import UpdateQueue


class OtherParts(Protocol):
    """Processes that have other parts of tensors, or other stages of the model."""

    def complete(self, sums: Mapping[int, float]) -> dict[int, float]:
        """Sums of squares by parameter, of whole tensors where they were those of parts."""


class Sharded(Protocol):
    """Gradients of chunks that ranks share: each rank holds those of its slices."""

    everywhere: set[int]
    """Parameters of which some other rank has a gradient, where nothing is reduced."""

    def capture(self, member: int, gradient: torch.Tensor) -> None: ...

    def sums(self) -> dict[int, float]:
        """The sum of squares of each whole gradient."""

    def updated(self, index: int) -> bool:
        """Whether some rank updates the chunk."""

    def count_others(self) -> None:
        """Parameters that other ranks have updated count one more update."""

    def finish(self) -> None:
        """Backward is over."""

    def discard(self) -> None: ...


class Updates:
    def __init__(
        self,
        rule: Rule,
        kernels: Mapping[str, Kernels],
        places: FetchOnDemand,
        cursor: PlanCursor,
        queue: UpdateQueue,
        config: Config,
        companions: OtherParts | None,
    ) -> None:
        """`kernels` by tier. `companions`: those that have other parts of the model, or other stages."""
        data = self.data = places.data
        self.store, self.rule, self.kernels, self.queue = data.store, rule, kernels, queue
        self._places, self._room, self._cursor, self._companions = places, places.room, cursor, companions
        self.param_groups = ParamGroups(data, rule)
        self.sink = GradientSink(kernels, places, cursor, queue, self.param_groups)
        self.chunks = ChunkUpdates(rule, kernels, places, queue, self.sink.in_place, self.param_groups)
        self.in_backward = config.updates == "in-backward"
        self.sink.norm_wanted = not self.in_backward
        self.stop_nonfinite = config.nonfinite == "stop"
        self._scaled = config.precision == "fp16"
        """Whether losses are scaled before backward."""
        self.scale = 1.0
        """What gradients are multiplied with in in-backward updates."""
        self.unwanted = False
        """What is held is being dropped, which whatever ended it early did not see to its end."""
        self.applied = 0
        """Updates applied so far (in-backward); counted first, for what ends one half-way is no step."""
        self.lock_free: LockFree | None = None
        self.shares: Sharded | None = None
        """Where ranks share the chunks."""
        self._whole: dict[int, float] | None = None
        for index, trained in enumerate(data.trained):
            if trained:
                self.add_chunk(index)

    def regroup(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the optimizer's live groups as they are now."""
        steps, found = self.param_groups, self.param_groups.grouped(groups)
        if found != steps.group_of:
            for member, (before, now) in enumerate(zip(steps.group_of, found, strict=True)):
                if now < 0 <= before and self.sink.arrived[member]:
                    raise StateError(
                        f"{self.data.names[member]} has left the optimizer's param groups while its gradient waits "
                        "for the next step; put it back and let it go after engine.step(), or drop all gradients with "
                        "engine.optimizer.zero_grad()"
                    )
            if max(steps.group_of, default=-1) >= 0:
                self.queue.drain()  # what goes on has the groups as they were
        steps.groups, steps.group_of = groups, found

    def add_chunk(self, index: int) -> None:
        """The kinds that a trained chunk has beside its parameters."""
        master = self.data.master_dtype(index)
        if master is not None:
            self.store.add("master", index, master)
        for kind in self.rule.states:
            self.store.add(kind, index, torch.float32)
        dtype = self.data.parameter_chunk(index).dtype
        self.store.add("grad", index, dtype)
        if self.data.gathered(index):
            self.store.add(WHOLE_GRAD, index, dtype)

    # -- gradients ------------------------------------------------------------------------------------

    def capture(self, member: int) -> None:
        """A gradient has arrived in `.grad`: takes it into its chunk, or applies it at once."""
        parameter = self.data.parameters[member]
        gradient = parameter.grad
        if gradient is None or self.param_groups.group_of[member] < 0:
            return  # not the optimizer's: as in plain PyTorch, it accumulates where it is
        parameter.grad = None
        if isinstance(gradient, FakeTensor):
            raise imagined_kept(f"the gradient of {self.data.names[member]}")
        if self._cursor.phase != REVERSING:
            self._refuse_stray(member)
        gradient = part_like(gradient, parameter).resolve_neg()
        self.sink.captured += 1
        self._whole = None
        if gradient.is_sparse:
            self.sink.sparse = True
            gradient = gradient.to_dense()
        index = self.data.places[member].chunk
        if self.shares is not None:
            self.shares.capture(member, gradient)
            return
        if self.in_backward and self.sink.arrived[member]:
            raise second_gradient(self.data.names[member])
        if self.in_backward and self.store.updates_on_device(index):
            self._apply_now(member, gradient)
            return
        self.sink.hold(member, gradient)
        if self.in_backward and all(self.sink.arrived[m] for m in self.sink.expected(index)):
            self.apply_chunk(index)

    def _refuse_stray(self, member: int) -> None:
        """A gradient comes by no output of a pass: it is added to what is held, where that can be."""
        name = self.data.names[member]
        if self.in_backward:
            raise UnsupportedError(
                f"{name} gets a gradient by no output of a pass of this engine (a penalty of its own, a tensor that "
                'forward keeps, the loss of another engine), and updates = "in-backward" would apply it at once. Add it '
                'to the loss that comes from the pass, or use updates = "exact". It was dropped'
            )
        if self._scaled and not is_led():
            raise UnsupportedError(
                f"{name} gets a gradient by no output of a pass of this engine, so without the loss scale of fp16: "
                "add what it comes from to the loss, and call engine.backward(loss). It was dropped"
            )

    # -- norm -----------------------------------------------------------------------------------------

    def square_sum(self) -> float:
        """The sum of squares of all gradients that arrived, added in the order of names."""
        total = 0.0
        sums = self._sums()
        for member in self._in_order(sums):
            total += sums[member]
        return total

    def _in_order(self, members: Iterable[int]) -> list[int]:
        """The one in which their sums of squares are added."""
        return sorted(members, key=lambda m: self.data.names[m])

    def _sums(self) -> dict[int, float]:
        """The sum of squares of each gradient that arrived."""
        if self._companions is None:
            return self._sums_here()
        if self._whole is None:
            self._whole = self._companions.complete(self._sums_here())
        return self._whole

    def _sums_here(self) -> dict[int, float]:
        return self.sink.sums() if self.shares is None else self.shares.sums()

    def nonfinite(self) -> list[str]:
        """The names of parameters whose gradient is not finite."""
        return [self.data.names[m] for m, total in self._sums().items() if not math.isfinite(total)]

    # -- updates --------------------------------------------------------------------------------------

    def prelaunch(self) -> None:
        """All gradients are in: what can be done of the updates before anybody knows their norm."""
        for index in range(len(self.data.members)):
            members = self.sink.arrived_in(index)
            if members and not any(member in self.sink.in_place for member in members):
                self.chunks.prelaunch(index, self.sink.chunks_of(index, members))

    def guarded(self, losses: Sequence[torch.Tensor], scaling: Scaling) -> Guarded | None:
        """Where updates were prelaunched: such as need not wait until the host has looked at the gradients."""
        if not self.chunks.prelaunched:
            return None
        arrived = (m for m, count in enumerate(self.sink.arrived) if count)
        sums = [self.sink.squares[member] for member in self._in_order(arrived)]
        return self.kernels["device"].guarded(self.rule, sums, losses, scaling)

    def apply(self, scale: float, updating: Callable[[int], None]) -> None:
        """Starts the update of every chunk that has gradients, in forward order; `updating` is told before each."""
        if self.lock_free is not None:
            self.lock_free.begin_step(self.param_groups.groups)
        self.chunks.start_prelaunched(scale)
        begun = self._begin_streaming(scale)
        for index in range(len(self.data.members)):
            members = self.sink.arrived_in(index)
            if members or (self.shares is not None and self.shares.updated(index)):
                updating(index)
            if members and index not in begun:
                self._update(index, members, scale)
        if self.shares is not None:
            self.shares.count_others()
        self.discard()

    def _begin_streaming(self, scale: float) -> set[int]:
        """The disk need not wait until all is updated that lives in RAM: of the updates that stream, the first begin as
        far as nothing has to move for them."""
        begun: set[int] = set()
        if self.lock_free is not None or self.shares is not None or self.store.has_host:
            return begun
        for index in range(len(self.store.state_homes)):
            members = self.sink.arrived_in(index) if self.store.streams(index) else []
            if not members:
                continue
            chunks = {self.data.parameter_chunk(index), *self.sink.chunks_of(index, members)}
            if not all(chunk.device_valid and chunk.move is None for chunk in chunks):
                break  # what comes after it in forward does so here, too
            self._update(index, members, scale)
            begun.add(index)
        return begun

    def _update(self, index: int, members: list[int], scale: float) -> None:
        if self.lock_free is not None and not self.store.updates_on_device(index):
            self.lock_free.give(index, members, scale)
            return
        self._count(members)
        self.chunks.update(index, self.sink.chunks_of(index, members), scale)
        self.sink.parameter_space.updated(members)

    def _count(self, members: Sequence[int]) -> None:
        """One more update of each, from which on what was saved of its value is old."""
        for member in members:
            self.param_groups.counts[member] += 1
        self.data.changed(members)

    def reclaim(self, members: Iterable[int]) -> None:
        """Parameters are about to be used whose space gradients may have."""
        self.sink.parameter_space.reclaim(members)

    def discard(self) -> None:
        """Forgets the gradients; parameters whose space they took come back from the master."""
        self.unwanted = True
        self.chunks.forget()
        self._whole = None
        if self.shares is not None:
            self.shares.discard()
        self.sink.discard()
        self.sink.parameter_space.restore()
        self.unwanted = False

    def forget(self, members: Iterable[int]) -> None:
        """Drops the gradients of some parameters."""
        if self.shares is not None:
            names = ", ".join(sorted(self.data.names[m] for m in members))
            raise UnsupportedError(
                f"the gradients of {names} were set to None, and others were not: ranks that share chunks drop all "
                "gradients or none. Call engine.optimizer.zero_grad()"
            )
        self._whole = None
        self.sink.forget(members)

    # -- in backward ----------------------------------------------------------------------------------

    def _apply_now(self, member: int, gradient: torch.Tensor) -> None:
        """In-backward, state on the device: the gradient is consumed where autograd left it."""
        place = self.data.places[member]
        param = self.data.parameter_chunk(place.chunk)
        with self._places.placed(param, "device"):
            flat = laid_like(gradient, place.shape, place.stride, param.dtype)
            self.sink.squares[member] = self.kernels["device"].sum_of_squares(flat)
            self._refuse_nonfinite(member)
            self.applied += 1
            self._count([member])
            self.chunks.update_one(member, flat, self.scale)
        self.sink.arrived[member] = 1

    def apply_chunk(self, index: int) -> None:
        """In-backward, state on the host: all gradients of a chunk are there, they go to the host and through."""
        members = self.sink.arrived_in(index)
        self.sink.look()
        for member in members:
            self._refuse_nonfinite(member)
        self.applied += len(members)
        self._update(index, members, self.scale)
        self.queue.put_off(self._room.spare() // self.store.chunks["grad", index].nbytes)

    def finish_backward(self) -> None:
        """In-backward: chunks where some parameter got no gradient still wait for their update."""
        if self.shares is not None:
            self.shares.finish()
        elif self.in_backward:
            for index, members in enumerate(self.data.members):
                grad = self.store.chunks.get(("grad", index))
                held = grad is not None and not grad.free and grad.work is None
                if held or any(member in self.sink.in_place for member in members):
                    self.apply_chunk(index)
        if self.in_backward:
            self.queue.reorder()

    def _refuse_nonfinite(self, member: int) -> None:
        """In-backward an update cannot be taken back, so a bad gradient stops it before it is applied."""
        if self.stop_nonfinite and not math.isfinite(float(self.sink.squares[member])):
            raise NonFiniteError(refused(self.data.names[member]))


def refused(name: str) -> str:
    return (
        f"the gradient of {name} is not finite; its update was not applied, those of the parameters before it were "
        '(updates = "in-backward"). Load a checkpoint, and look at the loss'
    )
