"""Gradients that go straight to the host, where device and host are both RAM.

A gradient whose update is on the host would be copied twice: into its chunk, and with it to the host. Where the same
threads make both copies the first is one too many: the gradient is copied, or added, to where the update reads it. Plans
give it no chunk on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsFloat

import torch

from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import TO_HOST, Chunk
from ebbtide.plan.shape import GRAD
from ebbtide.run.model import Place, dense
from ebbtide.run.room import Room
from ebbtide.run.updater import Updater


class Straight:
    def __init__(
        self, room: Room, updater: Updater, kernels: Mapping[str, Kernels], homes: Sequence[str]
    ) -> None:
        """`kernels` by tier; `homes`: by chunk, where its optimizer state lives."""
        self._room, self._store, self._updater = room, room.store, updater
        self._kernels, self._homes = kernels["host"], homes
        self.possible = False

    def leads(self, chunk: Chunk) -> bool:
        """Whether a gradient goes to its chunk on the host. There is room, or else the pass is not what was planned:
        then it waits on the device."""
        if not self.possible or chunk.kind != GRAD or self._homes[chunk.index] == "device":
            return False
        if not self._fits(chunk):
            self._room.drop_unplanned_copies()  # the others stay: they are counted there
        while not self._fits(chunk) and self._updater.settle_oldest():
            continue
        return self._fits(chunk)

    def _fits(self, chunk: Chunk) -> bool:
        return self._store.ledger.room("host") >= self._store.room_needed(chunk, "host")

    def take(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        """Copies or adds a gradient to the chunk's host copy; the sum of squares of the result."""
        start = time.perf_counter()
        found = self._move(chunk, place, gradient, add)
        self._store.traffic.moved[TO_HOST] += place.numel * chunk.dtype.itemsize
        self._store.traffic.stalls[TO_HOST] += time.perf_counter() - start  # nothing is computed meanwhile
        return found

    def _move(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        there = chunk.on_host(place.shape, place.stride, place.offset, place.numel)
        if there is not None:
            return self._kernels.capture(there, gradient, add)
        sums = [torch.empty(0, dtype=torch.float64)]
        for first, piece in chunk.slices("host", place.offset, place.numel):
            for at, part in _in_memory_order(gradient, place.stride, first, piece.numel()):
                self._kernels.capture(piece[at : at + part.numel()].view(part.shape), part, add)
            sums.append(self._kernels.block_sums(piece))  # pages are cut on blocks' borders
        return self._kernels.pairwise(torch.cat(sums))


def _in_memory_order(
    gradient: torch.Tensor, stride: tuple[int, ...], first: int, count: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(place, part) of so many elements, in the order that a parameter of that stride has them in memory. A gradient
    laid otherwise is not copied for it: no plan counts such a copy."""
    if tuple(gradient.stride()) == stride:
        yield 0, dense(gradient)[first : first + count]
        return
    order = sorted(range(gradient.dim()), key=lambda dim: -stride[dim])
    yield from _rows(gradient.permute(order), first, count)


def _rows(tensor: torch.Tensor, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of so many elements in row-major order: the end of a row, whole rows, the beginning of one."""
    if tensor.dim() == 1:
        yield 0, tensor[first : first + count]
        return
    each, done = tensor[0].numel(), 0
    while done < count:
        row, begin = divmod(first + done, each)
        whole = 0 if begin else (count - done) // each
        if whole:
            yield done, tensor[row : row + whole]
            done += whole * each
            continue
        part = min(each - begin, count - done)
        for at, found in _rows(tensor[row], begin, part):
            yield done + at, found
        done += part
