"""The three ways to cut a sequence of tensors into chunks, on plain numbers.

A cut takes the sizes of tensors that may share a chunk, in definition order and rounded up to the alignment,
and says which chunk each goes to and how large the chunks are. It never reorders: within a chunk, tensors lie
in definition order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    chunk_of: list[int]
    """For each tensor; chunks are numbered in the order of their first tensors."""
    used: list[int]
    sizes: list[int]

    @property
    def allocated(self) -> int:
        return sum(self.sizes)


def cut_chunks(sizes: Sequence[int], unit: int) -> Cut:
    """Uniform chunks; no tensor crosses a border.

    A tensor larger than a chunk gets one of its own and leaves the open chunk open, so that the small tensors
    on both sides of it (norms and biases beside a large matrix) share a chunk. Closing the chunk instead
    would lose the rest of it at every large tensor. Only the one open chunk is looked at: filling older gaps
    would waste a little less, but would tie a chunk to places in the model that are far apart.
    """
    chunk_of: list[int] = []
    used: list[int] = []
    open_chunk: int | None = None
    for size in sizes:
        if size > unit:
            chunk_of.append(len(used))
            used.append(size)
            continue
        if open_chunk is None or used[open_chunk] + size > unit:
            open_chunk = len(used)
            used.append(0)
        chunk_of.append(open_chunk)
        used[open_chunk] += size
    space = [max(one, unit) for one in used]
    if open_chunk is not None:  # nothing will follow in the last one
        space[open_chunk] = used[open_chunk]
    return Cut(chunk_of, used, space)


def cut_tensors(sizes: Sequence[int]) -> Cut:
    return Cut(list(range(len(sizes))), list(sizes), list(sizes))


def cut_runs(sizes: Sequence[int], page: int) -> Cut:
    """Runs of consecutive tensors of at least a page in all, without padding between them.

    Note [Two runs a page]: a page that three runs touch would hold the middle one whole with something on
    both sides, so the middle one would be shorter than a page. Only the last run can be that short.
    """
    chunk_of: list[int] = []
    used: list[int] = []
    for size in sizes:
        if not used or used[-1] >= page:
            used.append(0)
        chunk_of.append(len(used) - 1)
        used[-1] += size
    return Cut(chunk_of, used, list(used))
