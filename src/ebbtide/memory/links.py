"""The links between tiers, and the one place where what moves is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from ebbtide.devices.device import Event
from ebbtide.memory.journal import Journal, StepEvents

TO_DEVICE, TO_HOST, SSD_READ, SSD_WRITE, WIRE = LINKS = (
    "host_to_device",
    "device_to_host",
    "ssd_read",
    "ssd_write",
    "wire",
)
"""The wire's bytes are those that this rank sends to others."""


@dataclass
class Traffic:
    """What was moved, over which link, since the beginning."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    """Bytes by link."""
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    """Seconds that the host waited for a move, by link."""
    fetches: int = 0
    evictions: int = 0
    drops: int = 0
    journal: Journal = field(default_factory=Journal)

    _of_chunks: Counter[tuple[int, str]] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)
    """The computation's thread counts, and the one that updates."""

    def count(
        self,
        link: str,
        nbytes: int,
        chunk: int | None = None,
        kind: str = "",
        events: Sequence[Event] = (),
        issued: float = 0.0,
    ) -> None:
        """Every byte that moves comes through here. `chunk`: of which chunk it is, where it is of one. `events`: the
        ends of the move's parts. `issued`: when it was asked for, if not now."""
        with self._lock:
            self.moved[link] += nbytes
            if chunk is not None:
                self._of_chunks[chunk, link] += nbytes
            if self.journal.events is not None:
                self.journal.move(link, nbytes, chunk, kind, issued, events)

    def cut(self, events: StepEvents | None) -> tuple[dict[str, int], StepEvents | None]:
        """A step ends: what was moved until now, and the events that were kept of it. What comes is kept in `events`. No
        move on another thread comes between."""
        with self._lock:
            before, self.journal.events = self.journal.events, events
            return dict(self.moved), before

    @contextmanager
    def waiting(self, link: str, chunk: int = -1) -> Iterator[None]:
        """Around a wait of the host for a move."""
        begin = time.perf_counter()
        try:
            with self.journal.at(link, chunk):
                yield
        finally:
            self.stalls[link] += time.perf_counter() - begin

    def by_chunk(self) -> dict[int, dict[str, int]]:
        """Bytes by chunk and link. Activations and tokens are of no chunk."""
        found: dict[int, dict[str, int]] = {}
        with self._lock:
            for (chunk, link), nbytes in sorted(self._of_chunks.items()):
                found.setdefault(chunk, {})[link] = nbytes
        return found
