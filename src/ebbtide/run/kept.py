"""Gradients that stay where autograd made them until the update.

Where a gradient will not leave the device, a chunk for it would only cost a copy: it is kept as the tensor that it
came as, reserved in the ledger like any chunk. A tensor that anyone else looks at, or that is laid out otherwise than
its parameter, is copied all the same.

An update beside the computation is lent what it consumes: the next gradient of the same parameter may be kept
meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from ebbtide.backend.slabs import users
from ebbtide.memory.ledger import Ledger


class KeptGradients:
    def __init__(self, ledger: Ledger) -> None:
        self.always = False
        """Nothing can leave the device."""
        self.where_planned = False
        """Those that by the plan never leave it."""
        self.claimed: Callable[[int], None] = lambda storage: None
        """Told of each storage that is model data from now on."""
        self._ledger = ledger
        self._tensors: dict[int, torch.Tensor] = {}
        self._lent: dict[int, torch.Tensor] = {}
        """By storage."""
        self._storages: set[int] = set()
        self._alone = users(torch.empty(1))
        weakref.finalize(self, _give_up, ledger, self._tensors, self._lent)

    def __contains__(self, member: int) -> bool:
        return member in self._tensors

    def __getitem__(self, member: int) -> torch.Tensor:
        return self._tensors[member]

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
        self.claimed(storage)

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
