"""Chunks: where each one's bytes are, which copy has authority, and how they move.

A chunk may have a copy on the device, on the host, or both. A copy is *valid* when it holds the current
value; two valid copies are a clean pair, and either can be dropped without traffic. Writing makes the
written copy the only valid one. A move goes through `fetch`/`evict`, which start it, and `settle`, which
ends it: until then the destination is reserved but not valid, so a move that fails leaves the source as
it was and the books right.

This module moves what it is told to and refuses what would break the books. It does not choose what to
move or when: that is the executor's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ebbtide.backend.base import Backend, Event
from ebbtide.errors import IntegrityError, StateError
from ebbtide.layout import Layout
from ebbtide.memory.host import Fragment, HostSpace
from ebbtide.memory.ledger import Ledger

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(slots=True, eq=False)
class Chunk:
    kind: str
    index: int
    dtype: torch.dtype
    size: int
    nbytes: int
    device: torch.Tensor | None = None
    host: list[Fragment] | None = None
    device_valid: bool = False
    host_valid: bool = False
    pins: int = 0
    move: tuple[str, list[Event]] | None = None
    pending: list[Event] = field(default_factory=list)
    """The last move's events: on a GPU the host must synchronise with them before it touches its copy."""
    aliases: int = 0
    """How many tensors of ours share the device copy's storage."""

    def __str__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @property
    def free(self) -> bool:
        return not (self.device_valid or self.host_valid)

    def valid_on(self, tier: str) -> bool:
        return self.device_valid if tier == "device" else self.host_valid

    def view(self) -> torch.Tensor:
        """The device copy as one flat tensor of its dtype."""
        assert self.device is not None, f"{self} has no device copy"
        return self.device.view(self.dtype)

    def pieces(self, tier: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, flat tensor) for each contiguous piece of a copy."""
        if tier == "device":
            yield 0, self.view()
        else:
            assert self.host is not None, f"{self} has no host copy"
            for fragment in self.host:
                yield fragment.start // self.dtype.itemsize, fragment.memory.view(self.dtype)

    def slices(self, tier: str, offset: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(place in the range, flat tensor) for the elements [offset, offset + count) of a copy."""
        if tier == "device":
            yield 0, self.view()[offset : offset + count]
            return
        for start, piece in self.pieces(tier):
            first = max(offset, start)
            last = min(offset + count, start + piece.numel())
            if first < last:
                yield first - offset, piece[first - start : last - start]


