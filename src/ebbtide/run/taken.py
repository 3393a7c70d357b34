"""Gradients in their parameters' space: what it takes to have the parameters again.

With a separate master a parameter is superfluous after its last use in backward, and its gradient may lie where it was.
Whoever wants the parameter before the update gets it back from the master; the gradient moves to a space of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import Chunk, Slices, aligned, cut
from ebbtide.memory.glance import peek, portions
from ebbtide.run.model import ModelData
from ebbtide.run.places import Places


class TakenSpace:
    def __init__(
        self, data: ModelData, kernels: Mapping[str, Kernels], homes: Sequence[str], places: Places
    ) -> None:
        self.data, self.store, self.kernels = data, data.store, kernels
        self.homes, self.places = homes, places
        self.members: set[int] = set()
        """Parameters whose space holds their gradient."""
        self.lost: set[int] = set()
        """Parameters whose space holds nothing: they are in their masters only."""

    @property
    def away(self) -> set[int]:
        """Parameters that are not where they were."""
        return self.members | self.lost if self.lost else self.members

    def take(self, member: int) -> None:
        """A gradient is about to be where the parameter was."""
        self.members.add(member)
        self.lost.discard(member)

    def drop(self) -> None:
        """The gradients are not wanted any more."""
        self.lost |= self.members
        self.members.clear()

    def forget(self, member: int) -> None:
        """The gradient of one is not wanted any more."""
        if member in self.members:
            self.members.discard(member)
            self.lost.add(member)

    def updated(self, members: Iterable[int]) -> None:
        """An update has been given gradients, and writes the parameters."""
        self.members.difference_update(members)
        self.lost.difference_update(members)

    def restore(self) -> None:
        """Rebuilds parameters from their masters. Whatever ends it early, the next call goes on."""
        for member in sorted(self.lost):
            index, share = self.data.places[member].chunk, self.data.shares[member]
            master = self.store.chunks["master", index]
            param = self.data.parameter_chunk(index)
            home = self.homes[index]
            tier = self.store.near if home == "ssd" else home
            with self.places.placed(param, tier):
                if home == "ssd":
                    self.store.settle(master)
                    for start, count in portions(share.numel):
                        values = peek(self.store, master, share.offset + start, count)
                        self._rebuild(param, tier, share.offset + start, [(0, values)], count)
                else:
                    there = list(master.slices(tier, share.offset, share.numel))
                    self._rebuild(param, tier, share.offset, there, share.numel)
                self.store.written(param, tier)
            if tier == "host":
                self.places.leave_stale(param)
            self.lost.discard(member)

    def _rebuild(self, param: Chunk, tier: str, offset: int, values: Slices, count: int) -> None:
        copy = list(param.slices(tier, offset, count))
        for _, (target, source) in cut([copy, values], count):
            self.kernels[tier].split(source, target, source)

    def reclaim(self, members: Iterable[int]) -> None:
        """Parameters are about to be used whose space may be taken."""
        if self.away and not self.away.isdisjoint(members):
            self.give_back()

    def give_back(self) -> None:
        """Parameters are wanted before the update: their gradients move to a space of their own."""
        for member in sorted(self.members):
            index, share = self.data.places[member].chunk, self.data.shares[member]
            param, grad = self.data.parameter_chunk(index), self.store.chunks["grad", index]
            tier = "device"
            if grad.free:
                self.places.room.make(tier, grad.nbytes)
                self.store.allocate(grad, tier, zero=True)
            with self.places.placed(param, tier), self.places.placed(grad, tier):
                for _, (target, source) in aligned([(grad, tier), (param, tier)], share.offset, share.numel):
                    target.copy_(source)
                self.store.written(grad, tier)
        self.drop()
        self.restore()
