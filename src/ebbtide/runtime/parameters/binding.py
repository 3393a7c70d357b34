"""The user's parameters and the chunks behind them: taking over, binding, values by name.

A parameter whose chunk is on the device is a view into it; otherwise its data is one NaN expanded to its
shape, so that a stale read is loud. Binding changes only when a chunk moves, so a parameter that stays
costs nothing.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ebbtide.errors import IntegrityError, StateError
from ebbtide.layout import Layout
from ebbtide.memory.chunk import TORCH_DTYPES, Chunk
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.memory.dtensors import part_of, split_of
from ebbtide.planner.shape import PARAM, WHOLE
from ebbtide.runtime.parameters.binding_protocols import (
    FollowsWrites,
    HasOthersElements,
    PendingValues,
    StaysInPlace,
)
from ebbtide.runtime.parameters.initial_values import apart
from ebbtide.runtime.parameters.initial_values import replace as replace_parameter
from ebbtide.runtime.parameters.parameter_classes import (
    forget,
    known_as,
    plainly,
    take_off,
    tell,
    wear,
)
from ebbtide.runtime.parameters.places import Place, SavedWeight, computed_part
from ebbtide.runtime.parameters.write_detection import LiveWrites, dense
from ebbtide.tracing.hooks import ParameterRun
from ebbtide.tracing.hooks.observer import gradients_together


def laid_like(
    gradient: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A gradient's elements in its parameter's storage order, as one flat tensor."""
    gradient = gradient.resolve_neg()
    if tuple(gradient.stride()) != stride or gradient.dtype != dtype:
        laid = torch.empty_strided(shape, stride, dtype=dtype, device=gradient.device)
        gradient = laid.copy_(gradient)
    return dense(gradient)


