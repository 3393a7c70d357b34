"""Gradients that wait for a lock-free update, and how far updates are, by chunk.

A step's gradients become the sum as they are, where they lie on the tier of the updates already; else a thread adds
them when they have arrived there. Steps differ in scale (clipping, loss scaling), so what is added is weighted, and
rounded once. The thread that issues the computation keeps these books.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbtide.devices.cpu_device import CopyEvent
from ebbtide.errors import StateError
from ebbtide.kernels import Kernels
from ebbtide.kernels.base import WAITS_IN
from ebbtide.memory.chunk import Chunk, aligned
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.runtime.updates.lock_free.buffers import GRADIENTS, LockFreeBuffers
from ebbtide.runtime.updates.update_queue import UpdateQueue


@dataclass(slots=True, eq=False)
class WaitingGradients:
    """A sum of gradients that no update has consumed yet."""

    memory: Chunk
    scale: float
    """What the sum is multiplied with, to be that of the gradients."""
    steps: dict[int, int] = field(default_factory=dict)
    """By parameter, how many steps are in the sum."""
    count: int = 0
    """Steps that the chunk had gradients in."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The optimizer's settings in the newest of them."""
    added: list[CopyEvent] = field(default_factory=list)
    """The ends of additions."""


@dataclass(slots=True, eq=False)
class ChunkProgress:
    """Of one chunk. Gradients are counted by steps: `produced` is what the others add up to once nothing is pending."""

    waiting: WaitingGradients | None = None
    running: bool = False
    values: Chunk | None = None
    """New ones that the computation has not taken over."""
    writes: int = 0
    """The user's writes in place that they, or those that are being made, know of."""
    produced: int = 0
    applied: int = 0
    dropped: int = 0
    """Lost with an update that failed."""
    visible: int = 0
    """Of those applied, how many are in the values that the computation has."""
    updates: int = 0


class WaitingSums:
    def __init__(
        self,
        data: ModelData,
        places: FetchOnDemand,
        queue: UpdateQueue,
        buffers: LockFreeBuffers,
        kernels: Mapping[str, Kernels],
    ) -> None:
        """`kernels` by tier."""
        self._data, self._store, self._near = data, data.store, data.store.near
        self._places, self._queue = places, queue
        self._buffers, self._kernels = buffers, kernels

    def give(
        self, index: int, members: Sequence[int], scale: float, waiting: WaitingGradients | None
    ) -> WaitingGradients:
        """What waits with the gradients of one more step, which leave their chunk."""
        grad = self._store.chunks["grad", index]
        dtype = WAITS_IN[grad.dtype]
        if waiting is None and not self._store.has_host and dtype == grad.dtype:
            self._places.bring(grad)
            waiting = WaitingGradients(self._buffers.adopt(GRADIENTS, grad), scale)
        else:
            if waiting is None:
                waiting = WaitingGradients(self._buffers.take(GRADIENTS, grad, dtype), scale)
            self._add(grad, waiting, members, scale / waiting.scale)
        for member in members:
            waiting.steps[member] = waiting.steps.get(member, 0) + 1
        waiting.count += 1
        return waiting

    def _add(self, grad: Chunk, waiting: WaitingGradients, members: Sequence[int], weight: float) -> None:
        """A thread adds them once they have arrived; until then the chunk is its own."""
        events = []
        with self._places.room.together([grad]):
            if self._store.has_host:
                events += self._places.toward_host(grad)
            else:
                self._places.bring(grad)
        known = frozenset(waiting.steps)
        rows: list[tuple[bool, torch.Tensor, torch.Tensor]] = []
        for add, offset, count in self._ranges(members, known):
            copies = [(waiting.memory, self._near), (grad, self._near)]
            rows += [(add, row[0], row[1]) for _, row in aligned(copies, offset, count)]
        added = CopyEvent()
        waiting.added.append(added)
        kernels = self._kernels[self._near]

        def work() -> None:
            try:
                for event in events:
                    event.synchronize()
                for add, target, source in rows:
                    kernels.weigh(target, source, weight, add)
            except BaseException as error:
                added.set(error)
                raise
            finally:
                rows.clear()
            added.set(None)

        def finish(done: bool) -> None:
            with nullcontext() if done else suppress(Exception):
                self._store.settle(grad)
            self._store.free(grad)

        try:
            self._queue.submit([grad], [], work, finish)
        except BaseException:
            self._never(grad, added)
            raise

    def _never(self, grad: Chunk, added: CopyEvent) -> None:
        """Nobody waits for ever for what an interrupt kept from being submitted; where it came later, it is done."""
        if grad.work is not None:
            self._queue.wake()
            with suppress(Exception):
                grad.work.settle()
        if not added.done():
            added.set(StateError("gradients of a step were not added to those that wait"))

    def _ranges(self, members: Sequence[int], known: frozenset[int]) -> Iterator[tuple[bool, int, int]]:
        """(whether there is something to add to, first element, elements): neighbours together."""
        open_: tuple[bool, int, int] | None = None
        shares = self._data.shares
        for member in sorted(members, key=lambda m: shares[m].offset):
            place, add = shares[member], member in known
            if not place.numel:
                continue  # other ranks have it
            if open_ is not None and open_[0] == add and open_[1] + open_[2] == place.offset:
                open_ = (add, open_[1], open_[2] + place.numel)
                continue
            if open_ is not None:
                yield open_
            open_ = (add, place.offset, place.numel)
        if open_ is not None:
            yield open_
