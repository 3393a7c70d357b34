"""Random access, release, eviction and updates: after every step the books hold and no value is lost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from weakref import WeakSet

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from ebbtide.devices import CpuBackend
from ebbtide.errors import BudgetError
from ebbtide.kernels import cpu_kernels
from ebbtide.layout import build_layout
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.movement.executor import Executor
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.parameters.binding import ModelData, dense
from ebbtide.runtime.parameters.element_access import load_value, store_value
from ebbtide.runtime.parameters.places import specs_of
from ebbtide.runtime.updates.update_queue import UpdateQueue
from ebbtide.tracing.hooks import find_units

LAYERS = 6
BYTES = 2048 * 4


class Machine(RuleBasedStateMachine):
    @initialize(
        cut=st.sampled_from(["chunk", "page", "tensor"]),
        room=st.integers(2, 8),
        policy=st.sampled_from(["farthest-next-use", "lru", "list-order"]),
    )
    def build(self, cut: str, room: int, policy: str) -> None:
        self.module = nn.Sequential(*(nn.Linear(64, 32, bias=False) for _ in range(LAYERS)))
        parameters, runs, units = find_units(self.module, list(self.module.parameters()))
        names = [str(i) for i in range(LAYERS)]
        dtypes = [torch.float32] * LAYERS
        layout = build_layout(
            specs_of(names, parameters, dtypes), cut, {"chunk": 4096, "page": 3072, "tensor": None}[cut]
        )
        self.backend = CpuBackend(poison=True)
        largest = max(c.size for c in layout.chunks) * 4
        self.ledger = Ledger({"device": largest + room * BYTES, "host": 64 * BYTES})
        self.store = ChunkStore(layout, self.backend, self.ledger)
        self.queue = UpdateQueue(True, self.store)
        self.data = ModelData(names, parameters, runs, layout, self.store, "none", self.queue)
        cursor = PlanCursor(len(layout.chunks))
        room = Room(self.data, cursor, self.queue, policy, WeakSet())
        room.peers.add(room)
        places = FetchOnDemand(self.data, cursor, room)
        gradients = SimpleNamespace(reclaim=lambda members: None)
        self.executor = Executor(places, cursor, self.queue, gradients)  # type: ignore[arg-type]
        self.values = [float(i) for i in range(LAYERS)]
        self.units = [unit for _, unit in units]
        for chunk in layout.chunks:
            self.store.allocate(self.data.parameter_chunk(chunk.index), "host")
        for member in range(LAYERS):
            self.fill(member, self.values[member])
            self.data.release_original(member)
        self.active: list[int] = []

    def fill(self, member: int, value: float) -> None:
        full = torch.full((32, 64), value)
        store_value(self.data, member, dense(full), cpu_kernels(native=False))

    @rule(which=st.integers(0, LAYERS - 1))
    def enter(self, which: int) -> None:
        try:
            self.executor.enter(self.units[which])
        except BudgetError:
            pinned = {c for i in self.active for c in self.data.run_chunks[i]} | set(
                self.data.run_chunks[which]
            )
            needed = sum(self.data.parameter_chunk(c).nbytes for c in pinned)
            assert needed + self.ledger.level["device"] > self.ledger.budgets["device"], (
                "refused though it fits"
            )
            return
        self.active.append(which)

    @precondition(lambda self: getattr(self, "active", None))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(self.active))
        self.active.remove(which)
        self.executor.leave(self.units[which])

    @rule(which=st.integers(0, LAYERS - 1))
    def start_moves(self, which: int) -> None:
        """A prefetch or an early eviction that is left under way."""
        chunk = self.data.parameter_chunk(self.data.places[which].chunk)
        self.executor._start(chunk, not chunk.device_valid, 0)

    @rule(which=st.integers(0, LAYERS - 1), value=st.integers(10, 1000))
    def update(self, which: int, value: int) -> None:
        """An update where the chunk is not in use: on the host, the device copy becomes stale."""
        index = self.data.places[which].chunk
        chunk = self.data.parameter_chunk(index)
        if chunk.pins:
            return
        with self.executor.places.placed(chunk, "host"):
            for _, piece in chunk.slices("host", self.data.places[which].offset, 2048):
                piece.fill_(value)
            self.store.written(chunk, "host")
        self.executor.places.leave_stale(chunk)
        self.values[which] = float(value)

    @rule(which=st.integers(0, LAYERS - 1), value=st.integers(10, 1000), slow=st.booleans())
    def update_beside(self, which: int, value: int, slow: bool) -> None:
        """The same by a job on a thread: nobody sees the chunk before it is done."""
        index = self.data.places[which].chunk
        chunk = self.data.parameter_chunk(index)
        if chunk.pins:
            return
        waits = self.executor.places.toward_host(chunk)
        pieces = list(chunk.slices("host", self.data.places[which].offset, 2048))
        self.executor.places.put_away(chunk)

        def work() -> None:
            time.sleep(0.002 * slow)
            for _, piece in pieces:
                piece.fill_(value)

        def finish(done: bool) -> None:
            pieces.clear()
            self.store.settle(chunk)
            self.store.written(chunk, "host")
            self.executor.places.leave_stale(chunk)

        self.queue.submit([chunk], waits, work, finish)
        self.values[which] = float(value)

    @rule(which=st.integers(0, LAYERS - 1), value=st.integers(10, 1000))
    def write_on_device(self, which: int, value: int) -> None:
        if which in self.active:
            self.module[which].weight.data.fill_(value)
            self.store.written(self.data.parameter_chunk(self.data.places[which].chunk), "device")
            self.values[which] = float(value)

    @rule(level=st.integers(0, 8))
    def tide(self, level: int) -> None:
        wanted = min(level * BYTES, self.ledger.budgets["device"])
        try:
            self.executor.room.raise_level(wanted)
        except BudgetError:
            pinned = sum(c.nbytes for c in self.store.chunks.values() if c.pins)
            assert pinned + wanted > self.ledger.budgets["device"]

    @invariant()
    def books_hold(self) -> None:
        if not hasattr(self, "active"):
            return
        self.store.check_integrity()
        assert self.ledger.reserved["device"] + self.ledger.level["device"] <= self.ledger.budgets["device"]
        assert self.backend.held()["device"] == self.ledger.reserved["device"]
        assert self.backend.held()["host"] == self.ledger.reserved["host"]
        for which in self.active:
            assert torch.equal(self.module[which].weight, torch.full((32, 64), self.values[which]))

    def teardown(self) -> None:
        if not hasattr(self, "active"):
            return
        for which in self.active:
            self.executor.leave(self.units[which])
        for which in range(LAYERS):
            value = load_value(self.data, which, cpu_kernels(native=False))
            assert torch.equal(value, torch.full((32, 64), self.values[which]))
        self.queue.drop()
        self.backend.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
