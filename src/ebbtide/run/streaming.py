"""State on SSD: the buffers that it passes through, and what must be said when chunks change their homes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ebbtide.backend.elsewhere import when_gone
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunks import ChunkStore
from ebbtide.memory.stream import StateStream
from ebbtide.plan.stage import SLOTS, slot_bytes
from ebbtide.run.room import Room
from ebbtide.run.updater import Updater

TAG = "staging"


class Streaming:
    def __init__(self, store: ChunkStore, updater: Updater, states: Callable[[int], list[Chunk]]) -> None:
        self._store, self._updater, self._states = store, updater, states
        self._staged = _Staged(store)
        when_gone(self, self._staged.give_back)
        self.kept: dict[int, int] = {}
        """By chunk, how many of its pieces stay in RAM."""
        settle = weakref.WeakMethod(
            self._settle
        )  # the store outlives an engine that nobody holds, for a moment

        def before(chunk: Chunk) -> None:
            found = settle()
            if found is not None:
                found(chunk)

        store.before_stored = before

    def open(self, chunks: Sequence[int], room: Room, kept: Mapping[int, int]) -> None:
        """Buffers for these chunks' state, and what SSD has of it. `kept`: by chunk, how many pieces stay in RAM."""
        store = self._store
        if not chunks:
            return
        assert store.ssd_space is not None
        piece = store.ssd_space.piece
        states = {i: sum(state.nbytes for state in self._states(i)) for i in chunks}
        sizes = {i: slot_bytes([states[i]], piece) for i in kept}
        size = slot_bytes(states.values(), piece)
        needed = SLOTS * size + sum(count * sizes[i] for i, count in kept.items())
        room.make(store.near, needed)
        store.ledger.reserve(store.near, TAG, needed)
        self._staged.reserved = needed
        try:
            for index in chunks:
                for state in self._states(index):
                    store.reserve_ssd(state)
            slots = self._staged.take(size, SLOTS)
            own = {i: self._staged.take(sizes[i], count) for i, count in kept.items()}
        except BaseException:
            self.close()
            raise
        self.kept = dict(kept)
        self._updater.state = StateStream(
            store.ssd_space, slots, store.traffic.moved, self._updater.background, own
        )
        for index in chunks:
            self.note(index)

    def _settle(self, chunk: Chunk) -> None:
        """Somebody is about to look at what SSD has of a chunk, or to write it."""
        stream = self._updater.state
        if stream is not None and chunk.kind not in ("param", "grad"):
            stream.settle(chunk.index)

    def note(self, index: int) -> None:
        """Something of the chunk was written on SSD by another way: what was read ahead of its state is void."""
        stream, states = self._updater.state, self._states(index)
        if stream is not None and any(state.ssd is not None for state in states):
            stream.note(index, [state.kind for state in states if state.ssd_valid])

    def expect(self, chunks: Iterable[int]) -> None:
        if self._updater.state is not None:
            self._updater.state.expect(list(chunks))

    def put_back(self) -> None:
        """Gives the buffers back, and what only they have to SSD."""
        if self._updater.state is not None:
            self._updater.state.settle()
        self.close()

    def close(self) -> None:
        """Waits for what is under way, and gives the buffers back, whatever they hold."""
        if self._updater.state is not None:
            self._updater.state.close()
        self._updater.state, self.kept = None, {}
        self._staged.give_back()


class _Staged:
    """Memory that state passes through, and what is reserved for it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.reserved = 0
        self._memories: list[torch.Tensor] = []

    def take(self, size: int, count: int) -> list[torch.Tensor]:
        found = [self._store.backend.allocate(self._store.near, size) for _ in range(count)]
        self._memories += found
        return found

    def give_back(self) -> None:
        """When nothing reads or writes it: an engine may have been dropped as it was."""
        store = self._store
        if self._memories and store.ssd_space is not None:
            store.ssd_space.disk.synchronize()
        memories, self._memories = self._memories, []
        for memory in memories:
            store.backend.free(store.near, memory)
        reserved, self.reserved = self.reserved, 0
        store.ledger.release(store.near, TAG, reserved)
