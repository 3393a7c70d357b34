"""State on SSD: the buffers that it passes through, and what must be said when chunks change their homes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunks import ChunkStore
from ebbtide.memory.stream import StateStream
from ebbtide.plan.stage import SLOTS, slot_bytes
from ebbtide.run.jobs import Updater
from ebbtide.run.room import Room

TAG = "staging"


class Streaming:
    def __init__(self, store: ChunkStore, updater: Updater, states: Callable[[int], list[Chunk]]) -> None:
        self._store, self._updater, self._states = store, updater, states
        self._reserved = 0

    def open(self, chunks: Sequence[int], room: Room) -> None:
        """Buffers for these chunks' state, and what SSD has of it."""
        store = self._store
        if not chunks:
            return
        assert store.ssd_space is not None
        states = [sum(state.nbytes for state in self._states(i)) for i in chunks]
        size = slot_bytes(states, store.ssd_space.piece)
        room.make(store.near, SLOTS * size)
        store.ledger.reserve(store.near, TAG, SLOTS * size)
        self._reserved = SLOTS * size
        slots = [store.backend.allocate(store.near, size) for _ in range(SLOTS)]
        self._updater.state = StateStream(
            store.ssd_space, slots, store.traffic.moved, self._updater.background
        )
        for index in chunks:
            for state in self._states(index):
                store.reserve_ssd(state)
            self.note(index)

    def note(self, index: int) -> None:
        """Something of the chunk was written on SSD by another way: what was read ahead of its state is void."""
        stream, states = self._updater.state, self._states(index)
        if stream is not None and any(state.ssd is not None for state in states):
            stream.note(index, [state.kind for state in states if state.ssd_valid])

    def expect(self, chunks: Iterable[int]) -> None:
        if self._updater.state is not None:
            self._updater.state.expect(list(chunks))

    def close(self) -> None:
        """Waits for what is under way, and gives the buffers back."""
        stream, self._updater.state = self._updater.state, None
        if stream is None:
            return
        for memory in stream.close():
            self._store.backend.free(self._store.near, memory)
        self._store.ledger.release(self._store.near, TAG, self._reserved)
        self._reserved = 0
