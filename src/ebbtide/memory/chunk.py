"""A chunk: one run of elements of one kind, its copies on the tiers, and how their elements are reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from ebbtide.devices.device import Event
from ebbtide.memory.host_space import HostFragment
from ebbtide.memory.ssd_space import StoredRange
from ebbtide.planner.shape import GRAD, PARAM, WHOLE, WHOLE_GRAD

GATHERED = (WHOLE, WHOLE_GRAD)
"""Kinds of all ranks' slices together; they are on the device alone, for a while."""
PASSING = (PARAM, GRAD, *GATHERED)
"""Kinds that come and go; the others are optimizer state."""
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class ChunkWork(Protocol):
    """Something that reads and writes chunks beside the computation, such as an update."""

    @property
    def waiting(self) -> bool:
        """Whether it has yet to begin, and brings its chunks itself then: meanwhile they may leave."""

    def settle(self) -> None:
        """Waits until it is over, and brings the chunks' books up to date."""


@dataclass(slots=True, eq=False)
class Chunk:
    kind: str
    index: int
    dtype: torch.dtype
    size: int
    nbytes: int
    device: torch.Tensor | None = None
    host: list[HostFragment] | None = None
    ssd: list[StoredRange] | None = None
    device_valid: bool = False
    host_valid: bool = False
    ssd_valid: bool = False
    pins: int = 0
    """Leases that have not ended; written by them alone."""
    move: tuple[str, list[Event]] | None = None
    started: int = 0
    """The number of its last move, counted over all chunks."""
    pending: list[Event] = field(default_factory=list)
    """The last move's events: on a GPU the host must synchronise with them before it touches its copy."""
    aliases: int = 0
    """How many tensors of ours share the device copy's storage."""
    work: ChunkWork | None = None
    """What has the chunk to itself until it is settled."""

    def __str__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @property
    def free(self) -> bool:
        return not (self.device_valid or self.host_valid or self.ssd_valid)

    def lease(self) -> Lease:
        """Keeps the chunk on the device until the lease ends."""
        return Lease(self)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Whoever moves the chunk meanwhile does not wait for work that has yet to begin."""
        work, self.work = self.work, None
        try:
            yield
        finally:
            self.work = work

    def valid_on(self, tier: str) -> bool:
        return bool(getattr(self, f"{tier}_valid"))

    def mark(self, tier: str, valid: bool) -> None:
        setattr(self, f"{tier}_valid", valid)

    @property
    def worked_on(self) -> bool:
        return self.work is not None and not self.work.waiting

    @property
    def arrived(self) -> bool:
        """Whether the move under way, if there is one, is over but for the books."""
        return self.move is None or all(event.done() for event in self.move[1])

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

    def stretch(self, tier: str, offset: int, count: int) -> torch.Tensor | None:
        """The elements where they lie, if that is one stretch of host memory."""
        parts = [] if tier == "ssd" else list(self.slices(tier, offset, count))
        return parts[0][1] if len(parts) == 1 and parts[0][1].is_cpu else None

    def on_host(
        self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, count: int
    ) -> torch.Tensor | None:
        """A tensor of the host copy's `count` elements from `offset` on, if they are one stretch."""
        assert self.host is not None, f"{self} has no host copy"
        first, length = offset * self.dtype.itemsize, count * self.dtype.itemsize
        for fragment in self.host:
            if fragment.start <= first and first + length <= fragment.start + fragment.memory.numel():
                flat = fragment.memory.view(self.dtype)
                begin = flat.storage_offset() + offset - fragment.start // self.dtype.itemsize
                return flat.as_strided(shape, stride, begin)
        return None


class Lease:
    """A chunk that is in use stays on the device, until as many leases have ended as there were. One ends once."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: Chunk) -> None:
        self._chunk: Chunk | None = chunk
        chunk.pins += 1

    def end(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.pins -= 1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        self.end()  # an interrupt came before the caller had it


def aligned(
    copies: Sequence[tuple[Chunk, str]], offset: int, count: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """The same elements of several chunks' copies, cut where any of them is cut: (place, flat tensors)."""
    yield from cut([list(chunk.slices(tier, offset, count)) for chunk, tier in copies], count)


Slices = Sequence[tuple[int, torch.Tensor]]


def cut(parts: Sequence[Slices], count: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """`count` elements of several copies, each in slices, cut where any of them is."""
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
