"""What a layout is made of: tensors as they are, the spans they get, the chunks that hold the spans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ebbtide.errors import LayoutError
from ebbtide.units import format_size, round_up

ALIGNMENT = 1024
"""Elements. Spans start on such borders, and ranks cut there, so that no block of the norm is divided."""

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be managed. Its strides are kept, because making it contiguous would change results."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trained: bool = True
    """Tensors that are and those that are not never share a chunk, for only the first have gradients and state."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise self._refused(f"has dtype {self.dtype!r}, expected one of {', '.join(ITEMSIZE)}")
        if len(self.shape) != len(self.stride):
            raise self._refused(f"has {len(self.shape)} dimensions but {len(self.stride)} strides")
        if self.numel == 0:
            raise self._refused(f"is empty (shape {self.shape}): it has no bytes to manage")
        if self.extent < self.numel:
            raise self._refused(f"overlaps itself: {self._stored}; make it a tensor of its own (clone)")
        if not self._dense:
            raise self._refused(f"is not dense: {self._stored}; make it a tensor of its own (clone)")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of storage from the first element to the last; equals `numel` in every tensor accepted."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def _dense(self) -> bool:
        """Whether some order of the dimensions makes it contiguous."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def _stored(self) -> str:
        return f"shape {self.shape} with strides {self.stride}"

    def _refused(self, why: str) -> LayoutError:
        return LayoutError(f"tensor '{self.name}' {why}, or list it under 'unmanaged'")


def alike(specs: Sequence[TensorSpec]) -> dict[tuple[str, bool], list[int]]:
    """Positions of the tensors that may share a chunk: of one dtype, and all trained or none."""
    positions: dict[tuple[str, bool], list[int]] = {}
    for position, spec in enumerate(specs):
        positions.setdefault((spec.dtype, spec.trained), []).append(position)
    return positions


@dataclass(frozen=True)
class Span:
    """Where a tensor lies: `offset` elements into its chunk."""

    name: str
    chunk: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class ChunkSpec:
    """A contiguous run of elements of one dtype. All counts are elements and multiples of `ALIGNMENT`."""

    index: int
    dtype: str
    size: int
    start: int
    """Position in the linear address space of its dtype."""
    used: int
    """Up to the end of the last tensor; what follows is padding."""


class PagePiece(NamedTuple):
    """A piece of a chunk that lies within one page."""

    page: int
    page_offset: int
    chunk_offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    """Chunks are numbered in the order of their first tensors, which is close to the order of use."""

    cut: str
    unit: int
    """Elements of a chunk (cut `chunk`) or of a page (cut `page`); the alignment for cut `tensor`."""
    chunks: tuple[ChunkSpec, ...]
    spans: Mapping[str, Span]
    """By name, in definition order."""
    spread: Mapping[int, int] = field(default_factory=dict)
    """Chunks of experts, each with how many ranks in a row have the same of them: what such ranks compute with is their
    slices together."""

    @cached_property
    def elements(self) -> int:
        """Payload: what the tensors hold."""
        return sum(span.numel for span in self.spans.values())

    @cached_property
    def allocated(self) -> int:
        """Elements of space, padding included; for pages, whole pages."""
        return sum(self.ends.values())

    @property
    def utilisation(self) -> float:
        return self.elements / self.allocated

    @property
    def bytes(self) -> int:
        """Space of the tensors in their own dtypes, padding included."""
        return sum(end * ITEMSIZE[dtype] for dtype, end in self.ends.items())

    @property
    def page_count(self) -> int:
        if self.cut == "page":
            return self.allocated // self.unit
        return len(self.chunks)

    def names_of(self, chunk: int) -> tuple[str, ...]:
        return self._names[chunk]

    def pages(self, chunk: int) -> list[PagePiece]:
        """The pieces of a chunk in the pages that store it, in order.

        Pages are numbered through all dtypes, so that a number means one page. Where the cut is not by page,
        a chunk is stored as the one piece it is.
        """
        one = self.chunks[chunk]
        if self.cut != "page":
            return [PagePiece(chunk, 0, 0, one.size)]
        first_page = self._first_pages[one.dtype]
        fragments, done = [], 0
        while done < one.size:
            page, offset = divmod(one.start + done, self.unit)
            length = min(self.unit - offset, one.size - done)
            fragments.append(PagePiece(first_page + page, offset, done, length))
            done += length
        return fragments

    @property
    def stored(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """By chunk, its pages and the bytes of one; both empty where chunks are stored as they are."""
        if self.cut != "page":
            return (), ()
        pages = tuple(tuple(piece.page for piece in self.pages(chunk.index)) for chunk in self.chunks)
        return pages, tuple(self.unit * ITEMSIZE[chunk.dtype] for chunk in self.chunks)

    def describe(self) -> str:
        """One line for the user."""
        size = f"{self.unit:,} elements ({self._unit_bytes})"
        larger = sum(chunk.size > self.unit for chunk in self.chunks)
        if self.cut == "chunk":
            cut = f"{len(self.chunks) - larger} chunks of {size}"
            cut += f" and {larger} larger, of one tensor each" if larger else ""
        elif self.cut == "page":
            cut = f"{self.page_count} pages of {size} in {len(self.chunks)} runs"
        else:
            cut = f"{len(self.chunks)} chunks, one a tensor"
        return (
            f"{len(self.spans)} tensors of {self.elements:,} elements in {cut}; "
            f"{format_size(self.bytes)}, {100 * (1 - self.utilisation):.2f} % of it padding"
        )

    @property
    def _unit_bytes(self) -> str:
        return " or ".join(f"{format_size(self.unit * ITEMSIZE[dtype])} of {dtype}" for dtype in self.ends)

    @cached_property
    def ends(self) -> dict[str, int]:
        """Elements of space by dtype, in the order in which the dtypes first appear."""
        ends: dict[str, int] = {}
        for chunk in self.chunks:
            ends[chunk.dtype] = max(ends.get(chunk.dtype, 0), chunk.start + chunk.size)
        if self.cut == "page":
            return {dtype: round_up(end, self.unit) for dtype, end in ends.items()}
        return ends

    @cached_property
    def _first_pages(self) -> dict[str, int]:
        first, pages = {}, 0
        for dtype, end in self.ends.items():
            first[dtype] = pages
            pages += end // self.unit
        return first

    @cached_property
    def _names(self) -> list[tuple[str, ...]]:
        names: list[list[str]] = [[] for _ in self.chunks]
        for span in self.spans.values():
            names[span.chunk].append(span.name)
        return [tuple(one) for one in names]
