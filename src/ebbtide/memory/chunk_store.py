"""The chunks of a model: their copies on the tiers, the books about them, and their moves from one tier to the next.

A chunk may have a copy on the device, on the host, and on SSD. A copy is *valid* when it holds the current value; of
several valid ones all but one can be dropped without traffic. Writing makes the written copy the only valid one.

A move goes through `fetch`/`evict` (device and host) or `load`/`save` (SSD and the tier next to it), which start it, and
`settle`, which ends it: until then the destination is reserved but not valid, so a move that fails leaves the source as
it was and the books right.

The store moves what it is told to and refuses what would break the books. It does not choose what to move or when.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

import torch

from ebbtide.devices.device import Backend, Event, wait_for_all
from ebbtide.devices.profiler import UNNAMED, in_profile, profiled
from ebbtide.errors import IntegrityError, StateError
from ebbtide.layout import ALONE, Layout, Slicing
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk import GATHERED, PASSING, TORCH_DTYPES, Chunk
from ebbtide.memory.disk.space import DiskSpace
from ebbtide.memory.host_space import HostSpace
from ebbtide.memory.integrity import check_books
from ebbtide.memory.links import SSD_READ, SSD_WRITE, TO_DEVICE, TO_HOST, WIRE, Traffic
from ebbtide.memory.ssd_space import SsdSpace
from ebbtide.memory.state_stream import StateStream
from ebbtide.planner.shape import GRAD, PARAM, TIERS, WHOLE
from ebbtide.planner.sizes import piece_bytes


def _parameter_bytes(layout: Layout, slicing: Slicing) -> int:
    return sum(slicing.slice(chunk.size) * TORCH_DTYPES[chunk.dtype].itemsize for chunk in layout.chunks)


class ChunkStore:
    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        ledger: Ledger,
        disk: DiskSpace | None = None,
        slicing: Slicing = ALONE,
    ) -> None:
        """`slicing`: how ranks share the chunks; all that is here is this rank's slices of them."""
        self.layout = layout
        self.slicing = slicing
        self.backend = backend
        self.ledger = ledger
        self.host_space = HostSpace(layout, backend, ledger, slicing)
        piece = piece_bytes(_parameter_bytes(layout, slicing))
        self.ssd_space = None if disk is None else SsdSpace(disk, ledger, piece)
        self.has_host = bool(ledger.budgets["host"])
        """Whether the host is a tier. Without it the device is RAM, or all there is."""
        self.near = "host" if self.has_host else "device"
        """The tier next to SSD."""
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self.traffic = Traffic()
        self.state_stream: StateStream | None = None
        """What optimizer state on SSD passes through, while some is there."""
        self._moves = 0
        self.state_homes: list[str] = []
        """By chunk: the tier where its optimizer state lives. Placement decides, and writes it."""
        self._states: list[list[Chunk]] = [[] for _ in layout.chunks]
        self.graphs: WeakSet[object] = WeakSet()
        """One for each graph of autograd's that has saved weights as they are, and not where they will be."""

    def updates_on_device(self, index: int) -> bool:
        """Whether a chunk's state lives on the device."""
        return self.state_homes[index] == "device"

    def streams(self, index: int) -> bool:
        """Whether a chunk's state lives on SSD, and streams through memory to its update."""
        return self.state_homes[index] == "ssd"

    def update_tier(self, index: int) -> str:
        """The tier that updates a chunk: nothing computes on SSD."""
        return self.near if self.streams(index) else self.state_homes[index]

    def add(self, kind: str, index: int, dtype: torch.dtype) -> Chunk:
        size = self.layout.chunks[index].size
        size = self.slicing.slice(size) * (self.crew(index) if kind in GATHERED else 1)
        chunk = Chunk(kind, index, dtype, size, size * dtype.itemsize)
        self.chunks[kind, index] = chunk
        if kind not in PASSING:
            self._states[index].append(chunk)
        return chunk

    def state_chunks(self, index: int) -> list[Chunk]:
        """Optimizer state of a chunk, by kind: the master first where there is one."""
        return self._states[index]

    def crew(self, index: int) -> int:
        """How many ranks' slices of a chunk are computed with: of all, or of those that have the same experts."""
        return self.layout.spread.get(index, self.slicing.ranks)

    def used(self, index: int) -> int:
        """Elements of a chunk's slice that are no padding."""
        spec = self.layout.chunks[index]
        return self.slicing.used(spec.size, spec.used)

    def get(self, kind: str, index: int) -> Chunk:
        return self.chunks[kind, index]

    # -- copies ---------------------------------------------------------------------------------------

    def allocate(self, chunk: Chunk, tier: str, zero: bool = False) -> None:
        """Gives a free chunk its first copy; its contents are undefined unless `zero`, padding's always."""
        if not chunk.free or chunk.move:
            raise StateError(f"{chunk} already has a payload; a chunk is allocated only when it is free")
        self._open(chunk, tier)
        if zero:
            # Not the padding: on a CPU, untouched memory takes no room.
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
        if not self.has_host and chunk.ssd_valid:
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
        if not self.has_host:
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
        self.traffic.count(WIRE, sent, chunk.index, chunk.kind, [event])

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
        if chunk.pins and not self.has_host:
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
            with in_profile(f"{link}, {chunk.kind} {chunk.index}") if profiled() else UNNAMED:
                if link in (SSD_READ, SSD_WRITE):
                    self._exchange(chunk, link, events)
                else:
                    self._copy(chunk, link, events)
            chunk.move = (link, events)
        except BaseException as error:
            chunk.move = None
            wait_for_all(events, host=True)  # its memory goes to others
            if not isinstance(error, Exception):  # an interrupt: a request may have started unrecorded
                self._outlast_all()
            self._close(chunk, self.ends_of(link)[1])
            raise
        self._moves += 1
        chunk.started = self._moves
        self.traffic.count(link, chunk.nbytes, chunk.index, chunk.kind, events)

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
        self.settle_stream(chunk)
        disk = self.ssd_space.disk
        act = disk.read if link == SSD_READ else disk.write
        for stored in chunk.ssd:
            memory = [
                piece.view(torch.uint8) for _, piece in chunk.slices(self.near, stored.first, stored.count)
            ]
            events.append(act(stored.extent, memory, stored.offset))

    def settle_stream(self, chunk: Chunk) -> None:
        """What SSD has of a chunk is about to be read or written other than by its updates."""
        if self.state_stream is not None and chunk.kind not in (PARAM, GRAD):
            self.state_stream.settle(chunk.index)

    def written_on_ssd(self, index: int) -> None:
        """SSD has something new of a chunk, not from its updates: what was read ahead of its state is void."""
        states = self.state_chunks(index)
        if self.state_stream is not None and any(state.ssd is not None for state in states):
            self.state_stream.note(index, [state.kind for state in states if state.ssd_valid])

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
        with self.traffic.waiting(link, chunk.index):
            failed = wait_for_all(events)
        if failed is not None:
            wait_for_all(events, host=True)  # its memory goes to others
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

    # -- places ---------------------------------------------------------------------------------------

    def reserve_ssd(self, chunk: Chunk, valid: bool = False) -> None:
        """Gives the chunk a place on SSD, whatever is there; `valid`: it is about to be written, and counts."""
        self._open(chunk, "ssd")
        chunk.ssd_valid |= valid

    def written(self, chunk: Chunk, tier: str) -> None:
        """The copy on `tier` was written: it is now the authoritative one. A parameter's stale host copy
        keeps its place, for it will be filled again every iteration."""
        chunk.device_valid, chunk.host_valid = tier == "device", tier == "host"
        chunk.ssd_valid = tier == "ssd"
        if chunk.kind != "param":
            for other in TIERS:
                if other != tier and getattr(chunk, other) is not None:
                    self._close(chunk, other)

    def _open(self, chunk: Chunk, tier: str) -> None:
        if tier == "host":
            if chunk.host is None:
                chunk.host = self.host_space.acquire(chunk.kind, chunk.index, chunk.dtype)
        elif tier == "ssd":
            if chunk.ssd is None:
                assert self.ssd_space is not None, "there is no SSD tier"
                kinds = self.stored_with(chunk)
                needed = self.ssd_space.needed(chunk.kind, chunk.index, chunk.size, kinds)
                self.clear_ssd(needed)
                chunk.ssd = self.ssd_space.acquire(chunk.kind, chunk.index, chunk.size, kinds)
        elif chunk.device is None:
            self.ledger.reserve("device", chunk.kind, chunk.nbytes)
            try:
                chunk.device = self.backend.allocate("device", chunk.nbytes)
            except BaseException:
                self.ledger.release("device", chunk.kind, chunk.nbytes)
                raise
            chunk.aliases = self.backend.aliases(chunk.device)

    def updated_on_ssd(self, index: int) -> None:
        """What SSD has of a chunk's state is the newest: updates have streamed it."""
        for state in self.state_chunks(index):
            state.ssd_valid = True

    def outdate(self, chunk: Chunk) -> None:
        """What the device has of a gathered chunk is out of date, and is about to be gathered again."""
        chunk.device_valid = False

    def vacate(self, chunk: Chunk) -> None:
        """Gives up the place on SSD of a chunk that the tier next to it has, even while that is being updated."""
        if chunk.ssd is not None and chunk.move is None and chunk.valid_on(self.near):
            self._close(chunk, "ssd")

    def clear_ssd(self, needed: int) -> None:
        """Copies on SSD that are stale, or not the only ones, keep their places until others want them."""
        for valid in (False, True):
            for chunk in self.chunks.values():
                if needed <= self.ledger.room("ssd"):
                    return
                spare = any(chunk.valid_on(tier) for tier in ("device", "host"))
                left_alone = chunk.move is None and not chunk.worked_on and chunk.kind in ("param", "grad")
                if chunk.ssd is not None and spare and left_alone and chunk.ssd_valid == valid:
                    self._close(chunk, "ssd")

    def stored_with(self, chunk: Chunk) -> list[tuple[str, torch.dtype]]:
        """The kinds that lie together on SSD: all state of a chunk; parameters and gradients by themselves."""
        if chunk.kind in ("param", "grad"):
            return [(chunk.kind, chunk.dtype)]
        return [
            (kind, other.dtype)
            for (kind, index), other in self.chunks.items()
            if index == chunk.index and kind not in PASSING
        ]

    def _close(self, chunk: Chunk, tier: str) -> None:
        if tier == "ssd":
            chunk.ssd_valid = False
            if chunk.ssd is not None:
                assert self.ssd_space is not None
                chunk.ssd = None
                self.ssd_space.release(chunk.kind, chunk.index)
        elif tier == "host":
            chunk.host_valid = False
            if chunk.host is not None:
                for event in chunk.pending:
                    event.synchronize()
                chunk.pending = []
                chunk.host = None
                self.host_space.release(chunk.kind, chunk.index, chunk.dtype)
        else:
            chunk.device_valid = False
            if chunk.device is not None:
                memory, chunk.device = chunk.device, None
                self.backend.free("device", memory)
                self.ledger.release("device", chunk.kind, chunk.nbytes)

    # -- questions ------------------------------------------------------------------------------------

    def room_needed(self, chunk: Chunk, tier: str) -> int:
        """Bytes that a copy on `tier` (device or host) would reserve now."""
        if tier == "host":
            return (
                0 if chunk.host is not None else self.host_space.needed(chunk.index, chunk.dtype, chunk.kind)
            )
        return 0 if chunk.device is not None else chunk.nbytes

    def only_here(self, chunk: Chunk) -> bool:
        """Whether the device's copy would have to be moved to make room."""
        return chunk.device_valid and not chunk.host_valid and chunk.kind != WHOLE

    def in_use(self, chunk: Chunk) -> bool:
        """Pinned, worked on, or a tensor that we did not make still looks at the device copy (a running
        backward operator, a view that user code keeps); or a graph wants it as it is."""
        if chunk.pins or chunk.worked_on or (chunk.kind in (PARAM, WHOLE) and self.graphs):
            return True
        return chunk.device is not None and self.backend.aliases(chunk.device) > chunk.aliases

    def check_integrity(self) -> None:
        """Raises unless copies, validity, reservations and the back end's own count agree."""
        check_books(self.chunks.values(), self.ledger)
        self.host_space.check()
        if self.ssd_space is not None:
            self.ssd_space.check()

    def release(self) -> None:
        """All memory goes back to the tiers, when nothing reads or writes it: an interrupt may have come between a
        request's start and its note."""
        if self.ssd_space is not None:
            self.ssd_space.disk.synchronize()
        for chunk in self.chunks.values():
            chunk.pins = 0  # of leases that a pass left, which nobody ends
            self.free(chunk)
