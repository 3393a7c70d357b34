"""Host copies of chunks: in one piece, or in pages where the layout is cut by pages.

A page holds pieces of at most two chunks (runs), so it is taken when the first of them comes and given back
when the last of them goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ebbtide.devices.device import Backend
from ebbtide.errors import IntegrityError
from ebbtide.layout import ALONE, Layout, PagePiece, Slicing
from ebbtide.memory.budget import Ledger


@dataclass(frozen=True, slots=True)
class HostFragment:
    start: int
    """Byte offset in the chunk."""
    memory: torch.Tensor


@dataclass(slots=True)
class _Page:
    memory: torch.Tensor
    users: int = 0


class HostSpace:
    def __init__(self, layout: Layout, backend: Backend, ledger: Ledger, slicing: Slicing = ALONE) -> None:
        self._layout = layout
        self._slicing = slicing
        self._backend = backend
        self._ledger = ledger
        self._pages: dict[tuple[str, str, int], _Page] = {}
        chunks = range(len(layout.chunks))
        self._pieces = [self._pages_of(index) for index in chunks]
        self._elements = [self._page_elements(index) for index in chunks]

    def needed(self, index: int, dtype: torch.dtype, kind: str) -> int:
        """Bytes that `acquire` would reserve."""
        return sum(
            self._elements[index] * dtype.itemsize
            for page, _, _, _ in self._pieces[index]
            if (kind, self._layout.chunks[index].dtype, page) not in self._pages
        )

    def acquire(self, kind: str, index: int, dtype: torch.dtype) -> list[HostFragment]:
        spec = self._layout.chunks[index]
        size = self._elements[index] * dtype.itemsize
        fragments: list[HostFragment] = []
        taken: list[tuple[str, str, int]] = []
        try:
            for page, in_page, in_chunk, length in self._pieces[index]:
                key = (kind, spec.dtype, page)
                if key not in self._pages:
                    self._ledger.reserve("host", kind, size)
                    try:
                        self._pages[key] = _Page(self._backend.allocate("host", size))
                    except BaseException:
                        self._ledger.release("host", kind, size)
                        raise
                self._pages[key].users += 1
                taken.append(key)
                first = in_page * dtype.itemsize
                memory = self._pages[key].memory[first : first + length * dtype.itemsize]
                fragments.append(HostFragment(in_chunk * dtype.itemsize, memory))
        except BaseException:
            for key in taken:
                self._give_up(key, size)
            raise
        return fragments

    def release(self, kind: str, index: int, dtype: torch.dtype) -> None:
        size = self._elements[index] * dtype.itemsize
        for page, _, _, _ in self._pieces[index]:
            self._give_up((kind, self._layout.chunks[index].dtype, page), size)

    def _give_up(self, key: tuple[str, str, int], size: int) -> None:
        page = self._pages[key]
        page.users -= 1
        if page.users == 0:
            del self._pages[key]
            self._backend.free("host", page.memory)
            self._ledger.release("host", key[0], size)

    def _page_elements(self, index: int) -> int:
        """A page's, or the chunk's where it is in one piece."""
        in_pages = self._layout.cut == "page" and not self._slicing.shared
        return self._layout.unit if in_pages else self._slicing.slice(self._layout.chunks[index].size)

    def _pages_of(self, index: int) -> list[PagePiece]:
        """A rank's slice of a chunk is in one piece."""
        if self._slicing.shared:
            return [PagePiece(index, 0, 0, self._slicing.slice(self._layout.chunks[index].size))]
        return self._layout.pages(index)

    def check(self) -> None:
        for key, page in self._pages.items():
            if page.users < 1:
                raise IntegrityError(f"host page {key} is kept without a user")
