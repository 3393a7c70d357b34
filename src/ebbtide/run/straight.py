"""Gradients that go straight to the host, where device and host are both RAM.

A gradient whose update is on the host would be copied twice: into its chunk, and with it to the host. Where the same
threads make both copies the first is one too many: the gradient is copied, or added, to where the update reads it.
Not where the host overflows to SSD: plans count each gradient there from its chunk's last one on, and parameters would
have to leave for those that are early. Nor where activations leave: plans count the chunk on the device all the same,
and with little else there the least budgets would be more than is used.
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
from ebbtide.run.model import Place, dense


class Straight:
    def __init__(self, store: ChunkStore, kernels: Mapping[str, Kernels], homes: Sequence[str]) -> None:
        """`kernels` by tier; `homes`: by chunk, where its optimizer state lives."""
        self._store, self._kernels, self._homes = store, kernels["host"], homes
        self.possible = False

    def leads(self, chunk: Chunk, place: Place, gradient: torch.Tensor) -> bool:
        """Whether a gradient goes to its chunk on the host: there is room, and the device has nothing of the chunk."""
        return (
            self.possible
            and chunk.kind == GRAD
            and self._homes[chunk.index] != "device"
            and not chunk.device_valid
            and chunk.move is None
            and tuple(gradient.stride()) == place.stride
            and gradient.dtype == chunk.dtype
            and self._store.ledger.room("host") >= self._store.room_needed(chunk, "host")
        )

    def take(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        """Copies or adds a gradient to the chunk's host copy; the sum of squares of the result."""
        start = time.perf_counter()
        found = self._move(chunk, place, gradient, add)
        self._store.traffic.moved[TO_HOST] += place.numel * chunk.dtype.itemsize
        self._store.traffic.stalls[TO_HOST] += time.perf_counter() - start  # nothing is computed meanwhile
        return found

    def _move(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        flat = dense(gradient)
        there = chunk.stretch("host", place.offset, place.numel)
        if there is not None:
            return self._kernels.capture(there, flat, add)
        sums = [torch.empty(0, dtype=torch.float64)]
        for first, piece in chunk.slices("host", place.offset, place.numel):
            self._kernels.capture(piece, flat[first : first + piece.numel()], add)
            sums.append(self._kernels.block_sums(piece))  # pages are cut on blocks' borders
        return self._kernels.pairwise(torch.cat(sums))
