"""What an update of a chunk does with the gradients that wait: all that came since the last one, as one step."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.memory.chunk import Chunk
from ebbtide.run.chunk_updates import ChunkUpdates, Part
from ebbtide.run.progress import Waiting


class Merging:
    def __init__(self, chunks: ChunkUpdates) -> None:
        self._chunks, self._data, self._near = chunks, chunks.data, chunks.store.near

    def work(self, index: int, waiting: Waiting, values: Chunk) -> Callable[[], None]:
        """What the thread does for an update, which is counted as a step of its parameters."""
        parts = self._parts(waiting)
        run = self._chunks.stream if self._chunks.homes[index] == "ssd" else self._chunks.run
        tier = self._near

        def work() -> None:
            try:
                for event in waiting.added:
                    event.wait()
                run(tier, index, parts, values)
            finally:
                parts.clear()

        return work

    def makes_all(self, index: int, waiting: Waiting) -> bool:
        """Whether an update makes every value that is here anew, from masters that are whole."""
        if self._data.master != "separate" or self._data.master_dtype(index) is None:
            return False
        return all(m in waiting.steps for m in self._data.members[index] if self._data.shares[m].numel)

    def _parts(self, waiting: Waiting) -> list[Part]:
        """The mean over the steps that a parameter has gradients of counts as one step."""
        steps = self._chunks.steps
        alike: dict[int, list[int]] = {}
        for member, count in waiting.steps.items():
            steps.counts[member] += 1
            alike.setdefault(count, []).append(member)
        return [
            Part(segment, list(waiting.memory.slices(self._near, segment.offset, segment.count)))
            for count, members in alike.items()
            for segment in steps.segments(members, waiting.scale / count, waiting.groups)
        ]
