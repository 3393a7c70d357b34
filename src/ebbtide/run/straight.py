"""Gradients that go straight to the host, where device and host are both RAM.

A gradient whose update is on the host would be copied twice: into its chunk, and with it to the host. Where the same
threads make both copies the first is one too many: the gradient is copied, or added, to where the update reads it. Plans
give it no chunk on the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import torch

from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import TO_HOST, Chunk
from ebbtide.memory.chunks import ChunkStore
from ebbtide.plan.shape import GRAD
from ebbtide.run.model import Place, laid_like
from ebbtide.run.room import Room


class Straight:
    def __init__(
        self, store: ChunkStore, room: Room, kernels: Mapping[str, Kernels], homes: Sequence[str]
    ) -> None:
        """`kernels` by tier; `homes`: by chunk, where its optimizer state lives."""
        self._store, self._room, self._kernels, self._homes = store, room, kernels["host"], homes
        self.possible = False

    def leads(self, chunk: Chunk) -> bool:
        """Whether a gradient goes to its chunk on the host. There is room, or else the pass is not what was planned:
        then it waits on the device."""
        if not self.possible or chunk.kind != GRAD or self._homes[chunk.index] == "device":
            return False
        if not self._fits(chunk):
            self._room.make_for(chunk, "host")
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
        there = chunk.stretch("host", place.offset, place.numel)
        if there is not None:
            there = there.as_strided(place.shape, place.stride)
            return self._kernels.capture(there, gradient, add)
        flat = laid_like(gradient, place.shape, place.stride, chunk.dtype)
        sums = [torch.empty(0, dtype=torch.float64)]
        for first, piece in chunk.slices("host", place.offset, place.numel):
            self._kernels.capture(piece, flat[first : first + piece.numel()], add)
            sums.append(self._kernels.block_sums(piece))  # pages are cut on blocks' borders
        return self._kernels.pairwise(torch.cat(sums))
