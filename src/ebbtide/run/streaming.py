"""State on SSD: the buffers that it passes through, and what must be said when chunks change their homes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

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
        self._reserved, self.kept = needed, dict(kept)
        for index in chunks:
            for state in self._states(index):
                store.reserve_ssd(state)
        self._updater.state = StateStream(
            store.ssd_space,
            [store.backend.allocate(store.near, size) for _ in range(SLOTS)],
            store.traffic.moved,
            self._updater.background,
            {i: [store.backend.allocate(store.near, sizes[i]) for _ in range(n)] for i, n in kept.items()},
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
        stream, self._updater.state = self._updater.state, None
        self.kept = {}
        if stream is None:
            return
        for memory in stream.close():
            self._store.backend.free(self._store.near, memory)
        self._store.ledger.release(self._store.near, TAG, self._reserved)
        self._reserved = 0
