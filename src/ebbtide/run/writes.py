"""What a user writes into parameters in place, where their master has the value that training goes on from.

A parameter is its master, rounded. Where it is not, somebody wrote it, and the master follows; what was not written
keeps its precision.
"""

from __future__ import annotations

import torch

from ebbtide.errors import StateError
from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import Chunk, Slices, cut
from ebbtide.memory.glance import peek, poke
from ebbtide.run.model import ModelData
from ebbtide.run.taken import TakenSpace

_BITS = torch.int16


def follow(parameter: torch.Tensor, master: torch.Tensor, kernels: Kernels) -> bool:
    """Flat, of the same elements and on the kernels' device. Whether the master had to change."""
    rounded = torch.empty_like(parameter)
    kernels.split(master, rounded, master.clone())
    written = rounded.view(_BITS) != parameter.view(_BITS)
    if not bool(written.any()):
        return False
    master.copy_(torch.where(written, parameter.float(), master))
    return True


class Writes:
    """In chunks."""

    def __init__(self, data: ModelData, kernels: Kernels, taken: TakenSpace) -> None:
        """`kernels`: the host's."""
        self._data, self._store, self._kernels = data, data.store, kernels
        self._taken = taken

    def carry_on(self, index: int) -> None:
        """A chunk's parameters were written in place."""
        data = self._data
        if data.master_dtype(index) != torch.float32 or ("master", index) not in self._store.chunks:
            return
        members = data.members[index]
        if not self._taken.members.isdisjoint(members):
            names = ", ".join(data.names[m] for m in members)
            raise StateError(
                f"one of {names} was written in place between backward and the step, where gradients are: the write "
                "is lost. Write after the step, or through engine.weights(name, write=True)"
            )
        for member in members:
            if data.shares[member].numel:
                self._carry_on(member)

    def _carry_on(self, member: int) -> None:
        share, copies = self._data.shares[member], self._data.copies(member)
        if len(copies) < 2:
            return  # no master yet
        parts = [self._read(chunk, tier, share.offset, share.numel) for chunk, tier in copies]
        changed = False
        for _, (parameter, master) in cut(parts, share.numel):
            here = master.cpu()
            if follow(parameter.cpu(), here, self._kernels):
                changed = True
                if here is not master:
                    master.copy_(here)
        chunk, tier = copies[1]
        if changed and tier == "ssd":
            poke(self._store, chunk, share.offset, parts[1][0][1])
            self._data.written_on_ssd(chunk.index)
        elif changed:
            self._store.written(chunk, tier)

    def _read(self, chunk: Chunk, tier: str, offset: int, count: int) -> Slices:
        if tier == "ssd":
            return [(0, peek(self._store, chunk, offset, count))]
        return list(chunk.slices(tier, offset, count))
