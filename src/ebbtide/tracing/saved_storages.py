"""Which saved tensors could leave the device until backward, and what else holds them meanwhile.

Autograd saves an input of an operator that the next layer, or the user, may hold as well. Once all others have let go
it helps the device that a copy lies elsewhere: the storage's use count, less our own, says so. What the user's
operators save between outputs and loss is read from the graph when backward begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.tracing.hooks.observer import SavedTensor

MOST = 10_000
"""Nodes that are looked at; a loss has a few dozen."""


def saved_beyond(loss: torch.Tensor, is_inside: Callable[[Any], bool]) -> list[torch.Tensor]:
    """What was saved between the loss and the nodes that passes have made, but for weights and single numbers."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo and len(seen) < MOST:
        node = todo.pop()
        if node is None or node in seen or is_inside(node):
            continue
        seen.add(node)
        found += [tensor for tensor in _saved(node) if tensor.numel() > 1 and not _is_weight(tensor)]
        todo += [following for following, _ in node.next_functions]
    return found


def _saved(node: Any) -> Iterator[torch.Tensor]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in names or ["saved_tensors"]:
        try:
            value = getattr(node, name, None)
        except RuntimeError:
            continue  # it was written in place, or is gone: backward says so
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


def _is_weight(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter)


if TYPE_CHECKING:
    from ebbtide.tracing.live_recorder import Recorder

SMALLEST = 64 << 10
"""Bytes of a storage below which a copy is not worth its overhead."""
_CHECKPOINT = torch.utils.checkpoint.CheckpointFunction.forward.__code__.co_filename
_OURS = str(Path(__file__).parents[1])
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_DEPTH = 3
"""Frames between a hook and the wrapper that saves a region's inputs, one to spare."""


def movable(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The storage of a tensor whose bytes could leave `device`."""
    if type(tensor) not in _PLAIN or tensor.device != device or tensor.layout != torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # tensors without one storage
    return storage if storage.nbytes() >= SMALLEST else None


def spoken_for(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Hashable:
    """What of a storage a saved tensor's version speaks for: all of it, but where the tensor is a part that is no view.
    Those of `unsafe_chunk` have versions of their own, and a GRU cell writes its gates into them one by one: what was
    copied for one is older than the next."""
    if tensor._is_view() or tensor.numel() * tensor.element_size() >= storage.nbytes():
        return storage._cdata
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape)


def _beside(tensor: torch.Tensor) -> int:
    """What counts as a user of a storage beside its tensors: its Python object, once it was asked for."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


_BESIDE = _beside(torch.empty(1, device="cpu"))


def others(storage: int, ours: int) -> bool:
    """Whether anyone but us holds a storage (by address): `ours` tensors are our own."""
    return torch._C._storage_Use_Count(storage) > ours + _BESIDE


def is_checkpoint_input() -> bool:
    """Inside a pack hook: whether torch's checkpoint saves an input of its region.

    A region's inside is never seen here: without reentrance torch's own hooks take what is saved there, with it
    nothing is.
    """
    frame, looked = sys._getframe(1), 0
    while frame is not None and looked < _DEPTH:
        name = frame.f_code.co_filename
        if name == _CHECKPOINT:
            return True
        looked += not name.startswith(_OURS)
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Storage:
    """A storage that an imagined pass has saved."""

    __slots__ = ("key", "number", "part", "tensors", "version")

    def __init__(self, key: int, part: Hashable, number: int, version: int) -> None:
        self.key, self.part, self.number, self.version = key, part, number, version
        self.tensors = 0


class _Imagined(SavedTensor):
    __slots__ = ("_list", "_storage")

    def __init__(self, tensor: torch.Tensor, storage: _Storage, among: SavedList) -> None:
        super().__init__(tensor)
        self._storage, self._list = storage, among
        storage.tensors += 1

    def get(self) -> torch.Tensor:
        self._list.wanted(self._storage)
        return super().get()

    def __del__(self) -> None:
        self._storage.tensors -= 1
        if not self._storage.tensors:
            self._list.forget(self._storage)


class SavedList:
    """Writes what an imagined pass saves into its record."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._storages: dict[Hashable, _Storage] = {}
        self._held: set[_Storage] = set()
        """By others, too."""

    def keep(self, tensor: torch.Tensor) -> SavedTensor | None:
        storage = movable(tensor, self._device)
        if storage is None:
            return None
        part = spoken_for(tensor, storage)
        known = self._storages.get(part)
        if known is None or known.version != tensor._version:
            number = self._recorder.save(storage.nbytes(), is_checkpoint_input())
            known = self._storages[part] = _Storage(storage._cdata, part, number, tensor._version)
            self._held.add(known)
        return _Imagined(tensor, known, self)

    def moment(self) -> None:
        """A moment begins."""
        for storage in [s for s in self._held if not others(s.key, s.tensors)]:
            self._held.discard(storage)
            self._recorder.alone(storage.number)

    def wanted(self, storage: _Storage) -> None:
        self._held.discard(storage)
        self._recorder.wanted(storage.number)

    def forget(self, storage: _Storage) -> None:
        self._held.discard(storage)
        if self._storages.get(storage.part) is storage:
            del self._storages[storage.part]
