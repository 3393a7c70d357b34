"""What work beside the computation keeps for itself on the tier next to SSD.

Optimizer state streams from and to SSD in pieces, through a few buffers. Lock-free updates also keep gradients that no
update has consumed yet, and new values that the computation has not taken over yet. Activations pass between a GPU and
SSD through buffers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ebbtide.units import round_up

BLOCK = 4096
"""Bytes that disks want requests to be multiples of."""
LARGEST, SMALLEST = 16 << 20, 64 << 10
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


def pieces_within(room: int, state: int, piece: int) -> int:
    """How many pieces of a chunk's state `room` bytes can hold for good."""
    return min(max(room, 0) // slot_bytes([state], piece), -(-state // piece)) if state else 0


PASSAGE = 8 << 20
"""Bytes of an activation that go to SSD, or come from there, at once."""
PASSING = 3
"""Buffers in each direction, where the device is not RAM: one is filled, one emptied, one waits."""


def passage_slot(largest: int) -> int:
    """Bytes of a buffer, for activations of at most `largest` bytes; small beside them."""
    return min(PASSAGE, round_up(max(largest // 4, SMALLEST), BLOCK)) if largest else 0


def passage_bytes(largest: int) -> int:
    """Bytes of all buffers between the device and SSD."""
    return 2 * PASSING * passage_slot(largest)


AHEAD = 2
"""Lock-free updates that are made ready while one runs."""
VALUES = 4
"""One in so many of the parameters that are updated lock-free may have new values that wait to be taken over."""


def lock_free_bytes(parameters: Sequence[int], gradients: Sequence[int], width: int) -> tuple[int, int]:
    """Bytes for new values and for gradients that wait, by the chunks that are updated lock-free. A byte of a gradient
    takes `width` while it waits. Every chunk's gradients can wait, beside those that updates under way consume."""
    values = max((AHEAD + 1) * max(parameters, default=0), sum(parameters) // VALUES)
    waiting = sum(gradients) + (AHEAD + 1) * max(gradients, default=0)
    return min(values, sum(parameters)), width * min(waiting, 2 * sum(gradients))


def stored_bytes(count: int, piece: int) -> int:
    """Bytes that `count` bytes of a chunk take on SSD at most."""
    return count + KINDS * BLOCK * (2 + 2 * count // piece) if count else 0


def days_left(endurance: int, written: float, seconds: float) -> float | None:
    """Days until `endurance` bytes are used up at `written` bytes in `seconds`; None where that is not known."""
    if not endurance or not written or not seconds:
        return None
    return endurance / (written / seconds) / 86400
