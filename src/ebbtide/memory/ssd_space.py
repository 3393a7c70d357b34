"""SSD copies of chunks: which extents hold them.

Optimizer state is cut into pieces; a piece holds the same elements of all kinds side by side, each kind from a block on,
so that an update streams it with one read and one write. Parameters have extents of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ebbtide.errors import BudgetError, IntegrityError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.space import DiskSpace, Extent
from ebbtide.planner.sizes import BLOCK, pieces
from ebbtide.units import round_up

Kinds = Sequence[tuple[str, torch.dtype]]


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Elements [first, first + count) of a chunk, from byte `offset` of an extent on."""

    first: int
    count: int
    extent: Extent
    offset: int


@dataclass(slots=True)
class Group:
    """What shares extents: all kinds of state of a chunk; its parameters or its gradients alone."""

    tag: str
    kinds: Kinds
    pieces: list[tuple[int, int, Extent]]
    """(first element, elements, extent)."""
    users: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for _, _, extent in self.pieces)


def offsets(kinds: Kinds, count: int) -> list[int]:
    """Where each kind begins in a piece of `count` elements; at the end, the bytes of the piece."""
    found = [0]
    for _, dtype in kinds:
        found.append(round_up(found[-1] + count * dtype.itemsize, BLOCK))
    return found


def _tag(kind: str) -> str:
    return kind if kind in ("param", "grad") else "state"


class SsdSpace:
    def __init__(self, disk: DiskSpace, ledger: Ledger, piece: int) -> None:
        """`piece`: bytes of state that are read and written at once."""
        self.disk = disk
        self.piece = piece
        self._ledger = ledger
        self._groups: dict[tuple[str, int], Group] = {}

    def acquire(self, kind: str, index: int, size: int, kinds: Kinds) -> list[StoredRange]:
        """Where a chunk of `size` elements is stored; `kinds` lie together, `kind` among them."""
        tag = _tag(kind)
        group = self._groups.get((tag, index))
        if group is None:
            group = self._groups[tag, index] = self._allocate(tag, kinds, size)
        group.users.add(kind)
        place = [name for name, _ in group.kinds].index(kind)
        return [
            StoredRange(first, count, extent, offsets(group.kinds, count)[place])
            for first, count, extent in group.pieces
        ]

    def needed(self, kind: str, index: int, size: int, kinds: Kinds) -> int:
        """Bytes that `acquire` would reserve."""
        if (_tag(kind), index) in self._groups:
            return 0
        per_element = sum(dtype.itemsize for _, dtype in kinds)
        return sum(offsets(kinds, count)[-1] for _, count in pieces(size, per_element, self.piece))

    def _allocate(self, tag: str, kinds: Kinds, size: int) -> Group:
        group = Group(tag, tuple(kinds), [])
        per_element = sum(dtype.itemsize for _, dtype in kinds)
        try:
            for first, count in pieces(size, per_element, self.piece):
                self._place(group, first, count)
        except BaseException:
            self._free(group)
            raise
        return group

    def _place(self, group: Group, first: int, count: int) -> None:
        """An extent for a piece; where what is free lies in fragments, several."""
        nbytes = offsets(group.kinds, count)[-1]
        self._ledger.reserve("ssd", group.tag, nbytes)
        try:
            group.pieces.append((first, count, self.disk.allocate(nbytes)))
            return
        except BaseException as error:
            self._ledger.release("ssd", group.tag, nbytes)
            if not isinstance(error, BudgetError) or count <= BLOCK or self.disk.room < nbytes:
                raise
        half = round_up(count // 2, BLOCK)
        self._place(group, first, half)
        self._place(group, first + half, count - half)

    def group(self, index: int) -> Group:
        """The state of a chunk."""
        return self._groups["state", index]

    def release(self, kind: str, index: int) -> None:
        key = (_tag(kind), index)
        group = self._groups[key]
        group.users.discard(kind)
        if not group.users:
            del self._groups[key]
            self._free(group)

    def _free(self, group: Group) -> None:
        for _, _, extent in group.pieces:
            self.disk.free(extent)
            self._ledger.release("ssd", group.tag, extent.nbytes)

    def check(self) -> None:
        held = sum(group.nbytes for group in self._groups.values())
        reserved = sum(self._ledger.tags["ssd"].values())
        if held > reserved:
            raise IntegrityError(f"ssd: chunks hold {held} bytes, reserved are {reserved}")
        for key, group in self._groups.items():
            if not group.users:
                raise IntegrityError(f"ssd: extents of {key} are kept without a user")
