"""Where gradients may lie until their update, other than in a chunk on the device.

In place: a gradient that will not leave the device stays the tensor that autograd made, reserved like any chunk. One
that others look at, or that is laid out otherwise than its parameter, is copied all the same. An update beside the
computation is lent what it consumes, for the next gradient may come meanwhile.

Host direct: where device and host are both RAM, a gradient that the host will use is copied, or added, to its chunk
there. Plans give it no chunk on the device.

In parameter space: with a separate master a parameter is superfluous after its last use in backward, and its gradient
lies where it was. A reader before the update gets it back from the master, and the gradient moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, SupportsFloat

import torch

from ebbtide.devices.pool import users
from ebbtide.kernels import Kernels
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk import Chunk, Slices, aligned, cut
from ebbtide.memory.chunk_access import peek, portions
from ebbtide.memory.journal import Here
from ebbtide.memory.links import TO_HOST
from ebbtide.planner.shape import GRAD
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.protocols import PendingUpdates
from ebbtide.runtime.parameters.binding import ModelData, dense
from ebbtide.runtime.parameters.places import Place


class WatchesStorages(Protocol):
    """Who counts what is no model data."""

    def claim(self, storage: int) -> None: ...


class InPlaceGradients:
    def __init__(self, ledger: Ledger) -> None:
        self.always = False
        """Nothing can leave the device."""
        self.where_planned = False
        """Those that by the plan never leave it."""
        self._watches: WatchesStorages | None = None
        self._ledger = ledger
        self._tensors: dict[int, torch.Tensor] = {}
        self._lent: dict[int, torch.Tensor] = {}
        """By storage."""
        self._storages: set[int] = set()
        self._alone = users(torch.empty(1, device="cpu"))
        weakref.finalize(self, _give_up, ledger, self._tensors, self._lent)

    def __contains__(self, member: int) -> bool:
        return member in self._tensors

    def __getitem__(self, member: int) -> torch.Tensor:
        return self._tensors[member]

    def watch_by(self, watches: WatchesStorages) -> None:
        """Who is told of storages that are model data from now on."""
        self._watches = watches

    def owns(self, storage: int) -> bool:
        return storage in self._storages

    def keep(
        self,
        member: int,
        gradient: torch.Tensor,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """There must be room for it on the device."""
        nbytes = gradient.numel() * dtype.itemsize
        as_it_is = (
            gradient.dtype == dtype
            and tuple(gradient.stride()) == stride
            and gradient.untyped_storage().nbytes() == nbytes
            and users(gradient) == self._alone
        )
        if not as_it_is:
            gradient = torch.empty_strided(shape, stride, dtype=dtype, device=gradient.device).copy_(gradient)
        self._ledger.reserve("device", "grad", nbytes)
        self._tensors[member] = gradient
        storage = gradient.untyped_storage()._cdata
        self._storages.add(storage)
        if self._watches is not None:
            self._watches.claim(storage)

    def drop(self, member: int) -> None:
        self._forget(self._tensors.pop(member))

    def lend(self, members: Iterable[int]) -> list[int]:
        """To an update, which gives them back when it is over: the storages that are lent."""
        tensors = [self._tensors.pop(member) for member in members]
        found = [tensor.untyped_storage()._cdata for tensor in tensors]
        self._lent.update(zip(found, tensors, strict=True))
        return found

    def give_back(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._forget(self._lent.pop(storage))

    def clear(self) -> None:
        """Forgets what no update consumes."""
        for member in list(self._tensors):
            self.drop(member)

    def _forget(self, tensor: torch.Tensor) -> None:
        self._storages.discard(tensor.untyped_storage()._cdata)
        self._ledger.release("device", "grad", _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _give_up(ledger: Ledger, *held: dict[int, torch.Tensor]) -> None:
    for tensors in held:
        while tensors:
            _, tensor = tensors.popitem()
            ledger.release("device", "grad", _bytes(tensor))


class HostDirect:
    def __init__(self, room: Room, updates: PendingUpdates, kernels: Mapping[str, Kernels]) -> None:
        """`kernels` by tier."""
        self._room, self._store, self._pending = room, room.store, updates
        self._kernels = kernels["host"]
        self.possible = False

    def leads(self, chunk: Chunk) -> bool:
        """Whether a gradient goes to its chunk on the host. There is room, or else the pass is not what was planned:
        then it waits on the device."""
        if not self.possible or chunk.kind != GRAD or self._store.updates_on_device(chunk.index):
            return False
        if not self._fits(chunk):
            self._room.drop_unplanned_copies()  # the others stay: they are counted there
        while not self._fits(chunk) and self._pending.settle_oldest():
            continue
        return self._fits(chunk)

    def _fits(self, chunk: Chunk) -> bool:
        return self._store.ledger.room("host") >= self._store.room_needed(chunk, "host")

    def take(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        """Copies or adds a gradient to the chunk's host copy; the sum of squares of the result."""
        traffic, span = self._store.traffic, Here()
        with traffic.waiting(TO_HOST, chunk.index):  # nothing is computed meanwhile
            found = self._move(chunk, place, gradient, add)
        nbytes = place.numel * chunk.dtype.itemsize
        traffic.count(TO_HOST, nbytes, chunk.index, GRAD, [span.over()], span.begin)
        return found

    def _move(self, chunk: Chunk, place: Place, gradient: torch.Tensor, add: bool) -> SupportsFloat:
        there = chunk.on_host(place.shape, place.stride, place.offset, place.numel)
        if there is not None:
            return self._kernels.capture(there, gradient, add)
        sums = [torch.empty(0, dtype=torch.float64, device="cpu")]
        for first, piece in chunk.slices("host", place.offset, place.numel):
            for at, part in _in_memory_order(gradient, place.stride, first, piece.numel()):
                self._kernels.capture(piece[at : at + part.numel()].view(part.shape), part, add)
            sums.append(self._kernels.block_sums(piece))  # pages are cut on blocks' borders
        return self._kernels.pairwise(torch.cat(sums))


def _in_memory_order(
    gradient: torch.Tensor, stride: tuple[int, ...], first: int, count: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(place, part) of so many elements, in the order that a parameter of that stride has them in memory. A gradient
    laid otherwise is not copied for it: no plan counts such a copy."""
    if tuple(gradient.stride()) == stride:
        yield 0, dense(gradient)[first : first + count]
        return
    order = sorted(range(gradient.dim()), key=lambda dim: -stride[dim])
    yield from _rows(gradient.permute(order), first, count)


def _rows(tensor: torch.Tensor, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of so many elements in row-major order: the end of a row, whole rows, the beginning of one."""
    if tensor.dim() == 1:
        yield 0, tensor[first : first + count]
        return
    each, done = tensor[0].numel(), 0
    while done < count:
        row, begin = divmod(first + done, each)
        whole = 0 if begin else (count - done) // each
        if whole:
            yield done, tensor[row : row + whole]
            done += whole * each
            continue
        part = min(each - begin, count - done)
        for at, found in _rows(tensor[row], begin, part):
            yield done + at, found
        done += part


class InParameterSpace:
    def __init__(self, data: ModelData, kernels: Mapping[str, Kernels], places: FetchOnDemand) -> None:
        self.data, self.store, self.kernels = data, data.store, kernels
        self.places = places
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
        self.data.live.ours(member)
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
            tier = self.store.update_tier(index)
            with self.places.placed(param, tier):
                if self.store.streams(index):
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
