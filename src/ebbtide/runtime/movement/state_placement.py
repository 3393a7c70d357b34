"""Where optimizer state lives: at first, before there is a plan, and as plans want it; and the buffers that state on
SSD passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ebbtide.devices.device import when_gone
from ebbtide.errors import BudgetError
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.memory.state_stream import StateStream
from ebbtide.planner.host_side import beside_updates, streamed_state
from ebbtide.planner.plans import Plan
from ebbtide.planner.shape import GRAD, PARAM, ModelShape, Settings
from ebbtide.planner.sizes import SLOTS, slot_bytes, stored_bytes
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import IDLE, PlanCursor
from ebbtide.runtime.movement.protocols import PendingUpdates
from ebbtide.runtime.parameters.binding import ModelData

TAG = "staging"


class StateStreaming:
    def __init__(self, store: ChunkStore, background: bool) -> None:
        """`background`: pieces are read ahead, and written while the next ones are updated."""
        self._store, self._background = store, background
        self._staged = _Staged(store)
        when_gone(self, self._staged.give_back)
        self.kept: dict[int, int] = {}
        """By chunk, how many of its pieces stay in RAM."""

    def open(self, chunks: Sequence[int], room: Room, kept: Mapping[int, int]) -> None:
        """Buffers for these chunks' state, and what SSD has of it. `kept`: by chunk, how many pieces stay in RAM."""
        store = self._store
        if not chunks:
            return
        assert store.ssd_space is not None
        piece = store.ssd_space.piece
        states = {i: sum(state.nbytes for state in self._store.state_chunks(i)) for i in chunks}
        sizes = {i: slot_bytes([states[i]], piece) for i in kept}
        size = slot_bytes(states.values(), piece)
        needed = SLOTS * size + sum(count * sizes[i] for i, count in kept.items())
        room.make(store.near, needed)
        store.ledger.reserve(store.near, TAG, needed)
        self._staged.reserved = needed
        try:
            for index in chunks:
                for state in self._store.state_chunks(index):
                    store.reserve_ssd(state)
            slots = self._staged.take(size, SLOTS)
            own = {i: self._staged.take(sizes[i], count) for i, count in kept.items()}
        except BaseException:
            self.close()
            raise
        self.kept = dict(kept)
        store.state_stream = StateStream(store.ssd_space, slots, store.traffic, self._background, own)
        for index in chunks:
            store.written_on_ssd(index)

    def expect(self, order: Callable[[], list[int]]) -> None:
        """`order`: chunks whose state streams, as their updates follow each other."""
        if self._store.state_stream is not None:
            self._store.state_stream.expect(order())

    def put_back(self) -> None:
        """Gives the buffers back, and what only they have to SSD."""
        if self._store.state_stream is not None:
            self._store.state_stream.settle()
        self.close()

    def close(self) -> None:
        """Waits for what is under way, and gives the buffers back, whatever they hold."""
        if self._store.state_stream is not None:
            self._store.state_stream.close()
        self.kept = {}
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
        store.state_stream = None
        reserved, self.reserved = self.reserved, 0
        store.ledger.release(store.near, TAG, reserved)


FIRST_BATCH = 20
"""One of so many parts of a device with SSD beside it is kept free for the first batch; before its operators run there
is a plan."""

PHASES = (
    ("host", "ssd"),
    ("device", "ssd"),
    ("device", "host"),
    ("host", "device"),
    ("ssd", "device"),
    ("ssd", "host"),
    ("ssd", "ssd"),
    ("device", "device"),
    ("host", "host"),
)
"""In which order state changes its home: what goes between the device and SSD passes through the host, which is emptiest
in the middle. Last what is only looked after."""


