"""What lock-free updates keep beside the chunks: new values of parameters, and gradients that wait.

All of it is reserved at once, so that no update ever finds the tier full. Only the thread that issues the computation
takes and gives; what is in a buffer is for whoever was handed it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from ebbtide.devices import Backend
from ebbtide.errors import IntegrityError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.memory.host_space import HostFragment

TAG = "buffers"
VALUES, GRADIENTS = "values", "gradients"


class _BufferMemory:
    """Apart from `Buffers`, so that an engine that nobody holds any more gives its buffers back."""

    def __init__(self, backend: Backend, ledger: Ledger, tier: str) -> None:
        self.backend, self.ledger, self.tier = backend, ledger, tier
        self.reserved = 0
        self.used = {VALUES: 0, GRADIENTS: 0}
        self.memory: dict[int, tuple[str, torch.Tensor]] = {}
        """By address: what for, and the memory."""

    def release(self) -> None:
        for _, memory in self.memory.values():
            self.backend.free(self.tier, memory)
        self.memory.clear()
        self.used = dict.fromkeys(self.used, 0)
        self.ledger.release(self.tier, TAG, self.reserved)
        self.reserved = 0


class LockFreeBuffers:
    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._held = _BufferMemory(store.backend, store.ledger, store.near)
        self._sizes = {VALUES: 0, GRADIENTS: 0}
        weakref.finalize(self, self._held.release)

    def open(self, values: int, gradients: int) -> None:
        """There must be room for them on the tier next to SSD."""
        held = self._held
        if held.reserved:
            raise IntegrityError("the buffers of lock-free updates are open already")
        held.ledger.reserve(held.tier, TAG, values + gradients)
        held.reserved = values + gradients
        self._sizes = {VALUES: values, GRADIENTS: gradients}

    def room(self, what: str) -> int:
        return self._sizes[what] - self._held.used[what]

    def take(self, what: str, like: Chunk, dtype: torch.dtype) -> Chunk:
        """A chunk of its own, for as many elements as another has; its contents are undefined."""
        nbytes, held = like.size * dtype.itemsize, self._held
        self._count(what, nbytes)
        return self._loose(what, like, dtype, lambda: held.backend.allocate(held.tier, nbytes))

    def adopt(self, what: str, like: Chunk) -> Chunk:
        """The same, in the memory of a chunk on the device, which is no longer reserved for that."""
        self._count(what, like.nbytes)
        return self._loose(what, like, like.dtype, lambda: self._store.surrender(like))

    def give(self, what: str, chunk: Chunk) -> None:
        memory, held = chunk.device, self._held
        if memory is None:
            return  # it was given when an interrupt came
        pointer, nbytes = memory.data_ptr(), memory.numel()
        del held.memory[pointer]
        held.used[what] -= nbytes
        chunk.device, chunk.host = None, None
        held.backend.free(held.tier, memory)

    def exchange(self, buffer: Chunk, chunk: Chunk) -> None:
        """A chunk's copy on the device and a buffer of its size change places."""
        mine, other, known = buffer.device, chunk.device, self._held.memory
        assert mine is not None and other is not None and mine.numel() == other.numel()
        before, after, fragment = mine.data_ptr(), other.data_ptr(), HostFragment(0, other)
        known[after] = known[before][0], other
        del known[before]
        buffer.device, chunk.device, buffer.host = other, mine, [fragment]
        del mine, other, fragment
        chunk.aliases = self._store.backend.aliases(chunk.device)

    def sweep(self, owners: Iterable[Chunk]) -> None:
        """Gives back what none of these has: an interrupt may come before it is noted that a buffer was taken."""
        held = self._held
        for pointer in self._nobodys(owners):
            _, memory = held.memory.pop(pointer)
            held.backend.free(held.tier, memory)
        held.used = dict.fromkeys(held.used, 0)
        for what, memory in held.memory.values():
            held.used[what] += memory.numel()

    def close(self) -> None:
        self._held.release()
        self._sizes = {VALUES: 0, GRADIENTS: 0}

    def _nobodys(self, owners: Iterable[Chunk]) -> set[int]:
        known = {chunk.device.data_ptr() for chunk in owners if chunk.device is not None}
        return self._held.memory.keys() - known

    def check(self, owners: Iterable[Chunk]) -> None:
        held = sum(memory.numel() for _, memory in self._held.memory.values())
        if held != sum(self._held.used.values()) or held > self._held.reserved:
            raise IntegrityError(
                f"buffers hold {held} bytes, counted are {self._held.used}, reserved {self._held.reserved}"
            )
        lost = sum(self._held.memory[pointer][1].numel() for pointer in self._nobodys(owners))
        if lost:
            raise IntegrityError(f"buffers of {lost} bytes belong to no gradients and no update")

    def _count(self, what: str, nbytes: int) -> None:
        if nbytes > self.room(what):
            raise IntegrityError(
                f"buffers for {what} have {self.room(what)} bytes left of the {nbytes} asked for"
            )
        self._held.used[what] += nbytes

    def _loose(self, what: str, like: Chunk, dtype: torch.dtype, get: Callable[[], torch.Tensor]) -> Chunk:
        held, memory = self._held, get()
        try:
            held.memory[memory.data_ptr()] = what, memory
            chunk = Chunk(like.kind, like.index, dtype, like.size, memory.numel())
            # Whichever tier is next to SSD: the elements are found on either.
            chunk.device, chunk.host = memory, [HostFragment(0, memory)]
        except BaseException:
            if memory.data_ptr() not in held.memory:
                held.backend.free(held.tier, memory)
            raise
        return chunk