def aligned(
    copies: Sequence[tuple[Chunk, str]], offset: int, count: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """The same elements of several chunks' copies, cut where any of them is cut: (place, flat tensors)."""
    parts = [list(chunk.slices(tier, offset, count)) for chunk, tier in copies]
    if all(len(part) == 1 for part in parts):
        yield 0, [part[0][1] for part in parts]
        return
    borders = sorted({start for part in parts for start, _ in part} | {count})
    for first, last in pairwise(borders):
        row = []
        for part in parts:
            start, piece = next(pair for pair in reversed(part) if pair[0] <= first)
            row.append(piece[first - start : last - start])
        yield first, row


@dataclass
class Traffic:
    """What has been moved; `moved` in bytes by link."""

    moved: dict[str, int] = field(default_factory=lambda: {"host_to_device": 0, "device_to_host": 0})
    fetches: int = 0
    evictions: int = 0
    drops: int = 0
    stalls: dict[str, float] = field(default_factory=lambda: {"host_to_device": 0.0, "device_to_host": 0.0})
    """Seconds that the host waited for a move, by link."""


class ChunkStore:
    def __init__(self, layout: Layout, backend: Backend, ledger: Ledger) -> None:
        self.layout = layout
        self.backend = backend
        self.ledger = ledger
        self.traffic = Traffic()
        self.host_space = HostSpace(layout, backend, ledger)
        self.chunks: dict[tuple[str, int], Chunk] = {}

    def add(self, kind: str, index: int, dtype: torch.dtype) -> Chunk:
        size = self.layout.chunks[index].size
        chunk = Chunk(kind, index, dtype, size, size * dtype.itemsize)
        self.chunks[kind, index] = chunk
        return chunk

    def get(self, kind: str, index: int) -> Chunk:
        return self.chunks[kind, index]

    # -- copies ---------------------------------------------------------------------------------------

    def allocate(self, chunk: Chunk, tier: str, zero: bool = False) -> None:
        """Gives a free chunk its first copy; its contents are undefined unless `zero`, padding's always."""
        if not chunk.free or chunk.move:
            raise StateError(f"{chunk} already has a payload; a chunk is allocated only when it is free")
        self._open(chunk, tier)
        if zero:
            # Not the padding: on a CPU, memory that nobody touches takes no room.
            for _, piece in chunk.slices(tier, 0, self.layout.chunks[chunk.index].used):
                piece.zero_()
        self.written(chunk, tier)

    def written(self, chunk: Chunk, tier: str) -> None:
        """The copy on `tier` was written: it is now the authoritative one. A parameter's stale host copy
        keeps its place, for it will be filled again every iteration."""
        chunk.device_valid = tier == "device"
        chunk.host_valid = tier == "host"
        if chunk.kind != "param":
            self._close(chunk, "host" if tier == "device" else "device")

    def drop(self, chunk: Chunk, tier: str) -> None:
        """Gives up one copy of a chunk that has another valid one, or whose copy there is stale."""
        self.settle(chunk)
        other = "host" if tier == "device" else "device"
        if chunk.valid_on(tier) and not chunk.valid_on(other):
            raise IntegrityError(f"{chunk} would lose its only valid copy ({tier})")
        if tier == "device" and chunk.pins:
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot leave the device")
        self._close(chunk, tier)

    def free(self, chunk: Chunk) -> None:
        """The chunk's payload is no longer needed anywhere."""
        self.settle(chunk)
        if chunk.pins:
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot be freed")
        chunk.device_valid = chunk.host_valid = False
        self._close(chunk, "device")
        self._close(chunk, "host")

    def _open(self, chunk: Chunk, tier: str) -> None:
        if tier == "host":
            if chunk.host is None:
                chunk.host = self.host_space.acquire(chunk.kind, chunk.index, chunk.dtype)
        elif chunk.device is None:
            self.ledger.reserve("device", chunk.kind, chunk.nbytes)
            try:
                chunk.device = self.backend.allocate("device", chunk.nbytes)
            except BaseException:
                self.ledger.release("device", chunk.kind, chunk.nbytes)
                raise
            chunk.aliases = self.backend.aliases(chunk.device)

    def _close(self, chunk: Chunk, tier: str) -> None:
        if tier == "host":
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

    # -- moves ----------------------------------------------------------------------------------------

    def room_needed(self, chunk: Chunk, tier: str) -> int:
        """Bytes that a copy on `tier` would reserve now."""
        if tier == "host":
            return (
                0 if chunk.host is not None else self.host_space.needed(chunk.index, chunk.dtype, chunk.kind)
            )
        return 0 if chunk.device is not None else chunk.nbytes

    def fetch(self, chunk: Chunk) -> None:
        """Starts bringing the chunk to the device."""
        if chunk.device_valid or (chunk.move and chunk.move[0] == "host_to_device"):
            return
        self.settle(chunk, host=True)
        if not chunk.host_valid:
            raise StateError(f"{chunk} has no payload to fetch")
        self._open(chunk, "device")
        self._start(chunk, "host_to_device")
        self.traffic.fetches += 1

    def evict(self, chunk: Chunk) -> None:
        """Starts taking the chunk off the device; nothing is moved where the host copy is still good."""
        self.settle(chunk)
        if chunk.device is None:
            return
        if chunk.pins:
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot be evicted")
        if chunk.host_valid or not chunk.device_valid:
            self.traffic.drops += 1
            self._close(chunk, "device")
            return
        self._open(chunk, "host")
        self._start(chunk, "device_to_host")
        self.traffic.evictions += 1

    def _start(self, chunk: Chunk, link: str) -> None:
        assert chunk.device is not None and chunk.host is not None
        events: list[Event] = []
        chunk.move = (link, events)
        for fragment in chunk.host:
            part = chunk.device[fragment.start : fragment.start + fragment.memory.numel()]
            pair = (part, fragment.memory) if link == "host_to_device" else (fragment.memory, part)
            events.append(self.backend.copy(*pair, link))
        self.traffic.moved[link] += chunk.nbytes

    def settle(self, chunk: Chunk, host: bool = False) -> None:
        """Ends a move under way. With `host` the host itself may read or write its copy afterwards."""
        if chunk.move is not None:
            link, events = chunk.move
            arrived = "device" if link == "host_to_device" else "host"
            chunk.move = None
            try:
                self._wait(events, link)
            except BaseException:
                self._close(chunk, arrived)
                raise
            chunk.pending = events
            if arrived == "device":
                chunk.device_valid = True
            else:
                chunk.host_valid = True
                self._close(chunk, "device")
        if host:
            for event in chunk.pending:
                event.synchronize()
            chunk.pending = []

    def _wait(self, events: Sequence[Event], link: str) -> None:
        start = time.perf_counter()
        for event in events:
            event.wait()
        self.traffic.stalls[link] += time.perf_counter() - start

    def turn_back(self, chunk: Chunk) -> None:
        """The chunk is wanted on the device: a fetch is ended, an eviction leaves a clean pair behind."""
        if chunk.move is not None and chunk.move[0] == "device_to_host":
            _, events = chunk.move
            chunk.move = None
            self._wait(events, "device_to_host")
            chunk.pending = events
            chunk.host_valid = True
        else:
            self.settle(chunk)

    def moving(self, link: str) -> list[Chunk]:
        """Chunks that are on their way over a link."""
        return [c for c in self.chunks.values() if c.move is not None and c.move[0] == link]

    def in_use(self, chunk: Chunk) -> bool:
        """Pinned, or a tensor that we did not make still looks at the device copy (a running backward
        operator, a view that somebody keeps)."""
        if chunk.pins:
            return True
        return chunk.device is not None and self.backend.aliases(chunk.device) > chunk.aliases

    # -- integrity ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises unless copies, validity, reservations and the back end's own count agree."""
        self.ledger.check()
        device = 0
        for chunk in self.chunks.values():
            device += chunk.nbytes if chunk.device is not None else 0
            if (chunk.device_valid and chunk.device is None) or (chunk.host_valid and chunk.host is None):
                raise IntegrityError(f"{chunk} is marked valid on a tier where it has no copy")
            if chunk.move is None and not chunk.free:
                stale = [
                    t for t in ("device", "host") if getattr(chunk, t) is not None and not chunk.valid_on(t)
                ]
                if stale and chunk.kind != "param":
                    raise IntegrityError(f"{chunk} keeps a stale copy on {stale}")
            if chunk.pins and chunk.device is None:
                raise IntegrityError(f"{chunk} is pinned ({chunk.pins}) but not on the device")
        tags = self.ledger.tags["device"]
        if device > self.ledger.reserved["device"] or device > sum(tags.values()):
            raise IntegrityError(f"device copies hold {device} bytes, reserved are {sum(tags.values())}")
        self.host_space.check()
