"""Bytes of the host in pages: a page is taken as a whole, and neighbouring chunks may share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ebbtide.plan.shape import ModelShape


class Paged:
    """Copies of one kind on the host. Where chunks are stored as they are, each takes its own bytes."""

    def __init__(self, shape: ModelShape, counts: Sequence[int]) -> None:
        """`counts`: bytes of each chunk's copy."""
        self._shape, self._counts = shape, counts
        self._users: Counter[int] = Counter()
        """Chunks by page."""

    def put(self, chunk: int) -> int:
        """A copy is there; the bytes it takes beside those before it."""
        if not self._shape.pages or not self._counts[chunk]:
            return self._counts[chunk]
        pages = self._shape.pages[chunk]
        new = sum(not self._users[page] for page in pages)
        self._users.update(pages)
        return new * self._page(chunk)

    def take(self, chunk: int) -> int:
        """A copy that is there goes; the bytes that become free."""
        if not self._shape.pages or not self._counts[chunk]:
            return self._counts[chunk]
        pages = self._shape.pages[chunk]
        self._users.subtract(pages)
        return sum(not self._users[page] for page in pages) * self._page(chunk)

    def _page(self, chunk: int) -> int:
        """Bytes of a page of this kind, as wide as the copy beside the parameters."""
        return self._shape.page_bytes[chunk] * self._counts[chunk] // self._shape.parameter_bytes[chunk]


def on_host(shape: ModelShape, chunks: Iterable[int], counts: Sequence[int]) -> int:
    """Bytes that copies of these chunks take together."""
    copies = Paged(shape, counts)
    return sum(copies.put(chunk) for chunk in chunks)
