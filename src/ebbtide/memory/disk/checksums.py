"""Checksums of what was written, kept in memory: what comes back otherwise was changed on the disk.

Each block has its own, so whatever is written at once can be read, or written anew, by any of its blocks: an update
writes all kinds of a piece together, a value by name is some blocks of one kind. Reads take whole blocks.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import torch

from ebbtide.errors import IntegrityError
from ebbtide.kernels.crc import crc32, crc32_each
from ebbtide.memory.disk.extents import BLOCK, Extent
from ebbtide.memory.disk.vectors import Memory
from ebbtide.units import round_up


class _KeptSums:
    """Of an extent, by block."""

    def __init__(self, blocks: int) -> None:
        self.sums = array("I", bytes(4 * blocks))
        self.known = bytearray(blocks)
        self.parts: dict[int, tuple[int, int]] = {}
        """Of blocks that were last written in part: (first, last) byte of the extent that the sum is of."""


class Checksums:
    def __init__(self) -> None:
        self._kept: dict[int, _KeptSums] = {}
        """By the start of an extent."""
        self._lock = threading.RLock()

    def forget(self, extent: Extent) -> None:
        with self._lock:
            self._kept.pop(extent.start, None)

    def distrust(self, extent: Extent, first: int, last: int) -> None:
        """What blocks with bytes of [first, last) hold is not known."""
        blocks = _blocks(first, last)
        with self._lock:
            kept = self._kept.get(extent.start)
            if kept is not None:
                kept.known[blocks.start : blocks.stop] = bytes(len(blocks))

    def keep(self, extent: Extent, first: int, last: int, memory: Sequence[Memory]) -> None:
        found, blocks = _sums(memory, first), _blocks(first, last)
        with self._lock:
            kept = self._kept.get(extent.start)
            if kept is None:
                kept = self._kept[extent.start] = _KeptSums(round_up(extent.nbytes, BLOCK) // BLOCK)
            for block in [block for block in kept.parts if block in blocks]:
                del kept.parts[block]
            for block in {blocks[0], blocks[-1]}:
                begin, end = max(first, block * BLOCK), min(last, (block + 1) * BLOCK)
                if (begin, end) != (block * BLOCK, min((block + 1) * BLOCK, extent.nbytes)):
                    kept.parts[block] = (begin, end)
            kept.sums[blocks.start : blocks.stop] = found
            kept.known[blocks.start : blocks.stop] = b"\1" * len(blocks)

    def verify(self, where: str, extent: Extent, first: int, last: int, memory: Sequence[Memory]) -> None:
        """Compares each block; `memory` has whole ones."""
        blocks = _blocks(first, last)
        with self._lock:
            kept = self._kept.get(extent.start)
            if kept is None:
                return
            expected, known = kept.sums[blocks.start : blocks.stop], kept.known[blocks.start : blocks.stop]
            parts = {block: part for block, part in kept.parts.items() if block in blocks}
        found = _sums(memory, first)
        for block, (begin, end) in parts.items():
            found[block - blocks.start] = _sum(memory, begin - first, end - first)
        if found == expected:
            return
        for block, one, other, sure in zip(blocks, expected, found, known, strict=True):
            if sure and one != other:
                begin, end = parts.get(block, (block * BLOCK, min((block + 1) * BLOCK, extent.nbytes)))
                raise IntegrityError(
                    f"{where}: bytes {begin} to {end} of the extent at {extent.start} came back changed ({end - begin} "
                    f"bytes): expected checksum {one:08x}, found {other:08x}; check the disk, close the engine, and "
                    "load a checkpoint into another"
                )


def whole_blocks(
    extent: Extent, first: int, last: int, buffers: Sequence[torch.Tensor]
) -> tuple[int, int, tuple[torch.Tensor, ...]]:
    """A read of [first, last), with what else there is in its first and last block."""
    begin, end = first // BLOCK * BLOCK, min(round_up(last, BLOCK), extent.nbytes)
    before, behind = (
        torch.empty(count, dtype=torch.uint8, device="cpu") for count in (first - begin, end - last)
    )
    return begin, end, (before, *buffers, behind)


def _blocks(first: int, last: int) -> range:
    return range(first // BLOCK, round_up(last, BLOCK) // BLOCK)


def _sums(memory: Sequence[Memory], first: int) -> array[int]:
    """Of each block of an extent that has some of the memory's bytes, from the extent's byte `first` on: of those."""
    found = array("I")
    left, before = BLOCK - first % BLOCK, 0
    for address, nbytes in memory:
        while nbytes:
            if left == BLOCK and nbytes >= BLOCK:
                count = nbytes // BLOCK * BLOCK
                found.extend(crc32_each(address, count // BLOCK, BLOCK))
            else:
                count = min(left, nbytes)
                left, before = left - count, crc32(address, count, before)
            if not left:
                found.append(before)
                left, before = BLOCK, 0
            address, nbytes = address + count, nbytes - count
    if 0 < left < BLOCK:
        found.append(before)
    return found


def _sum(memory: Sequence[Memory], first: int, last: int) -> int:
    found, start = 0, 0
    for address, nbytes in memory:
        begin, end = max(first - start, 0), min(last - start, nbytes)
        if begin < end:
            found = crc32(address + begin, end - begin, found)
        start += nbytes
    return found