class ModelData:
    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        runs: Sequence[ParameterRun],
        layout: Layout,
        store: ChunkStore,
        master: str,
        pending: PendingValues,
    ) -> None:
        self.names = list(names)
        self.member_of = {name: member for member, name in enumerate(self.names)}
        self.parameters = list(parameters)
        self.memory = [part_of(parameter) for parameter in parameters]
        """By parameter: the tensor whose memory is bound, itself unless tensor parallelism has split it."""
        self.runs = list(runs)
        self.layout = layout
        self.store = store
        self.master = master
        self.places = [
            Place(n, s.chunk, s.offset, s.numel, s.shape, s.stride)
            for n, s in ((n, layout.spans[n]) for n in names)
        ]
        self.shares = [
            store.slicing.share(place.offset, place.numel, layout.chunks[place.chunk].size)
            for place in self.places
        ]
        """By parameter: what this rank's slice has of it."""
        self.views = [computed_part(place, layout, store.slicing) for place in self.places]
        """By parameter: where it lies in what its module computes with; None where other ranks do that (experts)."""
        self.members: list[list[int]] = [[] for _ in layout.chunks]
        for index, place in enumerate(self.places):
            self.members[place.chunk].append(index)
        self.run_of = [0] * len(self.parameters)
        for run in self.runs:
            for index in run.parameters:
                self.run_of[index] = run.index
        self.run_chunks = tuple(
            tuple(sorted({self.places[p].chunk for p in run.parameters})) for run in self.runs
        )
        self.run_names = [", ".join(self.names[p] for p in run.parameters) for run in self.runs]
        self.trained = [any(parameters[p].requires_grad for p in group) for group in self.members]
        self.taken = [False] * len(self.parameters)
        self.originals = [p.dtype for p in self.parameters]
        self.on_meta = [p.is_meta for p in self.parameters]
        self.bound = [False] * len(layout.chunks)
        self._known = [False] * len(layout.chunks)
        """Whether parameters are counted among the users of the chunk's memory: from before the first is bound until the
        last is not, so that an interrupt between them leaves something to end."""
        self.live = LiveWrites(self.memory)
        self._between = False
        """Whether no pass runs, and parameters that are in place note who takes their memory."""
        here = weakref.ref(self)
        self._takers = [partial(_taken, here, member) for member in range(len(self.parameters))]
        weakref.finalize(self, forget, self.parameters)
        self._pending = pending
        self._writes: FollowsWrites | None = None
        self._ranks: HasOthersElements | None = None
        self._in_place: Callable[[], StaysInPlace | None] = lambda: None
        self._versions: list[int | None] = [None] * len(layout.chunks)
        self.writes = [0] * len(layout.chunks)
        """By chunk: how often writes in place by the user were noticed."""
        self._bound = [
            sorted((v.offset, p) for p in group if (v := self.views[p]) is not None) for group in self.members
        ]
        """By chunk: the parameters that are views of what is computed with, in order, each with its offset."""
        self._storages: dict[int, int] = {}
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._computed = [WHOLE if self.gathered(index) else PARAM for index in range(len(layout.chunks))]
        for index, spec in enumerate(layout.chunks):
            for kind in {PARAM, self._computed[index]}:
                store.add(kind, index, TORCH_DTYPES[spec.dtype])

    # -- who else takes part --------------------------------------------------------------------------

    def follow_writes_by(self, writes: FollowsWrites) -> None:
        self._writes = writes

    def complete_by(self, ranks: HasOthersElements) -> None:
        self._ranks = ranks

    def unbinds_after(self, one: StaysInPlace) -> None:
        """It is told before parameters become placeholders, as long as it is there."""
        self._in_place = weakref.ref(one)

    def before_values(self) -> None:
        """Before values are read or written by name."""
        self._pending.settle_values()

    def collect(self, member: int, flat: torch.Tensor) -> None:
        """Completes a parameter's elements with those that other ranks have."""
        if self._ranks is not None:
            self._ranks.collect(member, flat)

    # -- what a chunk is made of ----------------------------------------------------------------------

    def gathered(self, index: int) -> bool:
        """Whether ranks that compute with the chunk gather it; else each has what it computes with."""
        return self.store.crew(index) > 1

    def parameter_chunk(self, index: int) -> Chunk:
        """What this rank has of a chunk's parameters."""
        return self.store.chunks[PARAM, index]

    def computed(self, index: int) -> Chunk:
        """What the module's parameters are views of: all of the chunk."""
        return self.store.chunks[self._computed[index], index]

    def master_dtype(self, index: int) -> torch.dtype | None:
        """The dtype of a chunk's master, or None where the parameter is its own."""
        dtype = self.layout.chunks[index].dtype
        if dtype == "fp32":
            return None
        return torch.int16 if self.master == "split" and dtype == "bf16" else torch.float32

    def gradients_together(self) -> dict[int, int]:
        """By run of a compiled block: bytes of the gradients that its backward gives at once."""

        def gradient_bytes(member: int) -> int:
            place = self.places[member]
            size = place.numel * self.parameter_chunk(place.chunk).dtype.itemsize
            return size if self.parameters[member].requires_grad else 0

        return gradients_together(self.runs, gradient_bytes)

    # -- binding --------------------------------------------------------------------------------------

    def bind(self, index: int) -> None:
        """Makes the chunk's parameters views of its device copy."""
        if self.bound[index]:
            return
        self._refuse_lost_writes(index)
        chunk = self.computed(index)
        view, views = chunk.view(), self._bound[index]
        key, count = view.untyped_storage()._cdata, len(views)
        if not self._known[index]:
            # These three call nothing: no interrupt comes between them.
            self._storages[key] = index
            chunk.aliases += count
            self._known[index] = True
        for offset, member in views:
            place = self.views[member]
            assert place is not None
            take_off(self.parameters[member])
            self.memory[member].data = view.as_strided(place.shape, place.stride, offset)
            if self._between:
                self._note_aliases(member)
        self._versions[index] = self._version(index)
        self.bound[index] = True

    def unbind(self, index: int) -> None:
        """Before the chunk leaves: its parameters become loud placeholders."""
        if not self._known[index]:
            return
        if (stays := self._in_place()) is not None:
            stays.stop()
        chunk = self.computed(index)
        assert chunk.device is not None
        self.bound[index] = False  # first: whatever interrupts this, who needs them binds all of them again
        for _, member in self._bound[index]:
            take_off(self.parameters[member])  # an interrupt may have left one half-way
            self.memory[member].data = self._placeholder(member)
            wear(self.parameters[member])
        key, count = chunk.device.untyped_storage()._cdata, len(self._bound[index])
        self._versions[index] = self._version(index)
        del self._storages[key]
        chunk.aliases -= count
        self._known[index] = False

    def check(self) -> None:
        """What is taken for a weight is one."""
        for key, index in self._storages.items():
            memory = self.computed(index).device
            if memory is None or memory.untyped_storage()._cdata != key:
                names = ", ".join(self.names[m] for m in self.members[index])
                raise IntegrityError(f"memory that the chunk of {names} has left is still known as its own")
            found, chunk = self.store.backend.aliases(memory), self.computed(index)
            if self.bound[index] and found < chunk.aliases:
                raise IntegrityError(
                    f"{chunk} has {found} users, and {chunk.aliases} are taken for its parameters"
                )

    def _version(self, index: int) -> int:
        """Changes with every write in place to one of the chunk's parameters."""
        if not self.bound[index]:
            with plainly():  # they may say nothing else of themselves
                return self._count_versions(index)
        return self._count_versions(index)

    def _count_versions(self, index: int) -> int:
        found = 0
        for member in self.members[index]:
            parameter, memory = self.parameters[member], self.memory[member]
            found += parameter._version if parameter is memory else parameter._version + memory._version
        return found

    def written(self, index: int) -> bool:
        """Whether the user has written in place since the chunk was bound, or since that was noticed."""
        if not self.bound[index]:
            return False
        return self._version(index) != self._versions[index] or bool(self._replaced(index))

    def _replaced(self, index: int) -> list[int]:
        """The parameters that the user has given other memory (`p.data = ...`), which no version counts."""
        chunk = self.computed(index)
        assert chunk.device is not None
        with plainly():
            return self._elsewhere(index, chunk.device)

    # -- between passes ----------------------------------------------------------------------------

    def _note_aliases(self, member: int) -> None:
        """Whoever takes a parameter's memory between passes is noted. What has a class of the user's keeps it."""
        parameter = self.parameters[member]
        if type(parameter) is nn.Parameter:
            tell(parameter, self._takers[member])

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Around what computes with parameters, or keeps them in place: they have the class that they came with."""
        between, self._between = self._between, False
        if between:
            for index, bound in enumerate(self.bound):
                for _, member in self._bound[index] if bound else ():
                    take_off(self.parameters[member])
            self.notice_all()
            self.live.let_go()
        try:
            yield
        finally:
            if between:
                self.end_pass()

    def end_pass(self) -> None:
        """From now on nobody computes with parameters, until the next pass."""
        self._between = True
        for index, bound in enumerate(self.bound):
            for _, member in self._bound[index] if bound else ():
                self._note_aliases(member)

    def _elsewhere(self, index: int, memory: torch.Tensor) -> list[int]:
        """The chunk's parameters that do not lie in this memory."""
        key = memory.untyped_storage()._cdata
        return [m for _, m in self._bound[index] if self.memory[m].untyped_storage()._cdata != key]

    def _take_back(self, index: int, members: list[int]) -> None:
        """Values that lie elsewhere come into the chunk."""
        flat = self.computed(index).view()
        for member in members:
            place = self.views[member]
            assert place is not None
            with plainly():
                found = self.memory[member].data
            if tuple(found.shape) != place.shape:
                raise StateError(
                    f"{place.name} was given memory of shape {tuple(found.shape)}; expected {place.shape}, as when the "
                    "engine took it over"
                )
            view = flat.as_strided(place.shape, place.stride, place.offset)
            view.copy_(found)
            self.memory[member].data = view

    def notice_writes(self, index: int) -> None:
        """A write in place by the user makes the device copy the newest one."""
        if self.live.noted:
            for member in self.live.noted.intersection(self.members[index]):
                self.notice_live_write(member)
        if self.written(index):
            self._take_back(index, self._replaced(index))
            self._versions[index] = self._version(index)
            self._follow(index, self.members[index])

    def _follow(self, index: int, members: Sequence[int]) -> None:
        self.writes[index] += 1
        gathered = self.gathered(index)
        if not gathered:
            self.store.written(self.computed(index), "device")
        if self._writes is not None:
            if gathered:
                self._writes.adopt(index)
            self._writes.follow(index, members)
        for member in members:
            self.live.seen(member)

    def watch_writes(self, kept: Collection[int] = ()) -> None:
        """All parameters are on the device and stay there: what is written through `.data` counts, too. `kept`: of which
        the values are remembered."""
        self.live.begin((m for bound in self._bound for _, m in bound), kept)

    @property
    def split_members(self) -> list[int]:
        """Parameters whose master is theirs and a remainder."""
        trained = (i for i, one in enumerate(self.trained) if one and self.master_dtype(i) == torch.int16)
        return [member for index in trained for _, member in self._bound[index]]

    def notice_all(self) -> list[int]:
        """Whatever was written into parameters that are looked at; into which PyTorch did not count it."""
        members = self.live.members
        for index in sorted({self.places[member].chunk for member in members}):
            self.notice_writes(index)
        return [member for member in members if self.notice_live_write(member)]

    def notice_live_write(self, member: int) -> bool:
        """Whether there was one into a parameter that PyTorch did not count."""
        index = self.places[member].chunk
        if not self.bound[index] or self.written(index) or not self.live.found(member):
            return False
        self._follow(index, [member])
        return True

    def changed(self, members: Iterable[int]) -> None:
        """By us: what has been saved of their values for backward is refused there, as after a write of the user's."""
        for member in members:
            self.live.ours(member)
            torch.autograd.graph.increment_version(self.memory[member])
            index = self.places[member].chunk
            known = self._versions[index]
            if known is not None:
                self._versions[index] = known + 1

    def forget_writes(self, index: int) -> None:
        """What the user has written in place is overwritten, and he has been told."""
        if self.bound[index]:
            self._versions[index] = self._version(index)

    def _refuse_lost_writes(self, index: int) -> None:
        known = self._versions[index]
        with plainly():
            lost = known is not None and (self._version(index) != known or self._given_while_away(index))
        if lost:
            self._versions[index] = self._version(index)
            for placeholder in self._placeholders.values():
                placeholder.fill_(float("nan"))  # it may be in there, and would be read for all that are away
            names = ", ".join(self.names[m] for m in self.members[index])
            raise StateError(
                f"one of {names} was written while its chunk was away, so the write is lost; write through "
                "engine.weights(name, write=True)"
            )

    def _given_while_away(self, index: int) -> bool:
        """Whether a parameter has got other memory than its placeholder; it gets the chunk's, whatever that is."""
        away = self._placeholders.get(TORCH_DTYPES[self.layout.chunks[index].dtype])
        if away is None or self._known[index]:
            return False  # an interrupt has left some bound
        found = self._elsewhere(index, away)
        for member in found:
            self.memory[member].data = self._placeholder(member)
        return bool(found)

    def _placeholder(self, member: int) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.layout.chunks[self.places[member].chunk].dtype]
        if dtype not in self._placeholders:
            device = self.store.backend.device
            self._placeholders[dtype] = torch.full((), float("nan"), dtype=dtype, device=device)
        return self._placeholders[dtype].expand((self.views[member] or self.places[member]).shape)

    def release_original(self, member: int) -> None:
        """The parameter's own memory is no longer needed: its value is in its chunk."""
        self.give_memory(member, self._placeholder(member))
        self.taken[member] = True
        known_as(self.parameters[member], self.names[member])
        wear(self.parameters[member])

    def give_memory(self, member: int, value: torch.Tensor) -> None:
        """The parameter, which stays the same object, has other memory from now on."""
        parameter = self.parameters[member]
        take_off(parameter)
        split = split_of(parameter)
        if split is not None and value.dtype == parameter.dtype:
            self.memory[member].data = value
        elif split is not None:
            replace_parameter(parameter, split.around(apart(value)))
            self.memory[member] = part_of(parameter)
        elif parameter.is_meta != value.is_meta:
            replace_parameter(parameter, value)
        else:
            parameter.data = value

    # -- saved views ----------------------------------------------------------------------------------

    def locate(self, tensor: torch.Tensor) -> SavedWeight | None:
        whole, tensor = tensor, part_of(tensor)
        try:
            chunk = self._storages.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None
        if chunk is None:
            return None
        itemsize = self.computed(chunk).dtype.itemsize
        offset = tensor.storage_offset() * tensor.dtype.itemsize // itemsize
        bound = self._bound[chunk]
        _, member = bound[max(0, bisect_right(bound, offset, key=lambda one: one[0]) - 1)]
        return SavedWeight(
            chunk,
            self.run_of[member],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            split_of(whole),
            member,
            self.memory[member]._version,
        )

    def rebuild(self, handle: SavedWeight) -> torch.Tensor:
        if self.memory[handle.member]._version != handle.version and not self._pending.ahead_of_passes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.names[handle.member]}, of shape {list(handle.shape)}, was updated or written after forward had "
                "saved it. Run forward again after engine.step(), or a write"
            )
        memory = self.computed(handle.chunk).device
        assert memory is not None
        view = memory.view(handle.dtype).as_strided(handle.shape, handle.stride, handle.offset)
        return view if handle.split is None else handle.split.around(view)


def _taken(data: weakref.ref[ModelData], member: int) -> None:
    found = data()
    if found is not None:
        found.live.note(member)
