"""What forward passes without gradients take, before they run.

The first of each kind is imagined, as a training pass is. What training takes says nothing of it: an evaluation makes
logits where training computes the loss in pieces, and a cache where training is checkpointed. One that is a little
larger than what is known is taken to grow with the square of it, for to imagine each length of a text that grows would
take longer than to compute it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ebbtide.memory.chunk import Chunk
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record
from ebbtide.planner.retention import Use
from ebbtide.planner.shape import PARAM, WHOLE, ModelShape
from ebbtide.planner.uses import SCALARS, least_room
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.planning.calls import PLAIN, Call, with_sizes
from ebbtide.runtime.planning.input_shapes import Kind, kind_of
from ebbtide.runtime.planning.tracer import SymbolicPasses

Shapes = tuple[tuple[int, ...], ...]

REMEMBERED = 32
NEAR = 1.5
"""So much larger than what is known, an evaluation is not imagined."""


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
        self._known: OrderedDict[str, Need] = OrderedDict()
        """By signature."""
        self._idle: dict[tuple[str, ...], bool] = {}
        """By structure: whether the numbers among the arguments make no difference, where that was tried."""
        self._unseen: set[tuple[str, ...]] = set()
        """Structures of which no pass could be imagined."""
        self._trained: OrderedDict[Shapes, int] = OrderedDict()
        """The level of training passes, by the shapes of their input."""
        self._plan: Plan | None = None

    def trained(self, plan: Plan, call: Call) -> None:
        """Training goes on by this plan."""
        if plan is not self._plan:
            self._plan = plan
            self._unseen.clear()  # it may have been for want of room
            _remember(self._trained, kind_of(call.signature).sizes, max(plan.levels, default=0))

    def make_room(
        self,
        call: Call,
        planned: int,
        pinned: bool,
        held: int,
    ) -> bool:
        """For a pass that is about to run. False where nobody knows what it takes, or only that it is no more than the
        `planned` bytes that the plan at hand has for training: its batches may have been larger before. `pinned`:
        parameters may not leave, or gradients are there, so that there is less room than training has. `held`: bytes of
        outputs that the loop holds."""
        if not _can_be_imagined(call):
            return False
        left = 0 if self._plan is None else self._plan.record.left
        beside = max(0, max(held, left) - self._room.claims.outputs)
        need = self._need(call, beside)
        if need is None:
            sizes = kind_of(call.signature).sizes
            trained = min((n for known, n in self._trained.items() if larger(sizes, known) <= 1.0), default=0)
            self._room.raise_level(max(trained, self._room.claims.level), guess=True)
            return False
        level = need.level + beside
        if level <= planned and not pinned:
            return False
        level = max(level, 0 if self._room.claims.of_pass.guess else self._room.claims.level)
        self._give_up(self._short(level))
        self._room.raise_level(level)
        self._room.claims.imagined = True
        self._seat(need)
        return True

    def _need(self, call: Call, beside: int) -> Need | None:
        """What is known of it, from one like it where there is room for a little more; else it is imagined."""
        known = self._known.get(call.signature)
        if known is not None:
            self._known.move_to_end(call.signature)
            return known
        kind = kind_of(call.signature)
        near = [
            math.ceil(need.level * ratio * ratio)
            for other, need in self._of_structure(kind)
            if (ratio := larger(kind.sizes, other.sizes)) <= NEAR
            and (other.numbers == kind.numbers or self._numbers_idle(call, other, need))
        ]
        enough = min((level for level in near if self._short(level + beside) <= 0), default=None)
        if enough is not None:
            return Need(enough)
        need = None if kind.structure in self._unseen else self._imagine(call)
        if need is None:
            self._unseen.add(kind.structure)
        else:
            _remember(self._known, call.signature, need)
        return need

    def _of_structure(self, kind: Kind) -> list[tuple[Kind, Need]]:
        every = [(kind_of(signature), need) for signature, need in self._known.items()]
        return [(other, need) for other, need in every if other.structure == kind.structure]

    def _numbers_idle(self, call: Call, other: Kind, need: Need) -> bool:
        """Whether it takes what the other does, for all that a number or a text is another. Tried once."""
        structure = other.structure
        if structure not in self._idle:
            like = with_sizes(call, other.sizes, self._room.store.backend.device)
            self._idle[structure] = like is not None and self._imagine(like) == need
        return self._idle[structure]

    def _imagine(self, call: Call) -> Need | None:
        record = self._imagining.imagine(call)
        return None if record is None else Need(record.peak + SCALARS, self._uses_of(record))

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


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > REMEMBERED:
        known.popitem(last=False)


def _can_be_imagined(call: Call) -> bool:
    """Not where there is what a pass may change, such as a cache: it could not be left as it was."""
    return all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in tree_leaves((call.args, call.kwargs)))


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
