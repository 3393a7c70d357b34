"""The copies of chunks, and the books about them: where there is one, which are good, and what room one takes.

A chunk may have a copy on the device, on the host, and on SSD. A copy is *valid* when it holds the current value; of
several valid ones all but one can be dropped without traffic. Writing makes the written copy the only valid one.
"""

from __future__ import annotations

from weakref import WeakSet

import torch

from ebbtide.backend.base import Backend
from ebbtide.disk.space import DiskSpace
from ebbtide.layout import ALONE, Layout, Slicing
from ebbtide.memory.chunk import GATHERED, PASSING, TIERS, TORCH_DTYPES, Chunk
from ebbtide.memory.host import HostSpace
from ebbtide.memory.integrity import check_books
from ebbtide.memory.ledger import Ledger
from ebbtide.memory.ssd import SsdSpace
from ebbtide.plan.shape import PARAM, WHOLE
from ebbtide.plan.stage import piece_bytes


def _parameter_bytes(layout: Layout, slicing: Slicing) -> int:
    return sum(slicing.slice(chunk.size) * TORCH_DTYPES[chunk.dtype].itemsize for chunk in layout.chunks)


class Copies:
    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        ledger: Ledger,
        disk: DiskSpace | None = None,
        slicing: Slicing = ALONE,
    ) -> None:
        """`slicing`: how ranks share the chunks; all that is here is this rank's slices of them."""
        self.layout = layout
        self.slicing = slicing
        self.backend = backend
        self.ledger = ledger
        self.host_space = HostSpace(layout, backend, ledger, slicing)
        piece = piece_bytes(_parameter_bytes(layout, slicing))
        self.ssd_space = None if disk is None else SsdSpace(disk, ledger, piece)
        self.near = "host" if ledger.budgets["host"] else "device"
        """The tier next to SSD: the device itself where it is RAM and there is no other."""
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.graphs: WeakSet[object] = WeakSet()
        """One for each graph of autograd's that has saved weights as they are, and not where they will be."""

    def add(self, kind: str, index: int, dtype: torch.dtype) -> Chunk:
        size = self.layout.chunks[index].size
        size = self.slicing.slice(size) * (self.crew(index) if kind in GATHERED else 1)
        chunk = Chunk(kind, index, dtype, size, size * dtype.itemsize)
        self.chunks[kind, index] = chunk
        return chunk

    def crew(self, index: int) -> int:
        """How many ranks' slices of a chunk are computed with: of all, or of those that have the same experts."""
        return self.layout.spread.get(index, self.slicing.ranks)

    def used(self, index: int) -> int:
        """Elements of a chunk's slice that are no padding."""
        spec = self.layout.chunks[index]
        return self.slicing.used(spec.size, spec.used)

    def get(self, kind: str, index: int) -> Chunk:
        return self.chunks[kind, index]

    # -- places ---------------------------------------------------------------------------------------

    def reserve_ssd(self, chunk: Chunk) -> None:
        """Gives the chunk a place on SSD, whatever is there."""
        self._open(chunk, "ssd")

    def written(self, chunk: Chunk, tier: str) -> None:
        """The copy on `tier` was written: it is now the authoritative one. A parameter's stale host copy
        keeps its place, for it will be filled again every iteration."""
        chunk.device_valid, chunk.host_valid = tier == "device", tier == "host"
        chunk.ssd_valid = tier == "ssd"
        if chunk.kind != "param":
            for other in TIERS:
                if other != tier and getattr(chunk, other) is not None:
                    self._close(chunk, other)

    def _open(self, chunk: Chunk, tier: str) -> None:
        if tier == "host":
            if chunk.host is None:
                chunk.host = self.host_space.acquire(chunk.kind, chunk.index, chunk.dtype)
        elif tier == "ssd":
            if chunk.ssd is None:
                assert self.ssd_space is not None, "there is no SSD tier"
                kinds = self.stored_with(chunk)
                needed = self.ssd_space.needed(chunk.kind, chunk.index, chunk.size, kinds)
                self.clear_ssd(needed)
                chunk.ssd = self.ssd_space.acquire(chunk.kind, chunk.index, chunk.size, kinds)
        elif chunk.device is None:
            self.ledger.reserve("device", chunk.kind, chunk.nbytes)
            try:
                chunk.device = self.backend.allocate("device", chunk.nbytes)
            except BaseException:
                self.ledger.release("device", chunk.kind, chunk.nbytes)
                raise
            chunk.aliases = self.backend.aliases(chunk.device)

    def vacate(self, chunk: Chunk) -> None:
        """Gives up the place on SSD of a chunk that the tier next to it has, even while that is being updated."""
        if chunk.ssd is not None and chunk.move is None and chunk.valid_on(self.near):
            self._close(chunk, "ssd")

    def clear_ssd(self, needed: int) -> None:
        """Copies on SSD that are stale, or not the only ones, keep their places until others want them."""
        for valid in (False, True):
            for chunk in self.chunks.values():
                if needed <= self.ledger.room("ssd"):
                    return
                spare = any(chunk.valid_on(tier) for tier in ("device", "host"))
                left_alone = chunk.move is None and not chunk.worked_on and chunk.kind in ("param", "grad")
                if chunk.ssd is not None and spare and left_alone and chunk.ssd_valid == valid:
                    self._close(chunk, "ssd")

    def stored_with(self, chunk: Chunk) -> list[tuple[str, torch.dtype]]:
        """The kinds that lie together on SSD: all state of a chunk; parameters and gradients by themselves."""
        if chunk.kind in ("param", "grad"):
            return [(chunk.kind, chunk.dtype)]
        return [
            (kind, other.dtype)
            for (kind, index), other in self.chunks.items()
            if index == chunk.index and kind not in PASSING
        ]

    def _close(self, chunk: Chunk, tier: str) -> None:
        if tier == "ssd":
            chunk.ssd_valid = False
            if chunk.ssd is not None:
                assert self.ssd_space is not None
                chunk.ssd = None
                self.ssd_space.release(chunk.kind, chunk.index)
        elif tier == "host":
            chunk.host_valid = False
            if chunk.host is not None:
                for event in chunk.pending:
                    event.synchronize()
                chunk.pending = []
                chunk.host = None
                self.host_space.release(chunk.kind, chunk.index, chunk.dtype)
        else:
            chunk.device_valid = False
            if chunk.device is not None:
                memory, chunk.device = chunk.device, None
                self.backend.free("device", memory)
                self.ledger.release("device", chunk.kind, chunk.nbytes)

    # -- questions ------------------------------------------------------------------------------------

    def room_needed(self, chunk: Chunk, tier: str) -> int:
        """Bytes that a copy on `tier` (device or host) would reserve now."""
        if tier == "host":
            return (
                0 if chunk.host is not None else self.host_space.needed(chunk.index, chunk.dtype, chunk.kind)
            )
        return 0 if chunk.device is not None else chunk.nbytes

    def only_here(self, chunk: Chunk) -> bool:
        """Whether the device's copy would have to be moved to make room."""
        return chunk.device_valid and not chunk.host_valid and chunk.kind != WHOLE

    def in_use(self, chunk: Chunk) -> bool:
        """Pinned, worked on, or a tensor that we did not make still looks at the device copy (a running
        backward operator, a view that somebody keeps); or a graph wants it as it is."""
        if chunk.pins or chunk.worked_on or (chunk.kind in (PARAM, WHOLE) and self.graphs):
            return True
        return chunk.device is not None and self.backend.aliases(chunk.device) > chunk.aliases

    def check_integrity(self) -> None:
        """Raises unless copies, validity, reservations and the back end's own count agree."""
        check_books(self.chunks.values(), self.ledger)
        self.host_space.check()
        if self.ssd_space is not None:
            self.ssd_space.check()
