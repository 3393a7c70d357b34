"""What forward passes without gradients take, before they run.

Training's activations are the measure, for most evaluations have batches of its size. One that is larger is imagined, as
a training pass is; one that is a little larger than what is known is taken to grow with the square of it, for to imagine
each length of a text that grows would take longer than to compute it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from ebbtide.memory.chunk import Chunk
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record
from ebbtide.planner.retention import Use
from ebbtide.planner.shape import PARAM, WHOLE, ModelShape
from ebbtide.planner.uses import SCALARS, least_room
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.planning.calls import Call
from ebbtide.runtime.planning.tracer import SymbolicPasses

Shapes = tuple[tuple[int, ...], ...]

REMEMBERED = 32
NEAR = 1.5
"""So much larger than what is known, an evaluation is not imagined."""
PLAIN = (int, float, str, type(None))


@dataclass(frozen=True)
class Need:
    level: int
    """Bytes of non-model data, at the highest."""
    uses: tuple[Use, ...] = ()
    """Of chunks; only where an evaluation was imagined."""


class EvaluationMemory:
    def __init__(
        self, imagining: SymbolicPasses, room: Room, shape: ModelShape, give_up: Callable[[int], int]
    ) -> None:
        """`give_up`: has so many bytes of optimizer state leave the device, until the next training pass."""
        self._imagining, self._room, self._shape, self._give_up = imagining, room, shape, give_up
        self._known: OrderedDict[tuple[Shapes, bool], Need] = OrderedDict()
        """By the shapes of a pass's input, and whether it trains."""
        self._plan: Plan | None = None

    def trained(self, plan: Plan, call: Call) -> None:
        """Training goes on by this plan."""
        if plan is not self._plan:
            self._plan = plan
            self._remember(_shapes(call), True, Need(max(plan.levels, default=0)))

    def make_room(
        self,
        call: Call,
        planned: int,
        pinned: bool,
        held: int,
    ) -> bool:
        """For a pass that is about to run. False where nobody knows what it takes, or only that it is no more than the
        `planned` bytes that the plan at hand has for training: its batches may have been larger before. `pinned`:
        parameters may not leave, or gradients are there, so that there is less room than training has, and what it takes
        has to be known. `held`: bytes of outputs that the loop holds."""
        shapes = _shapes(call)
        if shapes is None:
            return False
        measures = [(larger(shapes, one), trains, need.level) for (one, trains), need in self._known.items()]
        if pinned:
            # Training's levels are with all that is saved for backward.
            measures = [one for one in measures if not one[1]]
        elif any(trains and ratio <= 1.0 and level <= planned for ratio, trains, level in measures):
            return False
        near = [math.ceil(level * ratio * ratio) for ratio, _, level in measures if ratio <= NEAR]
        left = 0 if self._plan is None else self._plan.record.left
        beside = max(0, max(held, left) - self._room.claims.outputs)
        little = min((one for one in near if self._short(one + beside) <= 0), default=-1)
        need = self._known.get((shapes, False), Need(little))
        if need.level < 0:
            record = self._imagining.imagine(call)
            if record is None:
                trained = min((one for ratio, trains, one in measures if trains and ratio <= 1.0), default=0)
                self._room.raise_level(max(trained, self._room.claims.level), guess=True)
                return False
            need = Need(record.peak + SCALARS, self._uses_of(record))
            self._remember(shapes, False, need)
        level = need.level + beside
        if level <= planned and not pinned:
            return False
        level = max(level, 0 if self._room.claims.of_pass.guess else self._room.claims.level)
        self._give_up(self._short(level))
        self._room.raise_level(level)
        self._room.claims.imagined = True
        self._seat(need)
        return True

    def least(self, record: Record) -> int:
        """Bytes of the device that an evaluation needs which was imagined: optimizer state leaves for it."""
        shape, sizes = self._shape, [0] * self._shape.chunks
        for index in range(shape.chunks):
            whole = shape.whole_bytes[index] if index in shape.shared else 0
            sizes[index] = shape.parameter_bytes[index] + whole
        uses = self._uses_of(record)
        length = 1 + max((use.last for use in uses), default=0)
        return record.peak + SCALARS + least_room([0] * length, sizes, uses)

    def _uses_of(self, record: Record) -> tuple[Use, ...]:
        return tuple(
            Use(chunk, access.first, access.last)
            for access in record.accesses
            for chunk in self._shape.run_chunks[access.run]
        )

    def _seat(self, need: Need) -> None:
        """What it uses of chunks at once has room beside it, or it is refused before it runs. What ranks share is
        gathered beside its slice, where it is not there."""
        if not need.uses:
            return
        shape, room = self._shape, self._room
        free = {chunk.index: chunk for chunk in self._free(WHOLE) + self._free(PARAM) if self._is_used(chunk)}
        slices = {chunk.index: chunk for chunk in self._free(PARAM) if chunk.index in shape.shared}
        count = range(shape.chunks)
        sizes = [free[i].nbytes if i in free else 0 for i in count]
        sizes += [
            slices[i].nbytes if i in slices and i in free and free[i].device is None else 0 for i in count
        ]
        first: dict[int, list[int]] = {}
        for use in need.uses:
            first.setdefault(use.first, []).append(shape.chunks + use.item)
        # One after the other: the largest slice at a time.
        gathers = tuple(Use(max(items, key=lambda i: sizes[i]), at, at) for at, items in first.items())
        length = 1 + max(use.last for use in need.uses)
        needed = least_room([0] * length, sizes, need.uses + gathers)
        there = sum(chunk.nbytes for chunk in (*free.values(), *slices.values()) if chunk.device is not None)
        if needed > there + room.ledger.room("device"):
            room.make("device", needed)

    def _is_used(self, chunk: Chunk) -> bool:
        """Whether it is what is computed with."""
        return (chunk.kind == WHOLE) == (chunk.index in self._shape.shared)

    def _free(self, kind: str) -> list[Chunk]:
        """Those that nothing keeps where they are."""
        return [chunk for chunk in self._room.store.chunks.values() if chunk.kind == kind and not chunk.pins]

    def _short(self, level: int) -> int:
        """Bytes that are missing for it beside what cannot leave and any two chunks of parameters."""
        ledger, free = self._room.ledger, self._free(PARAM) + self._free(WHOLE)
        held = ledger.reserved["device"] - sum(chunk.nbytes for chunk in free if chunk.device is not None)
        largest = max((chunk.nbytes for chunk in free), default=0)
        return level + self._room.claims.outputs + held + 2 * largest - self._room.budget("device")

    def _remember(self, shapes: Shapes | None, trains: bool, need: Need) -> None:
        if shapes is not None:
            self._known[shapes, trains] = need
            self._known.move_to_end((shapes, trains))
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


def _shapes(call: Call) -> Shapes | None:
    """None where there is what a pass may change, such as a cache: it could not be imagined and left as it was."""
    leaves = tree_leaves((call.args, call.kwargs))
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return None
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))


def larger(shapes: Shapes, known: Shapes) -> float:
    """How many times as large an input is, at most, in what it makes larger; 1 where no dimension is larger."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in known]:
        return math.inf
    return max(
        (
            math.prod(max(1.0, a / b) if b else math.inf for a, b in zip(one, other, strict=True))
            for one, other in zip(shapes, known, strict=True)
        ),
        default=1.0,
    )