class StatePlacement:
    def __init__(
        self,
        data: ModelData,
        cursor: PlanCursor,
        places: FetchOnDemand,
        updates: PendingUpdates,
        streaming: StateStreaming,
        settings: Settings,
        warmup_share: float,
    ) -> None:
        self._data, self._store, self._ledger = data, data.store, data.store.ledger
        self._cursor, self._room, self._places = cursor, places.room, places
        self._updates, self._streaming = updates, streaming
        self._settings, self._warmup_share = settings, warmup_share
        self._settled = True
        """Whether state is where `store.state_homes` says, and streams accordingly."""

    def at(self, tier: str) -> list[int]:
        return [index for index, home in enumerate(self._store.state_homes) if home == tier]

    # -- before there is a plan -----------------------------------------------------------------------

    def first(self, shape: ModelShape, index: int) -> str:
        """The home of the next chunk: the host where it has room for all of the chunk's bytes, else SSD, else the
        device. Where there is SSD and no host, the device keeps half of its budget for what is not known yet."""
        room = self._room
        budgets = {tier: room.budget(tier) for tier in self._ledger.budgets}
        page = 2 * self._data.layout.unit * 4 if self._data.layout.cut == "page" else 0
        every = range(shape.chunks)
        buffers = beside_updates(shape, every, self._settings, every if budgets["ssd"] else ())
        if not budgets["ssd"]:
            kinds = (shape.parameter_bytes, shape.gradient_bytes, shape.state_bytes)
            held = buffers + sum(count[i] for i in self.at("host") for count in kinds)
            fits = held + sum(count[index] for count in kinds) + page <= budgets["host"]
            return "host" if fits else "device"
        near = self._store.near
        held = sum(shape.parameter_bytes) + buffers + page
        held += sum(shape.gradient_bytes[i] + shape.state_bytes[i] for i in (*self.at(near), index))
        held += 2 * max(shape.parameter_bytes) if self._store.has_host else 0
        if held <= (budgets[near] if self._store.has_host else budgets[near] // 2):
            return near
        stored = [stored_bytes(shape.state_bytes[i], shape.piece) for i in (*self.at("ssd"), index)]
        return "ssd" if sum(stored) <= budgets["ssd"] else "device"

    def streamed(self, shape: ModelShape) -> int:
        """Bytes of optimizer state that stream from and to SSD."""
        return sum(streamed_state(shape, i, self._streaming.kept) for i in self.at("ssd"))

    def first_level(self, shape: ModelShape) -> int:
        """Without a trace: all but the warm-up share is left to non-model data, where chunks can leave."""
        budgets = self._ledger.budgets
        if self._ledger.device_alone:
            return 0
        states = self._ledger.tags["device"].get("staging", 0) + sum(
            chunk.nbytes for index in self.at("device") for chunk in self._store.state_chunks(index)
        )
        room = int(budgets["device"] * self._warmup_share)
        largest = 2 * shape.largest
        return max(0, budgets["device"] - max(room, states + largest))

    def level_before_batch(self, shape: ModelShape) -> int:
        """What is kept free until the first batch is here."""
        level = self.first_level(shape)
        return level if self._store.has_host else min(level, self._ledger.budgets["device"] // FIRST_BATCH)

    def give_place(self, master: Chunk, home: str) -> None:
        """For a master whose values are about to be written."""
        if home == "ssd":
            self._store.reserve_ssd(master, valid=True)
        else:
            self._places.allocate(master, home)

    # -- streaming ------------------------------------------------------------------------------------

    def stream(self, chunks: Sequence[int], kept: Mapping[int, int]) -> None:
        """State of these chunks streams from and to SSD, but for the first pieces of some."""
        on_ssd = [index for index in chunks if self._store.state_chunks(index)]
        self._streaming.open(on_ssd, self._room, kept)

    def restream(self) -> None:
        """Other chunks than so far have state on SSD, or other state."""
        self._settled = False
        self._streaming.put_back()
        self.stream(self.at("ssd"), {})
        self._settled = True

    def settle(self) -> None:
        """State is where the books have it, though a plan could not be followed to its end."""
        if self._settled:
            return
        self._updates.flush()
        self._streaming.put_back()
        self._move_all(dict(enumerate(self._store.state_homes)), strict=True)
        self.restream()

    # -- plans ----------------------------------------------------------------------------------------

    def as_in(self, plan: Plan) -> bool:
        found = self._store.state_homes == list(plan.homes) and self._streaming.kept == plan.host.kept
        return self._settled and found

    def follow(self, plan: Plan) -> None:
        """Brings optimizer state to the plan's homes."""
        room, homes = self._room, self._store.state_homes
        to = {i: home for i, home in enumerate(plan.homes) if home != homes[i] or not self._settled}
        restaged = any("ssd" in (homes[index], home) for index, home in to.items())
        restaged |= not self._settled or self._streaming.kept != plan.host.kept
        if to or restaged:
            self._updates.halt()
        self._updates.flush()
        self._cursor.plan = None
        if room.activations is not None:
            room.activations.foresee(plan.away)
        self._settled = False  # until all of it is done: whatever ends this early
        if restaged:
            self._streaming.put_back()
        leaving = {i: home for i, home in to.items() if home != "device" and homes[i] != "ssd"}
        stuck = self._move_all(leaving)
        left = stuck | {i: home for i, home in to.items() if i not in leaving}
        if stuck:
            left = self._move_all(left)  # it waits for the place of what comes from there
        room.raise_level(max(plan.levels, default=0))
        try:
            self._arrive(plan, left, restaged)
        except BudgetError:
            self._spare_copies(lambda: False)
            self._arrive(plan, left, restaged)
        self._settled = True

    def _arrive(self, plan: Plan, left: Mapping[int, str], restaged: bool) -> None:
        self._move_all(left, strict=True)
        if restaged:
            self.stream([i for i, home in enumerate(plan.homes) if home == "ssd"], plan.host.kept)

    def _move_all(self, to: Mapping[int, str], strict: bool = False) -> dict[int, str]:
        """Moves the state of these chunks, in an order in which room is made before it is taken. What does not fit is
        tried again when others have gone, and is returned; with `strict` that is an error."""
        left = dict(
            sorted(to.items(), key=lambda pair: PHASES.index((self._store.state_homes[pair[0]], pair[1])))
        )
        while left:
            refused: dict[int, str] = {}
            for index, home in left.items():
                try:
                    self._move(index, home)
                except BudgetError:
                    if strict and len(refused) == len(left) - 1:
                        raise
                    refused[index] = home
            if len(refused) == len(left):
                break
            left = refused
        return left

    def give_up(self, needed: int) -> int:
        """State leaves the device for the host until so many bytes have, or all that the host has room for beside
        parameters and gradients: how many did."""
        if needed <= 0 or not self._ledger.budgets["host"] or not self.at("device"):
            return 0
        if self._updates.ahead_of_passes and self._cursor.phase != IDLE:
            return 0  # between a chunk's forward and its backward nothing changes
        self._updates.halt()
        before = self._on_device()
        settled, self._settled = self._settled, False
        for index in reversed(self.at("device")):
            state = sum(chunk.nbytes for chunk in self._store.state_chunks(index))
            if before - self._on_device() >= needed or state + self._to_come() > self._ledger.room("host"):
                break
            if self._move_all({index: "host"}):  # it did not fit, or not as a whole
                settled = not self._move_all({index: "device"}) and settled
        self._settled = settled
        return before - self._on_device()

    def make_way(self, short: int) -> None:
        """State leaves until what it holds is room that something else can do without. `short`: bytes that the device is
        too small by for that, no state counted; negative where it is larger."""
        self.give_up(self._on_device() + short)

    def _to_come(self) -> int:
        """Bytes that the pass under way may yet bring to the host."""
        chunks = (c for c in self._store.chunks.values() if c.kind in (PARAM, GRAD) and c.host is None)
        return sum(chunk.nbytes for chunk in chunks)

    def _on_device(self) -> int:
        """Bytes of state that are there, as far as a move came."""
        chunks = [c for index in range(len(self._store.state_homes)) for c in self._store.state_chunks(index)]
        return sum(chunk.nbytes for chunk in chunks if chunk.device is not None)

    def tidy(self, plan: Plan) -> None:
        """Copies on SSD that this plan will not need again give their places back."""
        for key, chunk in self._store.chunks.items():
            wanted = key in plan.evicted or chunk.index in plan.host.ssd_parameters
            if chunk.kind in (PARAM, GRAD) and not wanted:
                self._store.vacate(chunk)

    def _move(self, index: int, home: str) -> None:
        for chunk in self._store.state_chunks(index):
            self._places.go_home(chunk, home)
        self._store.state_homes[index] = home

    def spare_host(self, needed: int) -> None:
        """Parameters whose state lives on the device give up their copies on the host where that is wanted."""
        self._room.make("host", needed)
        self._spare_copies(lambda: self._ledger.room("host") >= needed)

    def _spare_copies(self, enough: Callable[[], bool]) -> None:
        store, ledger = self._store, self._ledger
        for index in self.at("device"):
            chunk = self._data.parameter_chunk(index)
            if enough():
                return
            if chunk.host is None or chunk.work is not None:
                continue
            if not chunk.device_valid and ledger.room("device") >= store.room_needed(chunk, "device"):
                self._places.bring(chunk)
            if chunk.device_valid and chunk.move is None:
                store.drop(chunk, "host")
