"""What lock-free updates keep beside the chunks: new values of parameters, and gradients that wait.

All of it is reserved at once, so that no update ever finds the tier full. Only the thread that issues the computation
takes and gives; what is in a buffer is for whoever was handed it.
"""

from __future__ import annotations

import weakref

import torch

from ebbtide.backend import Backend
from ebbtide.errors import IntegrityError
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunks import ChunkStore
from ebbtide.memory.host import Fragment
from ebbtide.memory.ledger import Ledger

TAG = "buffers"
VALUES, GRADIENTS = "values", "gradients"


class _Held:
    """Apart from `Buffers`, so that an engine that nobody holds any more gives its buffers back."""

    def __init__(self, backend: Backend, ledger: Ledger, tier: str) -> None:
        self.backend, self.ledger, self.tier = backend, ledger, tier
        self.reserved = 0
        self.used = {VALUES: 0, GRADIENTS: 0}
        self.memory: dict[int, torch.Tensor] = {}

    def release(self) -> None:
        for memory in self.memory.values():
            self.backend.free(self.tier, memory)
        self.memory.clear()
        self.used = dict.fromkeys(self.used, 0)
        self.ledger.release(self.tier, TAG, self.reserved)
        self.reserved = 0


class Buffers:
    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._held = _Held(store.backend, store.ledger, store.near)
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
        nbytes = like.size * dtype.itemsize
        self._count(what, nbytes)
        return self._loose(like, dtype, self._held.backend.allocate(self._held.tier, nbytes))

    def adopt(self, what: str, like: Chunk, memory: torch.Tensor) -> Chunk:
        """The same, in memory that was a chunk's, which is no longer reserved for that."""
        self._count(what, memory.numel())
        return self._loose(like, like.dtype, memory)

    def give(self, what: str, chunk: Chunk) -> None:
        memory = chunk.device
        assert memory is not None
        del self._held.memory[memory.data_ptr()]
        self._held.used[what] -= memory.numel()
        chunk.device, chunk.host = None, None
        self._held.backend.free(self._held.tier, memory)

    def exchange(self, buffer: Chunk, chunk: Chunk) -> None:
        """A chunk's copy on the device and a buffer of its size change places."""
        mine, other = buffer.device, chunk.device
        assert mine is not None and other is not None and mine.numel() == other.numel()
        del self._held.memory[mine.data_ptr()]
        self._held.memory[other.data_ptr()] = other
        buffer.device, chunk.device = other, mine
        buffer.host = [Fragment(0, other)]
        del mine, other
        chunk.aliases = self._store.backend.aliases(chunk.device)

    def close(self) -> None:
        self._held.release()
        self._sizes = {VALUES: 0, GRADIENTS: 0}

    def check(self) -> None:
        held = sum(memory.numel() for memory in self._held.memory.values())
        if held != sum(self._held.used.values()) or held > self._held.reserved:
            raise IntegrityError(
                f"buffers hold {held} bytes, counted are {self._held.used}, reserved {self._held.reserved}"
            )

    def _count(self, what: str, nbytes: int) -> None:
        if nbytes > self.room(what):
            raise IntegrityError(
                f"buffers for {what} have {self.room(what)} bytes left of the {nbytes} asked for"
            )
        self._held.used[what] += nbytes

    def _loose(self, like: Chunk, dtype: torch.dtype, memory: torch.Tensor) -> Chunk:
        self._held.memory[memory.data_ptr()] = memory
        chunk = Chunk(like.kind, like.index, dtype, like.size, memory.numel())
        # Whichever tier is next to SSD: the elements are found on either.
        chunk.device, chunk.host = memory, [Fragment(0, memory)]
        return chunk
