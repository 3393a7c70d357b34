"""One chunk's update: where its optimizer state lives, with the gradients that are held for it.

On the device it is done at once, in the order of the computation. On the host it is a job: the computation goes on, and
a reader of the chunk waits for it.

Note [prelaunched]: on a GPU the host knows the norm only when the device has come to the end of backward, and the
device would wait for the host. So updates are put together before that, and started together; their books are kept
while the device is at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from ebbtide.devices import Event
from ebbtide.errors import StateError
from ebbtide.kernels import Guarded, Kernels, Operands, Rule
from ebbtide.memory.chunk import Chunk, Slices, cut
from ebbtide.runtime.gradients.destinations import InPlaceGradients
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.parameters.binding import dense
from ebbtide.runtime.parameters.param_groups import ParamGroups, Segment
from ebbtide.runtime.updates.update_jobs import Bring, brought
from ebbtide.runtime.updates.update_queue import UpdateQueue


@dataclass(frozen=True, slots=True)
class Prelaunched:
    """The update of a chunk, but for its coefficients."""

    members: tuple[int, ...]
    memory: tuple[tuple[Chunk, torch.Tensor], ...]
    """The chunks that it works on, and where they were."""
    segments: tuple[tuple[int, int], ...]
    """(first element, elements) of what is updated alike."""
    operands: tuple[Operands, ...]


def prelaunch(
    steps: ParamGroups, param: Chunk, states: Sequence[Chunk], source: Chunk, members: Sequence[int]
) -> Prelaunched | None:
    """Where all of it is on the device, and quiet. `states`: by kind, the master first where there is one."""
    chunks = (param, *states, source)
    if any(not c.device_valid or c.move is not None or c.worked_on for c in chunks):
        return None
    views = [chunk.view() for chunk in chunks]
    found = [(one.offset, one.count) for one in steps.segments(members, 1.0, ahead=1)]
    operands = []
    for offset, count in found:
        parameter, *state, gradient = [view[offset : offset + count] for view in views]
        master = state.pop(0) if states and states[0].kind == "master" else None
        operands.append(Operands(parameter, gradient, master, tuple(state)))
    memory = tuple((chunk, chunk.device) for chunk in chunks if chunk.device is not None)
    return Prelaunched(tuple(members), memory, tuple(found), tuple(operands))


def carry_out(made: Prelaunched, segments: Sequence[Segment], kernels: Kernels | Guarded, rule: Rule) -> bool:
    """False, and nothing is done, where something is not as it was foreseen: moved, or grouped anew."""
    moved = any(chunk.device is not there or not chunk.device_valid for chunk, there in made.memory)
    if moved or tuple((one.offset, one.count) for one in segments) != made.segments:
        return False
    kernels.update_all(rule, zip(made.operands, (one.coefficients for one in segments), strict=True))
    return True


Piece = tuple[Operands, Sequence[float]]
"""What the kernels update in one go, and its coefficients."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that are updated alike, and their gradient."""

    segment: Segment
    gradient: Slices


