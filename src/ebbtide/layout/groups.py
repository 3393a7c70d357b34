"""Layouts made of others: joined, or with chunks in groups of one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ebbtide.layout.slicing import Slicing
from ebbtide.layout.spans import ChunkSpec, Layout, Span


def joined(layouts: Sequence[Layout]) -> Layout:
    """Their chunks one after the other."""
    chunks: list[ChunkSpec] = []
    spans: dict[str, Span] = {}
    ends: dict[str, int] = {}
    for layout in layouts:
        first = len(chunks)
        for chunk in layout.chunks:
            start = ends.get(chunk.dtype, 0) + chunk.start
            chunks.append(replace(chunk, index=first + chunk.index, start=start))
        for dtype, end in layout.ends.items():
            ends[dtype] = ends.get(dtype, 0) + end
        spans |= {name: replace(span, chunk=first + span.chunk) for name, span in layout.spans.items()}
    return Layout(layouts[0].cut, layouts[0].unit, tuple(chunks), spans)


def grouped(layout: Layout, ranks: int) -> Layout:
    """As many neighbouring chunks as there are ranks make a communication group, which is gathered as one. A tensor
    that is larger than a chunk (an embedding) is a group by itself."""
    if ranks == 1:
        return layout
    group_of: dict[int, tuple[int, int]] = {}
    made: list[ChunkSpec] = []
    members: list[int] = []

    def close() -> None:
        for place, index in enumerate(members):
            group_of[index] = (len(made), place * layout.unit)
        if members:
            size = layout.unit * ranks
            made.append(replace(layout.chunks[members[0]], index=len(made), size=size, used=size))
            members.clear()

    for chunk in layout.chunks:
        if chunk.size > layout.unit:
            continue
        members.append(chunk.index)
        if len(members) == ranks:
            close()
    close()
    for chunk in layout.chunks:
        if chunk.size > layout.unit:
            group_of[chunk.index] = (len(made), 0)
            size = Slicing(ranks).whole(chunk.size)
            made.append(replace(chunk, index=len(made), size=size))
    start = 0
    for place, chunk in enumerate(made):
        made[place] = replace(chunk, start=start)
        start += chunk.size
    spans = {
        name: replace(span, chunk=group_of[span.chunk][0], offset=group_of[span.chunk][1] + span.offset)
        for name, span in layout.spans.items()
    }
    return Layout(layout.cut, layout.unit, tuple(made), spans)
