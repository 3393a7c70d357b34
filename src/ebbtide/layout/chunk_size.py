"""Three ways to cut a sequence of tensors into chunks, on plain numbers, and the search for the size to cut them by.

A cut takes the sizes of tensors that may share a chunk, in definition order and rounded up to the alignment, and says
which chunk each goes to. It never reorders. Large chunks fill a link; small ones follow the tide more closely. So the
search has a target, and tries sizes around it: whole layers, sums of neighbouring tensors that recur, a plain ladder.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from ebbtide.errors import LayoutError
from ebbtide.layout.spans import ALIGNMENT, TensorSpec, alike
from ebbtide.units import round_up


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


Ki, Mi = 1024, 1024 * 1024
SMALLEST = 64 * Ki
TARGET = 32 * Mi
LARGEST = 128 * Mi
CHUNKS_WANTED = 64
"""Of a model too small for chunks of the target size: with fewer, what fits the room is too far from the room."""
WASTE_ACCEPTED = 0.03
WASTE_BORNE = 0.06
"""Above this, smaller chunks than the range foresees are better than the padding."""
WINDOW = 64
"""Tensors; a layer of a dense transformer has 8 to 20."""
LAYERS_TRIED, WINDOWS_TRIED, LADDER_TRIED = 24, 48, 24
TRIED_AT_MOST = 2 * (LAYERS_TRIED + WINDOWS_TRIED + LADDER_TRIED)
"""Packings, in two rounds of which the second is seldom needed."""


@dataclass(frozen=True)
class ChunkSizeCandidate:
    chunk_size: int
    utilisation: float
    whole_layers: bool = False


@dataclass(frozen=True)
class ChunkSizeSearch:
    chunk_size: int
    utilisation: float
    target: int
    tried: tuple[ChunkSizeCandidate, ...]


def search_chunk_size(specs: Sequence[TensorSpec]) -> ChunkSizeSearch:
    """The chunk size in elements, near 32 Mi or a sixty-fourth of the model, whichever is less."""
    sequences = [
        [round_up(specs[position].numel, ALIGNMENT) for position in positions]
        for positions in alike(specs).values()
    ]
    if not sequences:
        raise LayoutError("expected at least one tensor to lay out, found none")
    total = sum(map(sum, sequences))
    target = round_up(min(max(total // CHUNKS_WANTED, SMALLEST), TARGET), ALIGNMENT)
    low = max(target // 2, SMALLEST)
    high = max(min(4 * target, LARGEST, 2 * total // CHUNKS_WANTED), target)
    layers = _layers(specs)
    payload = sum(spec.numel for spec in specs)

    tried: dict[int, ChunkSizeCandidate] = {}
    for bottom, top, accepted in ((low, high, WASTE_ACCEPTED), (SMALLEST, low, WASTE_BORNE)):
        whole = set(_multiples(layers, bottom, top, aim=min(target, top)))
        for size in {*whole, *_windows(sequences, bottom, top), *_ladder(bottom, top)} - set(tried):
            space = sum(cut_chunks(sequence, size).allocated for sequence in sequences)
            tried[size] = ChunkSizeCandidate(size, payload / space, size in whole)
        best = _best(tried.values(), target, accepted)
        if best.utilisation >= 1 - WASTE_BORNE:
            break
    return ChunkSizeSearch(
        best.chunk_size, best.utilisation, target, tuple(tried[size] for size in sorted(tried))
    )


def search_uniform(specs: Sequence[TensorSpec], least: int, most: int) -> int:
    """The size from `least` to `most` elements that wastes least, the smallest of those: for layouts that must be
    uniform. `least` where there is none between."""
    sizes = [round_up(spec.numel, ALIGNMENT) for spec in specs]
    tried = {least, *_windows([sizes], least, max(most, least))}
    return min(tried, key=lambda size: (cut_chunks(sizes, size).allocated, size))


def _best(candidates: Iterable[ChunkSizeCandidate], target: int, accepted: float) -> ChunkSizeCandidate:
    """Among those whose waste is accepted the closest to the target, else the one that wastes least.

    Whole layers in a chunk are worth a factor of two in size: a layer then needs one chunk, seldom two.
    """
    candidates = list(candidates)
    good = [one for one in candidates if one.utilisation >= 1 - accepted]
    if not good:
        return max(candidates, key=lambda one: (one.utilisation, one.chunk_size))
    return min(
        good, key=lambda one: (abs(math.log2(one.chunk_size / target)) - one.whole_layers, one.chunk_size)
    )


def _layers(specs: Sequence[TensorSpec]) -> list[int]:
    """Sizes of the groups that repeat, largest share of the model first.

    A group is what shares a name up to a number: `h.3`, `layers.3`, `layers.3.experts.7`.
    """
    totals: Counter[str] = Counter()
    for spec in specs:
        for number in re.finditer(r"(?:^|\.)\d+(?=\.)", spec.name):
            totals[spec.name[: number.end()]] += round_up(spec.numel, ALIGNMENT)
    repeated = {size: times for size, times in Counter(totals.values()).items() if times > 1}
    return sorted(repeated, key=lambda size: size * repeated[size], reverse=True)


def _multiples(layers: Sequence[int], low: int, high: int, aim: int) -> Iterator[int]:
    """Of each layer size the multiples around `aim`, at most `LAYERS_TRIED` in all."""
    for layer in layers[: LAYERS_TRIED // 3]:
        times = aim // layer
        for size in (layer * (times - 1), layer * times, layer * (times + 1)):
            if low <= size <= high:
                yield size


def _windows(sequences: Iterable[Sequence[int]], low: int, high: int) -> list[int]:
    """Sums of neighbouring tensors, the most frequent first: they find repetition that names do not show."""
    sums: Counter[int] = Counter()
    for sequence in sequences:
        for first in range(len(sequence)):
            for total in accumulate(islice(sequence, first, first + WINDOW)):
                if total > high:
                    break
                if total >= low:
                    sums[total] += 1
    return [size for size, _ in sums.most_common(WINDOWS_TRIED)]


def _ladder(low: int, high: int) -> Iterator[int]:
    """Sizes in equal ratios from `low` to `high`."""
    for step in range(LADDER_TRIED):
        yield round_up(round(low * (high / low) ** (step / (LADDER_TRIED - 1))), ALIGNMENT)
