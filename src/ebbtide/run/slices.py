"""Gradients exchanged a block at a time, where the device has no room for what all send of a whole chunk.

In each round every rank sends every other one a block of the slice that is that one's, and adds up what came, in rank
order, as for a whole chunk. The sum goes over the rank's own slice of the whole, which nobody else wants; what came
takes one slice of memory. At the end the sums are where it was.
"""

from __future__ import annotations

import torch

from ebbtide.kernels import Kernels
from ebbtide.run.crews import Crew, Exchanges

LANE = 64
"""Elements; blocks are whole lanes where they can be."""


def block_of(each: int, ranks: int) -> int:
    """Elements of a block, of slices of `each`: those of all ranks take one slice of memory."""
    return each // ranks // LANE * LANE or each // ranks or 1


def room_for(each: int, ranks: int) -> int:
    """Elements that a rank receives at a time, or keeps in the end."""
    return max(each, ranks * block_of(each, ranks))


def trade_slices(
    exchanges: Exchanges,
    kernels: Kernels,
    memory: torch.Tensor,
    whole: torch.Tensor,
    dtype: torch.dtype,
    crew: Crew,
) -> None:
    """Leaves the mean of this rank's slice over all ranks in `memory`. `whole` is of no use after it."""
    size, width = crew.size, dtype.itemsize
    own = crew.part(whole, crew.rank)
    each = own.numel() // width
    block = block_of(each, size)
    for at in range(0, each, block):
        count = min(block, each - at)
        received = memory[: size * count * width]
        exchanges.trade(received, whole, at * width, count * width)
        sums = own.view(dtype)[at : at + count]
        kernels.sum_ranks(sums, received.view(dtype), 1.0 / size)
    memory[: own.numel()].copy_(own)
