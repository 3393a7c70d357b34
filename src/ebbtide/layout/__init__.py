"""The map from tensors to spans of chunks; pure data.

Every kind of model data (parameter, master, momentum, ...) uses the same map, so a parameter has the same
element offset in each. Nothing here knows how many processes there are: chunks begin and end on borders of
`ALIGNMENT` elements, and so does whatever slices they are cut into.
"""

from ebbtide.layout.chunk_size import ChunkSizeCandidate, ChunkSizeSearch, search_chunk_size, search_uniform
from ebbtide.layout.experts import Bank, build_spread_layout, expert_sets, odd_bank
from ebbtide.layout.groups import grouped, joined
from ebbtide.layout.packing import build_layout, main_dtype, unit_elements
from ebbtide.layout.slicing import ALONE, Share, Slicing
from ebbtide.layout.spans import ALIGNMENT, ITEMSIZE, ChunkSpec, Layout, PagePiece, Span, TensorSpec

__all__ = [
    "ALIGNMENT",
    "ALONE",
    "ITEMSIZE",
    "Bank",
    "ChunkSizeCandidate",
    "ChunkSizeSearch",
    "ChunkSpec",
    "Layout",
    "PagePiece",
    "Share",
    "Slicing",
    "Span",
    "TensorSpec",
    "build_layout",
    "build_spread_layout",
    "expert_sets",
    "grouped",
    "joined",
    "main_dtype",
    "odd_bank",
    "search_chunk_size",
    "search_uniform",
    "unit_elements",
]
