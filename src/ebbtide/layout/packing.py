"""From tensors to a layout: choose the unit, cut each dtype's sequence, number the chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ebbtide.errors import LayoutError, nearest
from ebbtide.layout.chunk_size import SMALLEST, Cut, cut_chunks, cut_runs, cut_tensors, search_chunk_size
from ebbtide.layout.spans import ALIGNMENT, ITEMSIZE, ChunkSpec, Layout, Span, TensorSpec, alike
from ebbtide.units import round_up

CUTS = ("chunk", "page", "tensor")
PAGE_BYTES = 4 * 1024 * 1024
PAGE_WASTE_ACCEPTED = 0.015
"""What the last page may leave empty before the default page is halved; happens below 140M parameters."""


def build_layout(specs: Iterable[TensorSpec], cut: str = "chunk", chunk_size: int | None = None) -> Layout:
    """The layout of `specs`, in their order.

    `chunk_size` counts elements: of a chunk (None: searched) or of a page (None: 4 MiB at the precision of
    the model, less for small models). `unit_elements` makes it from bytes.
    """
    specs = list(specs)
    _check(specs, cut, chunk_size)
    unit = chunk_size or _default_unit(specs, cut)

    drafts: dict[int, ChunkSpec] = {}  # by the position of the first tensor
    home: dict[int, int] = {}  # position of a tensor -> its chunk's key in drafts
    ends: dict[str, int] = {}
    for (dtype, _), positions in alike(specs).items():
        made = _cut(cut, [_space(specs[position]) for position in positions], unit)
        keys: list[int] = []
        start = round_up(ends.get(dtype, 0), unit if cut == "page" else ALIGNMENT)
        for position, chunk in zip(positions, made.chunk_of, strict=True):
            if chunk == len(keys):
                keys.append(position)
                drafts[position] = ChunkSpec(0, dtype, made.sizes[chunk], start, made.used[chunk])
                start += made.sizes[chunk]
            home[position] = keys[chunk]
        ends[dtype] = start

    index_of = {key: index for index, key in enumerate(sorted(drafts))}
    offsets = [0] * len(drafts)
    spans: dict[str, Span] = {}
    for position, spec in enumerate(specs):
        index = index_of[home[position]]
        spans[spec.name] = Span(spec.name, index, offsets[index], spec.numel, spec.shape, spec.stride)
        offsets[index] += _space(spec)
    chunks = tuple(replace(drafts[key], index=index) for key, index in index_of.items())
    return Layout(cut, unit, chunks, spans)


def main_dtype(specs: Iterable[TensorSpec]) -> str:
    """The dtype of most elements: what "parameter precision" means in a mixed model."""
    elements: Counter[str] = Counter()
    for spec in specs:
        elements[spec.dtype] += spec.numel
    return elements.most_common(1)[0][0]


def unit_elements(specs: Iterable[TensorSpec], size: int) -> int:
    """A chunk or page size in bytes at parameter precision, as elements; rounded down to whole alignments."""
    dtype = main_dtype(specs)
    elements = size // ITEMSIZE[dtype] // ALIGNMENT * ALIGNMENT
    if elements == 0:
        least = ALIGNMENT * ITEMSIZE[dtype]
        raise LayoutError(
            f"expected a chunk size of at least {least} bytes ({ALIGNMENT} elements of {dtype}), found {size}"
        )
    return elements


def _check(specs: Sequence[TensorSpec], cut: str, chunk_size: int | None) -> None:
    if cut not in CUTS:
        raise LayoutError(f"expected a cut of {', '.join(CUTS)}, found {cut!r}{nearest(cut, CUTS)}")
    if not specs:
        raise LayoutError("expected at least one tensor to lay out, found none")
    twice = [name for name, times in Counter(spec.name for spec in specs).items() if times > 1]
    if twice:
        raise LayoutError(f"expected each tensor once, found '{twice[0]}' twice; give a tied weight one name")
    if chunk_size is None:
        return
    if cut == "tensor":
        raise LayoutError("the cut 'tensor' has no chunk size: leave it out, or choose 'chunk' or 'page'")
    if chunk_size < ALIGNMENT or chunk_size % ALIGNMENT:
        raise LayoutError(
            f"expected a chunk size in multiples of {ALIGNMENT} elements, found {chunk_size}; "
            f"the next one is {round_up(max(chunk_size, 1), ALIGNMENT)}"
        )


def _space(spec: TensorSpec) -> int:
    return round_up(spec.numel, ALIGNMENT)


def _cut(cut: str, sizes: Sequence[int], unit: int) -> Cut:
    if cut == "chunk":
        return cut_chunks(sizes, unit)
    return cut_runs(sizes, unit) if cut == "page" else cut_tensors(sizes)


def _default_unit(specs: Sequence[TensorSpec], cut: str) -> int:
    if cut == "chunk":
        return search_chunk_size(specs).chunk_size
    if cut == "tensor":
        return ALIGNMENT
    ends = [sum(_space(specs[position]) for position in one) for one in alike(specs).values()]
    page = PAGE_BYTES // ITEMSIZE[main_dtype(specs)]
    while page > SMALLEST and sum(-end % page for end in ends) > PAGE_WASTE_ACCEPTED * sum(ends):
        page //= 2
    return page
