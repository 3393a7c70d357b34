"""How ranks share a chunk: equal slices, one each, on borders of `ALIGNMENT` elements; the last may be padding."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.layout.spans import ALIGNMENT
from ebbtide.units import round_up


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of a tensor: `numel` of its elements from `first` on, from `offset` on in the rank's slice."""

    first: int
    offset: int
    numel: int

    def common(self, first: int, count: int) -> tuple[int, int]:
        """What it has of the tensor's elements [first, first + count): from which to which; none where they cross."""
        return max(first, self.first), min(first + count, self.first + self.numel)


@dataclass(frozen=True, slots=True)
class Slicing:
    ranks: int = 1
    rank: int = 0

    @property
    def shared(self) -> bool:
        return self.ranks > 1

    def slice(self, size: int) -> int:
        """Elements of a rank's slice of a chunk of `size` elements."""
        return round_up(-(-size // self.ranks), ALIGNMENT) if self.shared else size

    def crew(self, ranks: int) -> Slicing:
        """How crews of so many ranks in a row share chunks."""
        return Slicing(self.ranks // ranks, self.rank // ranks)

    def whole(self, size: int) -> int:
        """Elements of all slices together."""
        return self.ranks * self.slice(size)

    def used(self, size: int, used: int) -> int:
        """Elements of the rank's slice that are no padding, where of the chunk's `used` are not."""
        each = self.slice(size)
        return min(max(0, used - self.rank * each), each)

    def share(self, offset: int, numel: int, size: int) -> Share:
        """Of a tensor of `numel` elements from `offset` on in a chunk of `size`; empty where it lies in other slices."""
        each = self.slice(size)
        begin = self.rank * each
        first = min(max(offset, begin), offset + numel)
        last = max(first, min(offset + numel, begin + each))
        return Share(first - offset, max(0, first - begin), last - first)


ALONE = Slicing()