class ChunkUpdates:
    def __init__(
        self,
        rule: Rule,
        kernels: Mapping[str, Kernels],
        places: FetchOnDemand,
        queue: UpdateQueue,
        kept: InPlaceGradients,
        param_groups: ParamGroups,
    ) -> None:
        """`kernels` by tier."""
        self.data, self.store, self.kernels = places.data, places.store, kernels
        self.places, self.queue = places, queue
        self.kept, self.rule = kept, rule
        self.param_groups = param_groups
        self._prelaunched: dict[int, Prelaunched] = {}
        self._started: dict[int, tuple[float, list[Segment]]] = {}
        """Chunks whose update has been started as it was foreseen; with which scale, and how."""

    def open_states(self, index: int) -> None:
        """Gives state that was never written its place; it is zero."""
        for state in self.store.state_chunks(index):
            if self.store.streams(index):
                self.store.reserve_ssd(state)
            elif state.free:
                self.places.allocate(state, self.store.state_homes[index])

    def prelaunch(self, index: int, sources: Mapping[Chunk, Sequence[int]]) -> None:
        """The chunk will be updated from these gradients, where they are now; how they are scaled is to be known."""
        if self.store.updates_on_device(index) and len(sources) == 1:
            [(source, members)] = sources.items()
            found = prelaunch(
                self.param_groups,
                self.data.parameter_chunk(index),
                self.store.state_chunks(index),
                source,
                members,
            )
            if found is not None:
                self._prelaunched[index] = found

    def start_prelaunched(self, scale: float, guarded: Guarded | None = None) -> None:
        """The arithmetic of all updates that are as foreseen; `update` does the rest. `guarded` will know the scale."""
        kernels = guarded or self.kernels["device"]
        for index, made in self._prelaunched.items():
            segments = list(self.param_groups.segments(made.members, scale, ahead=1))
            if not self.data.written(index) and carry_out(made, segments, kernels, self.rule):
                self._started[index] = scale, segments
                # At once: the chunk may leave for another's update before its own books are kept.
                self.store.written(self.data.parameter_chunk(index), "device")
        self._prelaunched.clear()

    @property
    def prelaunched(self) -> bool:
        """Whether some are."""
        return bool(self._prelaunched)

    def forget(self) -> None:
        """Nothing of what was foreseen comes."""
        self._prelaunched.clear()
        self._started.clear()

    def update(self, index: int, sources: Mapping[Chunk, Sequence[int]], scale: float) -> None:
        """Updates members of a chunk from the chunks that hold their gradients, and those whose gradients are kept."""
        alone = [m for m in self.data.members[index] if m in self.kept]
        if index in self._started:
            self._require_as_started(index, sources)
        self.data.notice_writes(index)
        self.open_states(index)
        self.places.forget(index)
        if self.store.updates_on_device(index):
            self._update_here(index, sources, alone, scale)
        else:
            self._submit(index, sources, alone, scale)
        self.places.refresh(index)

    def _require_as_started(self, index: int, sources: Mapping[Chunk, Sequence[int]]) -> None:
        """Whoever changes something once the update has begun comes too late."""
        before, segments = self._started[index]
        now = [segment for _, segment in self._segments(sources, before)]
        changed = ""
        if repr(now) != repr(segments):  # as text, for NaN is not equal to itself
            changed = "settings have been changed"
        if self.data.written(index):
            changed = "values have been written"
        if changed:
            raise StateError(
                f"{self.data.names[self.data.members[index][0]]}, or a parameter in its chunk: {changed} inside "
                "optimizer.step(), after the update had begun; do so between steps, or in a hook "
                "(optimizer.register_step_pre_hook)"
            )

    def update_one(self, member: int, gradient: torch.Tensor, scale: float) -> None:
        """Updates one parameter on the device from a gradient that lies by itself, flat and in storage order."""
        index = self.data.places[member].chunk
        param = self.data.parameter_chunk(index)
        self.data.notice_writes(index)
        self.open_states(index)
        with self.places.placed(param, "device"):
            parts = [Part(s, [(0, gradient)]) for s in self.param_groups.segments([member], scale)]
            self.run("device", index, parts)
            self.store.written(param, "device")

    def _update_here(
        self, index: int, sources: Mapping[Chunk, Sequence[int]], alone: Sequence[int], scale: float
    ) -> None:
        param = self.data.parameter_chunk(index)
        if index not in self._started:
            with self.places.placed(param, "device"):
                for source, members in sources.items():
                    with self.places.placed(source, "device"):
                        self.run("device", index, _parts(self._segments({source: members}, scale), "device"))
                self.run("device", index, self._parts_alone(alone, scale))
                self.store.written(param, "device")
        for source in sources:
            if source is not param:
                self.store.free(source)
        for member in alone:
            self.kept.drop(member)

    def _submit(
        self, index: int, sources: Mapping[Chunk, Sequence[int]], alone: Sequence[int], scale: float
    ) -> None:
        """The state is on the host or on SSD: the update goes on beside the computation, on the tier next to SSD."""
        param = self.data.parameter_chunk(index)
        tier, at_once = self.store.near, self.data.computed(index).pins > 0
        owned = list(dict.fromkeys((param, *sources)))
        for chunk in owned:
            if chunk.work is not None:
                chunk.work.settle()
        parts: list[Part] = []
        by_themselves = list(self._parts_alone(alone, scale))
        bring = self._bringing(parts, owned, self._segments(sources, scale), by_themselves)
        # Without that much room at all times, whoever waits for the update later could not have it.
        early = tier == "device" and not at_once and self.places.room.always(sum(c.nbytes for c in owned))
        needs = bring if early else brought(bring)
        self.places.put_away(param)
        run = self.stream if self.store.streams(index) else self.run
        self.queue.submit(
            [*owned, *self.store.state_chunks(index)],
            needs,
            lambda: run(tier, index, parts),
            self._finishing(index, owned, self.kept.lend(alone)),
            at_once=at_once,
        )

    def _bringing(
        self,
        parts: list[Part],
        owned: Sequence[Chunk],
        segments: Sequence[tuple[Chunk, Segment]],
        alone: Sequence[Part],
    ) -> Bring:
        """Brings chunks to where they are updated, and fills in the parts that they are updated in."""
        tier = self.store.near

        def bring(wait: bool) -> list[Event] | None:
            if not wait and not self.places.can_come(owned):
                return None
            with self.places.room.together(owned):
                waits = [event for chunk in owned for event in self.places.toward(chunk, tier)]
            parts[:] = [*_parts(segments, tier), *alone]
            return waits

        return bring

    def _finishing(self, index: int, owned: Sequence[Chunk], lent: Sequence[int]) -> Callable[[bool], None]:
        """The books of an update beside the computation. `owned`: its parameters, then its gradients."""
        streamed = self.store.streams(index)

        def finish(done: bool) -> None:
            for chunk in owned:
                with nullcontext() if done else suppress(Exception):  # a failed copy has been reported
                    self.store.settle(chunk)
            for chunk in owned[1:]:
                self.store.free(chunk)
            self.kept.give_back(lent)
            if not done:
                return
            if streamed:
                self.store.updated_on_ssd(index)
            self.store.written(owned[0], self.store.near)
            if self.store.has_host:
                self.places.leave_stale(owned[0])

        return finish

    def _segments(self, sources: Mapping[Chunk, Sequence[int]], scale: float) -> list[tuple[Chunk, Segment]]:
        """What is updated alike, and where its gradients are: as the optimizer's settings say now."""
        return [
            (c, segment)
            for c, members in sources.items()
            for segment in self.param_groups.segments(members, scale)
        ]

    def _parts_alone(self, members: Sequence[int], scale: float) -> Iterator[Part]:
        for member in members:
            for segment in self.param_groups.segments([member], scale):
                yield Part(segment, [(0, dense(self.kept[member]))])

    def run(self, tier: str, index: int, parts: Iterable[Part], values: Chunk | None = None) -> None:
        """The arithmetic: all copies are valid on `tier` and nobody else looks at them. `values`: parameters in a
        buffer, in place of the chunk's."""
        copies = (values or self.data.parameter_chunk(index), *self.store.state_chunks(index))

        def pieces() -> Iterator[Piece]:
            for part in parts:
                offset, count = part.segment.offset, part.segment.count
                rows = [list(chunk.slices(tier, offset, count)) for chunk in copies]
                yield from self._pieces(index, [*rows, part.gradient], part.segment)

        self._update_all(tier, index, pieces())

    def _update_all(self, tier: str, index: int, pieces: Iterable[Piece]) -> None:
        with self.store.traffic.journal.updating(index, tier):
            self.kernels[tier].update_all(self.rule, pieces)

    def stream(self, tier: str, index: int, parts: Sequence[Part], values: Chunk | None = None) -> None:
        """The same, with state that comes from SSD in pieces and goes back."""
        stream = self.queue.stream
        assert stream is not None and self.store.ssd_space is not None, (
            "state is on SSD, and nothing streams it"
        )
        param = values or self.data.parameter_chunk(index)
        for first, count, _ in self.store.ssd_space.group(index).pieces:
            slot = stream.take(index, first)
            done = False
            try:
                for part in parts:
                    common = part.segment.within(first, count)
                    if common is None:
                        continue
                    begin = common.offset - first
                    states = [[(0, held[begin : begin + common.count])] for held in slot.parts]
                    gradient = _between(part.gradient, common.offset - part.segment.offset, common.count)
                    copy = list(param.slices(tier, common.offset, common.count))
                    pieces = self._pieces(index, [copy, *states, gradient], common)
                    self._update_all(tier, index, pieces)
                done = True
            finally:
                stream.give(slot, changed=done)

    def _pieces(self, index: int, rows: Sequence[Slices], segment: Segment) -> Iterator[Piece]:
        """`rows`: parameter, state by kind, gradient."""
        has_master = ("master", index) in self.store.chunks
        for _, (parameter, *states, gradient) in cut(rows, segment.count):
            master = states.pop(0) if has_master else None
            yield Operands(parameter, gradient, master, tuple(states)), segment.coefficients


def _parts(segments: Sequence[tuple[Chunk, Segment]], tier: str) -> list[Part]:
    return [Part(one, list(chunk.slices(tier, one.offset, one.count))) for chunk, one in segments]


def _between(slices: Slices, offset: int, count: int) -> Slices:
    """The elements [offset, offset + count) of a tensor in slices."""
    found = []
    for start, piece in slices:
        first, last = max(offset, start), min(offset + count, start + piece.numel())
        if first < last:
            found.append((first - offset, piece[first - start : last - start]))
    return found
