"""Chunks that move: each copy's beginning and end, and the links between tiers.

A move goes through `fetch`/`evict` (device and host) or `load`/`save` (SSD and the tier next to it), which start it, and
`settle`, which ends it: until then the destination is reserved but not valid, so a move that fails leaves the source as
it was and the books right.

This module moves what it is told to and refuses what would break the books. It does not choose what to
move or when: that is the executor's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ebbtide.backend.base import Backend, Event, wait_for_all
from ebbtide.disk.space import DiskSpace
from ebbtide.errors import IntegrityError, StateError
from ebbtide.layout import ALONE, Layout, Slicing
from ebbtide.memory.chunk import LINKS, SSD_READ, SSD_WRITE, TIERS, TO_DEVICE, TO_HOST, WIRE, Chunk
from ebbtide.memory.copies import Copies
from ebbtide.memory.ledger import Ledger
from ebbtide.plan.shape import WHOLE


@dataclass
class Traffic:
    """What has been moved; `moved` in bytes by link."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    fetches: int = 0
    evictions: int = 0
    drops: int = 0
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    """Seconds that the host waited for a move, by link."""


class ChunkStore(Copies):
    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        ledger: Ledger,
        disk: DiskSpace | None = None,
        slicing: Slicing = ALONE,
    ) -> None:
        super().__init__(layout, backend, ledger, disk, slicing)
        self.traffic = Traffic()
        self.before_stored: Callable[[Chunk], None] = lambda chunk: None
        """Is told of a chunk whose copy on SSD is about to be read or written other than by its updates."""
        self._moves = 0

    # -- copies ---------------------------------------------------------------------------------------

    def allocate(self, chunk: Chunk, tier: str, zero: bool = False) -> None:
        """Gives a free chunk its first copy; its contents are undefined unless `zero`, padding's always."""
        if not chunk.free or chunk.move:
            raise StateError(f"{chunk} already has a payload; a chunk is allocated only when it is free")
        self._open(chunk, tier)
        if zero:
            # Not the padding: on a CPU, memory that nobody touches takes no room.
            for _, piece in chunk.slices(tier, 0, self.used(chunk.index)):
                piece.zero_()
        self.written(chunk, tier)

    def drop(self, chunk: Chunk, tier: str) -> None:
        """Gives up one copy of a chunk that has another valid one, or whose copy there is stale."""
        self.settle(chunk)
        if chunk.valid_on(tier) and not any(chunk.valid_on(other) for other in TIERS if other != tier):
            raise IntegrityError(f"{chunk} would lose its only valid copy ({tier})")
        if tier == "device" and chunk.pins:
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot leave the device")
        self._close(chunk, tier)

    def free(self, chunk: Chunk) -> None:
        """The chunk's payload is no longer needed anywhere, nor whether what was under way ends well."""
        with suppress(Exception):
            self.settle(chunk)
        with suppress(Exception):
            self.end_move(chunk)
        if chunk.pins:
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot be freed")
        for tier in TIERS:
            self._close(chunk, tier)

    def surrender(self, chunk: Chunk) -> torch.Tensor:
        """The memory of a chunk that is on the device only becomes the caller's, who has reserved it."""
        self.settle(chunk)
        memory = chunk.device
        if memory is None or chunk.pins or not chunk.device_valid or chunk.host is not None:
            raise StateError(
                f"{chunk} is in use or not on the device alone, and its memory cannot be given away"
            )
        chunk.device, chunk.device_valid = None, False
        self._close(chunk, "ssd")
        self.ledger.release("device", chunk.kind, chunk.nbytes)
        return memory

    # -- moves ----------------------------------------------------------------------------------------

    def fetch(self, chunk: Chunk) -> None:
        """Starts bringing the chunk to the device."""
        if chunk.device_valid or (chunk.move and chunk.move[0] == TO_DEVICE):
            return
        self.settle(chunk, host=True)
        if self.near == "device" and chunk.ssd_valid:
            self.traffic.fetches += 1
            self.load(chunk)
            return
        if not chunk.host_valid:
            raise StateError(f"{chunk} has no payload to fetch")
        self._open(chunk, "device")
        self._start(chunk, TO_DEVICE)
        self.traffic.fetches += 1

    def evict(self, chunk: Chunk) -> None:
        """Starts taking the chunk off the device; nothing is moved where the host copy is still good."""
        self.settle(chunk)
        if chunk.device is None:
            return
        if chunk.pins:
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot be evicted")
        if chunk.host_valid or chunk.ssd_valid or not chunk.device_valid or chunk.kind == WHOLE:
            self.traffic.drops += 1
            self._close(chunk, "device")
            return
        self.traffic.evictions += 1
        if self.near == "device":
            self.save(chunk)
            return
        self._open(chunk, "host")
        self._start(chunk, TO_HOST)

    def gather(self, chunk: Chunk, start: Callable[[torch.Tensor], tuple[Event, int]]) -> None:
        """Starts filling a whole chunk with all ranks' slices: `start` is given its memory, and says when that is over
        and how many bytes this rank sends."""
        self._open(chunk, "device")
        assert chunk.device is not None
        try:
            event, sent = start(chunk.device)
        except BaseException:
            self._close(chunk, "device")
            raise
        chunk.move = (WIRE, [event])
        self._moves += 1
        chunk.started = self._moves
        self.traffic.moved[WIRE] += sent

    def load(self, chunk: Chunk) -> None:
        """Starts bringing the chunk from SSD to the tier next to it."""
        self.settle(chunk)
        if chunk.valid_on(self.near):
            return
        if not chunk.ssd_valid:
            raise StateError(f"{chunk} has no payload on SSD to load")
        self._open(chunk, self.near)
        self._start(chunk, SSD_READ)

    def save(self, chunk: Chunk) -> None:
        """Starts taking the chunk from the tier next to SSD there; nothing is moved where SSD has it already."""
        self.settle(chunk, host=True)
        if chunk.pins and self.near == "device":
            raise StateError(f"{chunk} is in use ({chunk.pins} pins) and cannot go to SSD")
        if chunk.ssd_valid:
            self._close(chunk, self.near)
            return
        if not chunk.valid_on(self.near):
            raise StateError(f"{chunk} has no payload on the {self.near} to save")
        self._open(chunk, "ssd")
        self._start(chunk, SSD_WRITE)

    def _start(self, chunk: Chunk, link: str) -> None:
        """A move that could not start as a whole is none: the chunk stays where it is good."""
        events: list[Event] = []
        try:
            if link in (SSD_READ, SSD_WRITE):
                self._exchange(chunk, link, events)
            else:
                self._copy(chunk, link, events)
            chunk.move = (link, events)
        except BaseException as error:
            chunk.move = None
            wait_for_all(events)
            if not isinstance(error, Exception):  # an interrupt: one may have started that nobody knows of
                self._outlast_all()
            self._close(chunk, self.ends_of(link)[1])
            raise
        self._moves += 1
        chunk.started = self._moves
        self.traffic.moved[link] += chunk.nbytes

    def _outlast_all(self) -> None:
        self.backend.synchronize()
        if self.ssd_space is not None:
            self.ssd_space.disk.synchronize()

    def _copy(self, chunk: Chunk, link: str, events: list[Event]) -> None:
        assert chunk.device is not None and chunk.host is not None
        for fragment in chunk.host:
            part = chunk.device[fragment.start : fragment.start + fragment.memory.numel()]
            pair = (part, fragment.memory) if link == TO_DEVICE else (fragment.memory, part)
            events.append(self.backend.copy(*pair, link))

    def _exchange(self, chunk: Chunk, link: str, events: list[Event]) -> None:
        """Starts reading or writing each piece of the chunk, from or to wherever its memory is."""
        assert chunk.ssd is not None and self.ssd_space is not None
        self.before_stored(chunk)
        disk = self.ssd_space.disk
        act = disk.read if link == SSD_READ else disk.write
        for stored in chunk.ssd:
            memory = [
                piece.view(torch.uint8) for _, piece in chunk.slices(self.near, stored.first, stored.count)
            ]
            events.append(act(stored.extent, memory, stored.offset))

    def settle(self, chunk: Chunk, host: bool = False) -> None:
        """Ends work and a move under way. With `host` the host itself may read or write its copy afterwards."""
        if chunk.work is not None:
            chunk.work.settle()
        self.end_move(chunk)
        if host:
            for event in chunk.pending:
                event.synchronize()
            chunk.pending = []

    def end_move(self, chunk: Chunk, keep_source: bool = False) -> None:
        """Ends a move under way, and leaves work on the chunk to itself. With `keep_source` what left is still there.
        It is under way until all of this is done: whatever ends this early, the next call does it again."""
        if chunk.move is None:
            return
        link, events = chunk.move
        left, arrived = self.ends_of(link)
        failed = self._wait(events, link)
        if failed is not None:
            self._close(chunk, arrived)
            chunk.move = None
            raise failed
        if link in (TO_DEVICE, TO_HOST):
            chunk.pending = events
        chunk.mark(arrived, True)
        if link in (TO_HOST, SSD_WRITE) and not keep_source:
            self._close(chunk, left)
        chunk.move = None

    def ends_of(self, link: str) -> tuple[str, str]:
        """Where a link's moves come from and where they go."""
        ends = {
            TO_DEVICE: ("host", "device"),
            TO_HOST: ("device", "host"),
            SSD_READ: ("ssd", self.near),
            WIRE: ("ranks", "device"),
        }
        return ends.get(link, (self.near, "ssd"))

    def _wait(self, events: Sequence[Event], link: str) -> BaseException | None:
        start = time.perf_counter()
        failed = wait_for_all(events)
        self.traffic.stalls[link] += time.perf_counter() - start
        return failed

    def turn_back(self, chunk: Chunk) -> None:
        """The chunk is wanted on the device: a fetch is ended, an eviction leaves a clean pair behind."""
        if chunk.work is not None:
            chunk.work.settle()
        self.end_move(chunk, keep_source=True)

    def mirror(self, chunk: Chunk) -> None:
        """The host has a copy of what the device has, too, where it stays."""
        self._open(chunk, "host")
        self._start(chunk, TO_HOST)
        self.end_move(chunk, keep_source=True)

    def moving(self, link: str) -> list[Chunk]:
        """Chunks that are on their way over a link, in the order in which they set out."""
        found = [c for c in self.chunks.values() if c.move is not None and c.move[0] == link]
        return sorted(found, key=lambda chunk: chunk.started)
