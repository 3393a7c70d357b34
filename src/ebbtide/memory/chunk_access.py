"""Elements of a chunk's copy, read and written where it is, on SSD, too: for values by name, which are few or come
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ebbtide.devices.device import Event
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.planner.sizes import BLOCK
from ebbtide.units import round_up

ZEROS = 1 << 20
"""Bytes of them that are written again and again."""
PORTION = 1 << 20
"""Elements that are looked at together: enough for the disk's full speed, in memory that no budget counts."""


def portions(count: int, most: int = 0) -> Iterator[tuple[int, int]]:
    """(start, number) of elements, in order. `most`: together, where that is not as many as usual."""
    most = most or PORTION
    for start in range(0, count, most):
        yield start, min(most, count - start)


def peek(store: ChunkStore, chunk: Chunk, offset: int, count: int) -> torch.Tensor:
    """The elements [offset, offset + count), in memory of their own."""
    flat = torch.empty(count, dtype=chunk.dtype, device="cpu")
    for place, piece, _ in _blocks(store, chunk, offset, count):
        flat[place : place + piece.numel()] = piece
    return flat


def poke(store: ChunkStore, chunk: Chunk, offset: int, values: torch.Tensor) -> None:
    """Writes elements from `offset` on."""
    for place, piece, write in _blocks(store, chunk, offset, values.numel()):
        piece.copy_(values[place : place + piece.numel()])
        write().wait()


def tier_of(chunk: Chunk) -> str:
    """Where a newest copy is."""
    return next(tier for tier in ("host", "device", "ssd") if chunk.valid_on(tier))


def copy_out(store: ChunkStore, chunk: Chunk, offset: int, out: torch.Tensor) -> None:
    """A chunk's elements from `offset` on, from whatever tier has them."""
    store.settle(chunk, host=True)
    tier = tier_of(chunk)
    if tier == "ssd":
        for start, count in portions(out.numel()):
            out[start : start + count] = peek(store, chunk, offset + start, count)
        return
    for start, piece in chunk.slices(tier, offset, out.numel()):
        out[start : start + piece.numel()].copy_(piece)


def clear(store: ChunkStore, chunk: Chunk) -> None:
    """Zeros, where nothing was written yet: what the extents last held was somebody else's."""
    assert chunk.ssd is not None and store.ssd_space is not None, f"{chunk} has no copy on SSD"
    store.settle_stream(chunk)
    zeros = torch.zeros(ZEROS, dtype=torch.uint8, device="cpu")
    for stored in chunk.ssd:
        left = min(round_up(stored.count * chunk.dtype.itemsize, BLOCK), stored.extent.nbytes - stored.offset)
        memory = [zeros] * (left // ZEROS) + [zeros[: left % ZEROS]]
        store.ssd_space.disk.write(stored.extent, memory, stored.offset).wait()


def _blocks(
    store: ChunkStore, chunk: Chunk, offset: int, count: int
) -> Iterator[tuple[int, torch.Tensor, Callable[[], Event]]]:
    """Whole blocks that hold the elements [offset, offset + count), read: (place in the range, the range's elements
    in them, what writes them back)."""
    assert chunk.ssd is not None and store.ssd_space is not None, f"{chunk} has no copy on SSD"
    store.settle_stream(chunk)
    disk, itemsize = store.ssd_space.disk, chunk.dtype.itemsize
    for stored in chunk.ssd:
        begin, stop = max(offset, stored.first), min(offset + count, stored.first + stored.count)
        for place, number in portions(stop - begin):
            first = begin - stored.first + place
            start = first * itemsize // BLOCK * BLOCK
            end = min(round_up((first + number) * itemsize, BLOCK), stored.extent.nbytes - stored.offset)
            memory = torch.empty(end - start, dtype=torch.uint8, device="cpu")
            disk.read(stored.extent, [memory], stored.offset + start).wait()
            skipped = first * itemsize - start
            piece = memory[skipped : skipped + number * itemsize].view(chunk.dtype)
            write = partial(disk.write, stored.extent, [memory], stored.offset + start)
            yield begin - offset + place, piece, write
