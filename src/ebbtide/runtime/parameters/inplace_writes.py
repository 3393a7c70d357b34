"""What a user writes into parameters in place, where their master has the value that training goes on from.

A parameter is its master, rounded. Where it is not, somebody wrote it, and the master follows; what was not written
keeps its precision. A split master is what the rounding took off, so nothing tells what was written: it stays, and the
sum rounds to what was written, except at zeros and infinities, where it would be no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ebbtide.errors import StateError
from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import Chunk, Slices, cut
from ebbtide.memory.chunk_access import peek, poke, portions
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.runtime.parameters.element_access import copies_of

_BITS = torch.int16
_PIECE = 1 << 20


def follow(
    parameter: torch.Tensor, master: torch.Tensor, kernels: Kernels, before: torch.Tensor | None = None
) -> bool:
    """Flat, of the same elements and on the kernels' device. Whether the master had to change. `before`: what the
    parameter was, where somebody knows."""
    changed = False
    for start in range(0, parameter.numel(), _PIECE):
        some, of_master = (one[start : start + _PIECE] for one in (parameter, master))
        if master.dtype != _BITS:
            changed |= _follow_whole(some, of_master, kernels)
        else:
            known = None if before is None else before[start : start + _PIECE]
            changed |= _follow_split(some, of_master, known)
    return changed


def _follow_split(parameter: torch.Tensor, master: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Where it is known which elements were written their master is exactly that."""
    if before is not None:
        lost = (parameter.view(_BITS) != before.view(_BITS)) & (master != 0)
    else:
        size = parameter.view(_BITS) & 0x7FFF
        lost = ((size == 0) | (size >= 0x7F80)) & (master != 0)
    if not bool(lost.any()):
        return False
    master.masked_fill_(lost, 0)
    return True


def _follow_whole(parameter: torch.Tensor, master: torch.Tensor, kernels: Kernels) -> bool:
    rounded = torch.empty_like(parameter)
    kernels.split(master, rounded, master.clone())
    written = rounded.view(_BITS) != parameter.view(_BITS)
    if not bool(written.any()):
        return False
    master.copy_(torch.where(written, parameter.float(), master))
    return True


class Displaced(Protocol):
    """Parameters in whose space their gradients lie."""

    @property
    def away(self) -> set[int]: ...


class Places(Protocol):
    """Who brings a chunk to a tier, and keeps it there meanwhile."""

    def placed(self, chunk: Chunk, tier: str) -> AbstractContextManager[None]: ...


class Writes:
    """In chunks."""

    def __init__(self, data: ModelData, kernels: Kernels, space: Displaced, places: Places) -> None:
        """`kernels`: the host's."""
        self._data, self._store, self._kernels = data, data.store, kernels
        self._space, self._places = space, places

    def adopt(self, index: int) -> None:
        """The user has written to a gathered chunk: this rank's slice of it is what counts."""
        store, whole, param = self._store, self._data.computed(index), self._data.parameter_chunk(index)
        first = store.slicing.rank % store.crew(index) * param.size
        # It may be on its way off the device for want of room: then nothing else is brought there.
        tier = "device" if param.device is not None else store.near
        with whole.lease(), self._places.placed(param, tier):
            mine = whole.view()[first : first + param.size]
            for start, piece in param.slices(tier, 0, param.size):
                piece.copy_(mine[start : start + piece.numel()])
            store.written(param, tier)

    def follow(self, index: int, members: Sequence[int]) -> None:
        """These of a chunk's parameters were written in place."""
        data = self._data
        if ("master", index) not in self._store.chunks:
            return
        if not self._space.away.isdisjoint(members):
            names = ", ".join(data.names[m] for m in members)
            raise StateError(
                f"one of {names} was written in place between backward and the step, where gradients are: the write "
                "is lost, and so are the gradients. Write after the step, or through engine.weights(name, write=True)"
            )
        for member in members:
            if data.shares[member].numel:
                self._follow_member(member)

    def _follow_member(self, member: int) -> None:
        share, copies = self._data.shares[member], copies_of(self._data, member)
        if len(copies) < 2:
            return  # no master yet
        before = self._data.live.before(member)
        changed = []
        for start, count in portions(share.numel):
            known = None if before is None else before[share.first + start : share.first + start + count]
            changed.append(self._follow(copies, share.offset + start, count, known))
        chunk, tier = copies[1]
        if any(changed) and tier == "ssd":
            self._store.written_on_ssd(chunk.index)
        elif any(changed):
            self._store.written(chunk, tier)

    def _follow(
        self, copies: list[tuple[Chunk, str]], offset: int, count: int, before: torch.Tensor | None
    ) -> bool:
        """Whether the master has changed."""
        parts = [self._read(chunk, tier, offset, count) for chunk, tier in copies]
        changed = False
        for start, (parameter, master) in cut(parts, count):
            here = master.cpu()
            known = None if before is None else before[start : start + parameter.numel()]
            if follow(parameter.cpu(), here, self._kernels, known):
                changed = True
                if here is not master:
                    master.copy_(here)
        chunk, tier = copies[1]
        if changed and tier == "ssd":
            poke(self._store, chunk, offset, parts[1][0][1])
        return changed

    def _read(self, chunk: Chunk, tier: str, offset: int, count: int) -> Slices:
        if tier == "ssd":
            return [(0, peek(self._store, chunk, offset, count))]
        return list(chunk.slices(tier, offset, count))
