"""How optimizer state streams from and to SSD: in pieces, through a few buffers on the tier where it is updated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

BLOCK = 4096
"""Bytes that disks want requests to be multiples of."""
LARGEST, SMALLEST = 40 << 20, 64 << 10
"""Bytes of state that are read, updated and written at once: enough for any disk's full rate. Less for small models, so
that the buffers stay small beside them."""
SLOTS = 6
"""Buffers of a piece: two or three are being read, one is updated, two are being written."""
KINDS = 3
"""Of state, at most: each begins at a block."""


def piece_bytes(parameters: int) -> int:
    """Bytes of state in a piece, for a model with so many bytes of parameters."""
    return min(LARGEST, max(SMALLEST, parameters // 16))


def pieces(size: int, per_element: int, piece: int) -> Iterator[tuple[int, int]]:
    """(first element, elements) of a chunk of `size` elements with `per_element` bytes each."""
    most = piece // per_element // BLOCK * BLOCK
    for first in range(0, size, most):
        yield first, min(most, size - first)


def slot_bytes(states: Iterable[int], piece: int) -> int:
    """Bytes of a buffer that can hold a piece of each of these chunks' states."""
    largest = max(states, default=0)
    return min(largest, piece) + KINDS * BLOCK if largest else 0


def stage_bytes(states: Iterable[int], piece: int) -> int:
    """Bytes of all buffers, for chunks with `states` bytes of state each on SSD."""
    return SLOTS * slot_bytes(states, piece)


def stored_bytes(count: int, piece: int) -> int:
    """Bytes that `count` bytes of a chunk take on SSD at most."""
    return count + KINDS * BLOCK * (2 + 2 * count // piece) if count else 0
