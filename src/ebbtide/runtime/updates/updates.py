"""Gradients in, updates out: captured as they arrive, applied where the optimizer state lives.

Held gradients wait in chunks of their own, or in the parameter's space where a separate master makes the
parameter superfluous after its last use. `in-backward` consumes them as they arrive. The sum of squares
that clipping and the check for non-finite gradients need is taken while a gradient is copied, so no
second pass over the gradients is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

import torch

from ebbtide.errors import NonFiniteError, StateError, UnsupportedError, second_gradient
from ebbtide.kernels import Guarded, Kernels, Rule, Scaling
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.dtensors import part_like
from ebbtide.planner.shape import WHOLE_GRAD
from ebbtide.runtime.distributed.model_parallel import ModelParallel
from ebbtide.runtime.gradients.destinations import HostDirect, InParameterSpace, InPlaceGradients
from ebbtide.runtime.gradients.stand_ins import StandIns, is_led
from ebbtide.runtime.movement.executor import Executor
from ebbtide.runtime.movement.plan_cursor import REVERSING
from ebbtide.runtime.parameters.binding import ModelData, Place, dense, laid_like
from ebbtide.runtime.parameters.parameter_classes import plainly
from ebbtide.runtime.updates.chunk_update import ChunkUpdates
from ebbtide.runtime.updates.lock_free.policy import LockFree


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
        data: ModelData,
        rule: Rule,
        kernels: Mapping[str, Kernels],
        executor: Executor,
        in_backward: bool,
    ) -> None:
        """`kernels` by tier."""
        self.data = data
        self.store = data.store
        self.rule = rule
        self.kernels = kernels
        self.executor = executor
        self.arrived = [0] * len(data.parameters)
        self.squares: list[Any] = [0.0] * len(data.parameters)
        self.in_backward = in_backward
        self.captured = 0
        """Gradients taken since the beginning; one more, while autograd may be adding to what is held."""
        self.sparse = False
        """Whether one of them was."""
        self.unwanted = False
        """What is held is being dropped, which whatever ended it early did not see to its end."""
        self.applied = 0
        """Updates applied so far (in-backward); counted first, for what ends one half-way is no step."""
        self.take_over = False
        self.stop_nonfinite = True
        self.norm_wanted = True
        self.scaled = False
        """Whether losses are scaled before backward (fp16)."""
        self.scale = 1.0
        """What gradients are multiplied with in in-backward updates."""
        self.lock_free: LockFree | None = None
        self.shares: Sharded | None = None
        """Where ranks share the chunks."""
        self.companions: ModelParallel | None = None
        """Those that have other parts of the model, or other stages."""
        self._whole: dict[int, float] | None = None
        self.kept = InPlaceGradients(data.store.ledger)
        self.chunks = ChunkUpdates(data, rule, kernels, executor.places, executor.updater, self.kept)
        self.homes = self.chunks.homes
        self.straight = HostDirect(executor.room, executor.updater, kernels, self.homes)
        self.steps = self.chunks.steps
        self.taken = InParameterSpace(data, kernels, self.homes, executor.places)
        self.state_chunks = self.chunks.state_chunks
        self.shown = StandIns(data.names, data.parameters)

    def regroup(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the optimizer's live groups as they are now."""
        steps, found = self.steps, self.steps.grouped(groups)
        if found != steps.group_of:
            for member, (before, now) in enumerate(zip(steps.group_of, found, strict=True)):
                if now < 0 <= before and self.arrived[member]:
                    raise StateError(
                        f"{self.data.names[member]} has left the optimizer's param groups while its gradient waits "
                        "for the next step; put it back and let it go after engine.step(), or drop all gradients with "
                        "engine.optimizer.zero_grad()"
                    )
            if max(steps.group_of, default=-1) >= 0:
                self.drain()  # what goes on has the groups as they were
        steps.groups, steps.group_of = groups, found

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
        dtype = self.data.parameter_chunk(index).dtype
        self.store.add("grad", index, dtype)
        if self.data.gathered(index):
            self.store.add(WHOLE_GRAD, index, dtype)

    # -- gradients ------------------------------------------------------------------------------------

    def capture(self, member: int) -> None:
        """A gradient has arrived in `.grad`: takes it into its chunk, or applies it at once."""
        parameter = self.data.parameters[member]
        gradient = parameter.grad
        if gradient is None or self.steps.group_of[member] < 0:
            return  # not the optimizer's: as in plain PyTorch, it accumulates where it is
        parameter.grad = None
        if self.executor.course.phase != REVERSING:
            self._refuse_stray(member)
        gradient = part_like(gradient, parameter).resolve_neg()
        self.captured += 1
        self._whole = None
        if gradient.is_sparse:
            self.sparse = True
            gradient = gradient.to_dense()
        index = self.data.places[member].chunk
        if self.shares is not None:
            self.shares.capture(member, gradient)
            return
        if self.in_backward and self.arrived[member]:
            raise second_gradient(self.data.names[member])
        if self.in_backward and self.homes[index] == "device":
            self._apply_now(member, gradient)
            return
        self.hold(member, gradient)
        if self.in_backward and all(self.arrived[m] for m in self.expected(index)):
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
        if self.scaled and not is_led():
            raise UnsupportedError(
                f"{name} gets a gradient by no output of a pass of this engine, so without the loss scale of fp16: "
                "add what it comes from to the loss, and call engine.backward(loss). It was dropped"
            )

    def hold(self, member: int, gradient: torch.Tensor) -> None:
        """Copies or adds a gradient into the chunk that holds it until the update, or keeps it as it is."""
        place = self.data.views[member]
        assert place is not None
        if member in self.kept:
            self.squares[member] = self.kernels["device"].capture(self.kept[member], gradient, True)
            self.arrived[member] += 1
            return
        if not self.arrived[member] and self._stays(place.chunk):
            self._keep(member, gradient)
            return
        chunk = self._gradient_chunk(member)
        if chunk.work is not None:
            chunk.work.settle()  # the last step's gradients are being added to those that wait for an update
        straight = self.straight.leads(chunk)
        tier, add = "host" if straight else "device", self.arrived[member] > 0
        if chunk.free:
            self.executor.room.make_for(chunk, tier)
            self.store.allocate(chunk, tier)
        if straight:
            self.executor.places.settle_on_host(chunk)
            self.squares[member] = self.straight.take(chunk, place, gradient, add)
        else:
            self.executor.places.bring(chunk)
            self.squares[member] = self._copy(chunk, place, gradient, add)
        self.store.written(chunk, tier)
        self.arrived[member] += 1

    def _copy(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        view = chunk.view().as_strided(place.shape, place.stride, place.offset)
        return self.kernels["device"].capture(view, gradient, add)

    def _stays(self, index: int) -> bool:
        """Whether a gradient of the chunk is on the device until its update."""
        if self.take_over:
            return False
        return self.kept.always or (self.kept.where_planned and self.executor.course.stays("grad", index))

    def _keep(self, member: int, gradient: torch.Tensor) -> None:
        place = self.data.places[member]
        dtype = self.data.parameter_chunk(place.chunk).dtype
        self.executor.room.make("device", self.gradient_bytes(member))
        self.kept.keep(member, gradient, place.shape, place.stride, dtype)
        self.squares[member] = None
        self.arrived[member] = 1

    def _look(self) -> None:
        """At kept gradients that nobody has looked at yet, all in one go."""
        unseen = [m for m, square in enumerate(self.squares) if square is None]
        found = self.kernels["device"].look([dense(self.kept[m]) for m in unseen], self.norm_wanted)
        for member, square in zip(unseen, found, strict=True):
            self.squares[member] = square

    def gradient_bytes(self, member: int) -> int:
        place = self.data.places[member]
        return place.numel * self.data.parameter_chunk(place.chunk).dtype.itemsize

    def _gradient_chunk(self, member: int) -> Chunk:
        index = self.data.places[member].chunk
        taken = self.taken.members
        if self.take_over and (member in taken or not self.arrived[member]):
            if taken.isdisjoint(self.data.members[index]):
                self.data.notice_writes(index)  # what a user wrote goes to the master, while it is there
            self.taken.take(member)
            return self.data.parameter_chunk(index)
        return self.store.chunks["grad", index]

    def expected(self, index: int) -> list[int]:
        """Members of a chunk whose gradients come here."""
        return [m for m in self.expected_anywhere(index) if self.data.views[m] is not None]

    def expected_anywhere(self, index: int) -> list[int]:
        """Those whose gradients come on some rank."""
        steps, parameters = self.steps, self.data.parameters
        return [m for m in self.data.members[index] if steps.group_of[m] >= 0 and parameters[m].requires_grad]

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
        if self.companions is None:
            return self._sums_here()
        if self._whole is None:
            self._whole = self.companions.complete(self._sums_here())
        return self._whole

    def _sums_here(self) -> dict[int, float]:
        """What is on the device is read in one go."""
        if self.shares is not None:
            return self.shares.sums()
        self._look()
        members = [m for m, count in enumerate(self.arrived) if count]
        found = self.kernels["device"].read([self.squares[m] for m in members])
        for member, value in zip(members, found, strict=True):
            self.squares[member] = value
        return dict(zip(members, found, strict=True))

    def nonfinite(self) -> list[str]:
        """The names of parameters whose gradient is not finite."""
        return [self.data.names[m] for m, total in self._sums().items() if not math.isfinite(total)]

    # -- updates --------------------------------------------------------------------------------------

    def prelaunch(self) -> None:
        """All gradients are in: what can be done of the updates before anybody knows their norm."""
        for index in range(len(self.data.members)):
            members = self._arrived(index)
            if members and not any(member in self.kept for member in members):
                self.chunks.prelaunch(index, self._sources(index, members))

    def guarded(self, losses: Sequence[torch.Tensor], scaling: Scaling) -> Guarded | None:
        """Where updates were prelaunched: such as need not wait until the host has looked at the gradients."""
        if not self.chunks.prelaunched:
            return None
        arrived = (m for m, count in enumerate(self.arrived) if count)
        sums = [self.squares[member] for member in self._in_order(arrived)]
        return self.kernels["device"].guarded(self.rule, sums, losses, scaling)

    def apply(self, scale: float) -> None:
        """Starts the update of every chunk that has gradients, in forward order."""
        if self.lock_free is not None:
            self.lock_free.begin_step(self.steps.groups)
        self.chunks.start_prelaunched(scale)
        begun = self._begin_streaming(scale)
        for index in range(len(self.data.members)):
            members = self._arrived(index)
            if members or (self.shares is not None and self.shares.updated(index)):
                self.executor.updating(index)
            if members and index not in begun:
                self._update(index, members, scale)
        if self.shares is not None:
            self.shares.count_others()
        self.discard()

    def _begin_streaming(self, scale: float) -> set[int]:
        """The disk need not wait until all is updated that lives in RAM: of the updates that stream, the first begin as
        far as nothing has to move for them."""
        begun: set[int] = set()
        if self.lock_free is not None or self.shares is not None or self.store.near != "device":
            return begun
        for index, home in enumerate(self.homes):
            members = self._arrived(index) if home == "ssd" else []
            if not members:
                continue
            chunks = {self.data.parameter_chunk(index), *self._sources(index, members)}
            if not all(chunk.device_valid and chunk.move is None for chunk in chunks):
                break  # what comes after it in forward does so here, too
            self._update(index, members, scale)
            begun.add(index)
        return begun

    def _arrived(self, index: int) -> list[int]:
        return [m for m in self.data.members[index] if self.arrived[m]]

    def _update(self, index: int, members: list[int], scale: float) -> None:
        if self.lock_free is not None and self.homes[index] != "device":
            self.lock_free.give(index, members, scale)
            return
        self._count(members)
        self.chunks.update(index, self._sources(index, members), scale)
        self.taken.updated(members)

    def _count(self, members: Sequence[int]) -> None:
        """One more update of each, from which on what was saved of its value is old."""
        for member in members:
            self.steps.counts[member] += 1
        self.data.changed(members)

    def _sources(self, index: int, members: list[int]) -> dict[Chunk, list[int]]:
        """The chunks that hold gradients of these members, but for those that are kept as they came."""
        sources: dict[Chunk, list[int]] = {}
        for member in members:
            if member not in self.kept:
                kind = "param" if member in self.taken.members else "grad"
                sources.setdefault(self.store.chunks[kind, index], []).append(member)
        return sources

    def drain(self) -> None:
        """Waits for updates that go on beside the computation."""
        if self.lock_free is not None:
            self.lock_free.drain()
        self.executor.updater.flush()

    def discard(self) -> None:
        """Forgets the gradients; parameters whose space they took come back from the master."""
        self.unwanted = True
        self.shown.forget()
        self.chunks.forget()
        self.taken.drop()
        self._whole = None
        with plainly():
            for member, parameter in enumerate(self.data.parameters):
                self.arrived[member] = 0
                self.squares[member] = 0.0
                if parameter.grad is not None and self.steps.group_of[member] >= 0:
                    parameter.grad = None  # of a backward pass before anybody watched
        self.kept.clear()
        if self.shares is not None:
            self.shares.discard()
        for chunk in self.store.chunks.values():
            if chunk.kind == "grad" and not chunk.free and chunk.work is None:  # else it is being consumed
                self.store.free(chunk)
        self.taken.restore()
        self.unwanted = False

    def show(self) -> None:
        """Backward is over: parameters show that their gradients are held."""
        memory, parameters = self.data.memory, self.data.parameters
        self.shown.show(m for m, count in enumerate(self.arrived) if count and memory[m] is parameters[m])

    def forget(self, members: Iterable[int]) -> None:
        """Drops the gradients of some parameters."""
        if self.shares is not None:
            names = ", ".join(sorted(self.data.names[m] for m in members))
            raise UnsupportedError(
                f"the gradients of {names} were set to None, and others were not: ranks that share chunks drop all "
                "gradients or none. Call engine.optimizer.zero_grad()"
            )
        self._whole = None
        for member in members:
            if member in self.kept:
                self.kept.drop(member)
            self.taken.forget(member)
            self.arrived[member] = 0
            self.squares[member] = 0.0

    # -- in backward ----------------------------------------------------------------------------------

    def _apply_now(self, member: int, gradient: torch.Tensor) -> None:
        """In-backward, state on the device: the gradient is consumed where autograd left it."""
        place = self.data.places[member]
        param = self.data.parameter_chunk(place.chunk)
        with self.executor.places.placed(param, "device"):
            flat = laid_like(gradient, place.shape, place.stride, param.dtype)
            self.squares[member] = self.kernels["device"].sum_of_squares(flat)
            self._refuse_nonfinite(member)
            self.applied += 1
            self._count([member])
            self.chunks.update_one(member, flat, self.scale)
        self.arrived[member] = 1

    def apply_chunk(self, index: int) -> None:
        """In-backward, state on the host: all gradients of a chunk are there, they go to the host and through."""
        members = self._arrived(index)
        self._look()
        for member in members:
            self._refuse_nonfinite(member)
        self.applied += len(members)
        self._update(index, members, self.scale)
        self.executor.updater.put_off(self.executor.room.spare() // self.store.chunks["grad", index].nbytes)

    def finish_backward(self) -> None:
        """In-backward: chunks where some parameter got no gradient still wait for their update."""
        if self.shares is not None:
            self.shares.finish()
        elif self.in_backward:
            for index, members in enumerate(self.data.members):
                grad = self.store.chunks.get(("grad", index))
                held = grad is not None and not grad.free and grad.work is None
                if held or any(member in self.kept for member in members):
                    self.apply_chunk(index)
        if self.in_backward:
            self.executor.updater.reorder()

    def _refuse_nonfinite(self, member: int) -> None:
        """In-backward an update cannot be taken back, so a bad gradient stops it before it is applied."""
        if self.stop_nonfinite and not math.isfinite(float(self.squares[member])):
            raise NonFiniteError(refused(self.data.names[member]))


def refused(name: str) -> str:
    return (
        f"the gradient of {name} is not finite; its update was not applied, those of the parameters before it were "
        '(updates = "in-backward"). Load a checkpoint, and look at the loss'
    )
