"""Follows an iteration: makes chunks resident when they are accessed, and acts on the plan's triggers.

The plan is a hint. Each event is compared with the trace; while they agree, the plan's moves are triggered and
evictions use its next uses. Where they do not, access on demand goes on alone, and the iteration is traced
again next time. Note [who is in use]: forward pins chunks from a module's start to its end. In backward
there is no such end: an operator that asked for a weight holds a view of it, so a chunk stays in use
while its storage has more users than we gave it; the next event finds it released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch

from ebbtide.backend import Event
from ebbtide.errors import BudgetError
from ebbtide.intercept import Unit
from ebbtide.intercept.kept import Kept
from ebbtide.memory.chunk import SSD_READ, SSD_WRITE, TO_DEVICE, TO_HOST, Chunk
from ebbtide.plan.draft import Plan
from ebbtide.plan.evict import NEVER, Candidate, choose
from ebbtide.plan.residency import next_use
from ebbtide.plan.states import RunStates, State
from ebbtide.record import BACKWARD, FORWARD, GRADIENT, UPDATE, event
from ebbtide.run.activations import Activations
from ebbtide.run.jobs import Updater
from ebbtide.run.model import Handle, ModelData
from ebbtide.tracing.live import Recorder
from ebbtide.units import format_size

IDLE, RUNNING, REVERSING = "idle", "forward", "backward"


class Executor:
    """The interceptor's observer."""

    def __init__(self, data: ModelData, eviction: str, updater: Updater) -> None:
        self.data = data
        self.store = data.store
        self.ledger = data.store.ledger
        self.states = RunStates(data.run_names)
        self.lock = threading.RLock()
        self.plan: Plan | None = None
        self.recorder: Recorder | None = None
        self.phase = IDLE
        self.on_track = False
        self.diverged = ""
        self.position = -1
        self.peers: WeakSet[Executor] = WeakSet()
        """Executors that share the budget, this one included."""
        self.reclaim: Callable[[int], None] = lambda run: None
        """Called before a run is used: gradients may have taken its parameters' space."""
        self.activations: Activations | None = None
        """Those that leave the device between forward and backward, where that is asked for."""
        self.on_gradient: Callable[[int], None] = lambda parameter: None
        """Told of each gradient, after its moment has begun."""
        self.beside: Callable[[], None] = lambda: None
        """Called at every moment: what goes on beside the passes."""
        self.updater = updater
        self.guarded: set[Chunk] = set()
        """Chunks that somebody is about to use: they do not leave for another's sake."""
        self._wanted: list[tuple[Chunk, bool]] = []
        """Moves that the plan has for chunks that are being updated: (chunk, whether it comes)."""
        self._eviction = eviction
        self._last = [-1] * len(data.layout.chunks)
        self._clock = 0
        self._reversing: list[int] = []
        self._kept = 0

    # -- events ---------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        with self.lock:
            self._tick(event(FORWARD, unit.index))
            acquired: list[int] = []
            try:
                for run in unit.runs:
                    self._acquire(run, FORWARD)
                    acquired.append(run)
            except BaseException:
                for run in acquired:
                    self._release(run, State.HOLD_AFTER_FWD)
                raise

    def leave(self, unit: Unit) -> None:
        with self.lock:
            for run in unit.runs:
                self._release(run, self._after_forward())

    def read(self, run: int, outside: bool) -> None:
        with self.lock:
            if outside:
                # Nobody says when the reader is done: the value is right now, and the chunk may go later.
                self._acquire(run, FORWARD)
                self._release(run, self._after_forward())
                return
            self._tick(event(BACKWARD, run))
            self._acquire(run, FORWARD)

    def unread(self, run: int) -> None:
        with self.lock:
            self._release(run, self._after_forward())

    def pack(self, tensor: torch.Tensor) -> Handle | None:
        return self.data.locate(tensor)

    def keep(self, tensor: torch.Tensor) -> Kept | None:
        if self.activations is None or self.phase != RUNNING:
            return None
        with self.lock:
            kept = self.activations.keep(tensor)
            if self.activations.surprise and self.on_track:
                self.leave_track(self.activations.surprise)
            return kept

    def unpack(self, handle: Handle) -> torch.Tensor:
        with self.lock:
            if handle.run not in self._reversing:
                self._tick(event(BACKWARD, handle.run))
                self._acquire(handle.run, BACKWARD)
                self._reversing.append(handle.run)
            return self.data.rebuild(handle)

    def gradient(self, parameter: int) -> None:
        with self.lock:
            self._tick(event(GRADIENT, parameter))
            if self.recorder is not None:
                self.recorder.arrival(parameter)
            self.on_gradient(parameter)

    def updating(self, index: int) -> None:
        """The update of a chunk begins."""
        with self.lock:
            self._tick(event(UPDATE, index))

    # -- passes ---------------------------------------------------------------------------------------

    def begin(self, plan: Plan | None, recorder: Recorder | None, offset: int = 0) -> None:
        """A training pass starts, at `offset` moments into the plan's iteration."""
        if self.activations is not None:
            self.activations.begin(None if plan is None else plan.away, recorder)
        self.plan, self.recorder = plan, recorder
        self.phase = RUNNING
        self.position = offset - 1
        self.on_track = plan is not None
        self.diverged = ""
        if plan is None:
            self._kept = self.ledger.level["device"]

    def reverse(self) -> None:
        """Backward starts."""
        with self.lock:
            self.states.settle()
            self.phase = REVERSING

    def finish(self) -> None:
        """A pass is over, or was given up: nothing stays in use."""
        with self.lock:
            self._sweep(everything=True)
            self.states.settle()
            self.phase = IDLE
            if self.activations is not None:
                self.activations.finish()

    def _after_forward(self) -> State:
        return State.HOLD_AFTER_FWD if self.phase != IDLE else State.HOLD

    def _tick(self, what: int) -> None:
        """The next moment: release what backward has done with, then do what the plan has for it."""
        if self._reversing:
            self._sweep()
        self._catch_up()
        self._clock += 1
        if self.phase == IDLE and what % 4 != UPDATE:
            return
        self.position += 1
        self.states.moment = self.position
        if self.recorder is not None and what % 4 != UPDATE:
            self.recorder.moment(what)
        if self.activations is not None:
            self.activations.moment()
        if self.on_track:
            self._follow(what)

    def _catch_up(self) -> None:
        """Ends the updates that are over, and starts the moves that waited for them."""
        self.updater.collect()
        self.beside()
        if self._wanted:
            wanted, self._wanted = self._wanted, []
            for chunk, fetch in wanted:
                self._start(chunk, fetch, 0)

    def _follow(self, what: int) -> None:
        plan = self.plan
        assert plan is not None
        place = self.position
        moments = plan.record.moments
        length = len(moments)
        if what % 4 == UPDATE:
            place = length * plan.accumulate + what // 4
            expected = place < len(plan.levels)
            self.position = place
        else:
            expected = place < length * plan.accumulate and moments[place % length].event == what
        if not expected:
            self.leave_track(f"moment {place}: {self._name(what)} was not expected")
            return
        level, before = plan.levels[place] + self._late(place), self.ledger.level["device"]
        if level < before:
            self.ledger.set_level("device", level)
        for trigger in plan.triggers[place]:
            self._start(
                self.store.chunks.get(plan.items[trigger.item]), trigger.fetch, max(0, level - before)
            )
        if level > before:
            short = level - before > self.ledger.room("device")
            self.raise_level(plan.levels[place] + self._late(place, wait=short))
        if self.activations is not None and what % 4 != UPDATE:
            self.activations.arrive(place % length)

    def _late(self, place: int, wait: bool = False) -> int:
        """Bytes of activations that the plan has away and that are still here: their copies are waited for only where
        there is no room for that, or with `wait`."""
        plan, activations = self.plan, self.activations
        length = len(plan.record.moments) if plan is not None else 0
        if plan is None or activations is None or place >= length * plan.accumulate:
            return 0
        free = self.ledger.budgets["device"] - self.ledger.reserved["device"] - plan.levels[place]
        return activations.depart(place % length, -1 if wait else free)

    def raise_level(self, level: int, guess: bool = False) -> None:
        """Non-model data will take `level` bytes: chunks make room before they do. Where that is a guess, as far as
        they have somewhere to go."""
        try:
            self.make_room(level - self.ledger.level["device"], rising=True)
        except BudgetError:
            if not guess:
                raise
            level = max(0, self.ledger.budgets["device"] - self.ledger.reserved["device"])
        self.ledger.set_level("device", level, guess)
        self.store.backend.trim(self.ledger.room("device") + self.ledger.room("host"))

    def _start(self, chunk: Chunk | None, fetch: bool, rise: int) -> None:
        """One of the plan's moves: a hint, left undone where the state of things is another."""
        if chunk is None:
            return
        if chunk.work is not None or self._loading(chunk):
            self._wanted.append((chunk, fetch))
        elif chunk.move is not None:
            return
        elif fetch:
            self._start_fetch(chunk, rise)
        elif chunk.device_valid and not self.store.in_use(chunk):
            self._evict(chunk)

    def _loading(self, chunk: Chunk) -> bool:
        """Whether the chunk is on its way from SSD to the host; a load that is over is ended."""
        if chunk.move is None or chunk.move[0] != SSD_READ or self.store.near == "device":
            return False
        if chunk.arrived:
            self.store.settle(chunk)
        return chunk.move is not None

    def _start_fetch(self, chunk: Chunk, rise: int) -> None:
        if chunk.device_valid:
            return
        if chunk.host_valid or (chunk.ssd_valid and self.store.near == "device"):
            if self._has_room(chunk.nbytes + rise):
                self.store.fetch(chunk)
            elif self._leaving():
                self._wanted.append((chunk, True))  # for what it waits for
        elif chunk.ssd_valid and self.ledger.room("host") >= self.store.room_needed(chunk, "host"):
            self.store.load(chunk)
            self._wanted.append((chunk, True))

    def _has_room(self, needed: int) -> bool:
        """Whether there is room, once what has left is counted; nobody waits."""
        if self.ledger.room("device") >= needed or self._hurry(needed):
            return True
        for chunk in self._leaving():
            if not chunk.arrived:
                break
            self.store.end_move(chunk)
            if self.ledger.room("device") >= needed:
                return True
        return False

    def _leaving(self) -> list[Chunk]:
        return self.store.moving(SSD_WRITE if self.store.near == "device" else TO_HOST)

    def leave_track(self, why: str) -> None:
        """Execution is not what was traced: go on by demand, with room for the highest tide."""
        self.on_track = False
        self.diverged = why
        if self.activations is not None:
            self.activations.leave_plan()
        if self.plan is not None:
            self.raise_level(max(self.plan.levels, default=0))

    def _name(self, what: int) -> str:
        subject = what // 4
        if what % 4 == BACKWARD:
            return f"backward of {self.data.run_names[subject]}"
        if what % 4 == GRADIENT:
            return f"gradient of {self.data.names[subject]}"
        return f"{('forward of unit', '', '', 'update of chunk')[what % 4]} {subject}"

    # -- access and release ---------------------------------------------------------------------------

    def _acquire(self, run: int, phase: int) -> None:
        self.reclaim(run)
        if self.states.access(run):
            if self.recorder is not None:
                self.recorder.begin(run, phase)
            done: list[Chunk] = []
            try:
                for index in self.data.run_chunks[run]:
                    chunk = self.data.parameter_chunk(index)
                    self.hold(chunk)
                    done.append(chunk)
            except BaseException:
                for chunk in done:
                    chunk.pins -= 1
                self.states.release(run, State.HOLD)
                raise

    def _release(self, run: int, target: State) -> None:
        if self.states.release(run, target):
            if self.recorder is not None:
                self.recorder.end(run)
            for index in self.data.run_chunks[run]:
                self.data.parameter_chunk(index).pins -= 1

    def _sweep(self, everything: bool = False) -> None:
        """Releases the runs whose weights no backward operator looks at any more."""
        still: list[int] = []
        for run in self._reversing:
            chunks = [self.data.parameter_chunk(i) for i in self.data.run_chunks[run]]
            if not everything and any(self._seen(chunk) for chunk in chunks):
                still.append(run)
            else:
                self._release(run, State.HOLD_AFTER_BWD)
        self._reversing = still

    def _seen(self, chunk: Chunk) -> bool:
        return chunk.device is not None and self.store.backend.aliases(chunk.device) > chunk.aliases

    def hold(self, chunk: Chunk) -> None:
        """Pins a chunk on the device, bringing it there first. Undo by taking one pin off."""
        self.bring(chunk)
        chunk.pins += 1

    def bring(self, chunk: Chunk) -> None:
        """Makes the chunk's device copy valid and, for parameters, bound."""
        if torch.is_inference_mode_enabled():
            # What is made in inference mode could never be trained again.
            with torch.inference_mode(False):
                self.bring(chunk)
            return
        if chunk.move is not None or chunk.work is not None:
            self.store.turn_back(chunk)
        if not chunk.device_valid:
            self._load(chunk)
            self.make_room(self.store.room_needed(chunk, "device"))
            self.store.fetch(chunk)
            self.store.settle(chunk)
        if chunk.kind == "param":
            self._last[chunk.index] = self._clock
            if not self.data.bound[chunk.index]:
                self.data.bind(chunk.index)

    def _load(self, chunk: Chunk) -> None:
        """What is on SSD only comes to the host, where there is one."""
        if self.store.near == "host" and chunk.ssd_valid and not chunk.host_valid:
            self.make_host_room(self.store.room_needed(chunk, "host"))
            self.store.load(chunk)
            self.store.settle(chunk)

    @contextmanager
    def placed(self, chunk: Chunk, tier: str) -> Iterator[None]:
        """Makes a chunk's copy on `tier` valid, quiet on the host, and keeps it there meanwhile."""
        if tier == "device":
            self.hold(chunk)
            try:
                yield
            finally:
                chunk.pins -= 1
        else:
            self.toward_host(chunk)
            self.store.settle(chunk, host=True)
            yield

    @contextmanager
    def together(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """None of the chunks makes room for another meanwhile."""
        before, self.guarded = self.guarded, {*self.guarded, *chunks}
        try:
            yield
        finally:
            self.guarded = before

    def toward_host(self, chunk: Chunk) -> list[Event]:
        """Starts making the chunk's host copy valid: what must be over before the host itself touches it."""
        if chunk.kind == "param":
            self.data.notice_writes(chunk.index)
        if chunk.work is not None or (chunk.move is not None and chunk.move[0] in (TO_DEVICE, SSD_WRITE)):
            self.store.turn_back(chunk)
        if not chunk.host_valid and chunk.move is None:
            if chunk.device_valid:
                self._evict(chunk)
            if chunk.move is None:  # SSD has it, so nothing was moved
                self.make_host_room(self.store.room_needed(chunk, "host"))
                self.store.load(chunk)
        return chunk.move[1] if chunk.move is not None else chunk.pending

    def put_away(self, chunk: Chunk) -> None:
        """A parameter is about to be updated beside the computation: nobody is to see it meanwhile, and where the host
        updates it, its device copy goes. Not where it is pinned: then its user waits."""
        if chunk.device is None or chunk.pins:
            return
        if self.store.near == "device":
            self.data.unbind(chunk.index)
        elif chunk.move is None:
            self.data.unbind(chunk.index)
            self.store.drop(chunk, "device")

    def leave_stale(self, chunk: Chunk) -> None:
        """A parameter was updated on the host: its device copy goes, or is filled again where it is pinned."""
        if chunk.device is None:
            return
        if chunk.pins:
            self.store.fetch(chunk)
            self.store.settle(chunk)
            return
        self.data.unbind(chunk.index)
        self.store.drop(chunk, "device")

    def allocate(self, chunk: Chunk, tier: str) -> None:
        """First payload of an optimizer-state chunk: zeros."""
        self.make_room_on(tier, chunk)
        self.store.allocate(chunk, tier, zero=True)

    def go_home(self, chunk: Chunk, tier: str) -> None:
        """Moves an optimizer-state chunk to where the plan wants it."""
        if chunk.free or chunk.valid_on(tier):
            return
        near = self.store.near
        if tier == "ssd":
            if not chunk.valid_on(near):
                self.go_home(chunk, near)
            self.store.save(chunk)
        elif chunk.ssd_valid and tier != near:
            self.go_home(chunk, near)
            self.go_home(chunk, tier)
        elif chunk.ssd_valid:
            self.make_room_on(tier, chunk)
            self.store.load(chunk)
            self.store.settle(chunk)
            self.store.drop(chunk, "ssd")
        elif tier == "device":
            self.make_room_on(tier, chunk)
            self.store.fetch(chunk)
            self.store.settle(chunk)
            self.store.drop(chunk, "host")
        else:
            self.make_room_on("host", chunk)
            self.store.evict(chunk)
        self.store.settle(chunk)

    def make_room_on(self, tier: str, chunk: Chunk) -> None:
        needed = self.store.room_needed(chunk, tier)
        if tier == "device":
            self.make_room(needed)
        else:
            self.make_host_room(needed)

    # -- room -----------------------------------------------------------------------------------------

    def make_room(self, needed: int, rising: bool = False) -> None:
        """Frees device memory until `needed` bytes fit beside the level, or raises with what is in the way."""
        if needed <= self.ledger.room("device") or (not rising and self._hurry(needed)):
            return
        others = [peer for peer in self.peers if peer is not self]
        for attempt in ("leaving", "evict", "updates", "arriving", "evict"):
            for peer in (*others, self):
                short = needed - self.ledger.room("device")
                if short <= 0:
                    return
                peer.give(attempt, short)
        short = needed - self.ledger.room("device")
        if short <= 0:
            return
        if (
            self.plan is None
            and not rising
            and self.ledger.budgets["device"] - self.ledger.reserved["device"] >= needed
        ):
            # Without a plan the level is a share, not a prediction: what is in use goes before it.
            self.ledger.set_level(
                "device", self.ledger.budgets["device"] - self.ledger.reserved["device"] - needed, guess=True
            )
            return
        held = sum(c.nbytes for p in self.peers for c in p.store.chunks.values() if c.device is not None)
        raise BudgetError(
            f"device: {format_size(needed)} are needed{self._when()}, with {format_size(held)} of chunks in "
            f"use and {format_size(self.ledger.level['device'])} of non-model data in a budget of "
            f"{format_size(self.ledger.budgets['device'])}: short by {format_size(short)}",
            tier="device",
            short=short,
            advice=f"raise device.memory by {short} bytes, or use a smaller batch, sequence or chunk_size",
        )

    def _hurry(self, needed: int) -> bool:
        """Waits for activations that are late in leaving; whether that is enough."""
        before = self.activations.late if self.activations is not None else 0
        if not before:
            return False
        level = self.ledger.level["device"] - before + self._late(self.position, wait=True)
        self.ledger.set_level("device", level)
        return needed <= self.ledger.room("device")

    def make_host_room(self, needed: int) -> None:
        """Frees host memory where there is SSD: copies of parameters that are elsewhere, then parameters themselves,
        those of the farthest next use first. What is short after that, the reservation will say."""
        if needed <= self.ledger.room("host"):
            return
        self.updater.collect()
        for attempt in ("spare", "updates", "spill"):
            for chunk in sorted(self._host_copies(), key=self._distance, reverse=True):
                if needed <= self.ledger.room("host"):
                    return
                if chunk.ssd_valid or chunk.device_valid:
                    self.store.drop(chunk, "host")
                elif attempt == "spill" and self.store.ssd_space is not None:
                    self.store.save(chunk)
                    self.store.settle(chunk)
            while attempt == "updates" and needed > self.ledger.room("host"):
                if not self.updater.settle_oldest():
                    break

    def _host_copies(self) -> list[Chunk]:
        """Of parameters, and left alone."""
        return [
            c
            for c in self.store.chunks.values()
            if c.kind == "param"
            and c.host is not None
            and c.move is None
            and c.work is None
            and c not in self.guarded
        ]

    def _when(self) -> str:
        return f" at moment {self.position} of the {self.phase} pass" if self.phase != IDLE else ""

    def give(self, attempt: str, short: int) -> None:
        """Gives up device memory until `short` bytes more are free: by ending evictions under way, by evicting, by
        ending updates, or by ending fetches so that those can be evicted, too."""
        target = self.ledger.room("device") + short
        if attempt == "evict":
            for chunk in self.victims(short):
                self._evict(chunk)
                self.store.settle(chunk)
            return
        if attempt == "updates":
            while self.ledger.room("device") < target and self.updater.settle_oldest():
                continue
            return
        for link in (TO_HOST, SSD_WRITE) if attempt == "leaving" else (TO_DEVICE, SSD_READ):
            for chunk in self.store.moving(link):
                if attempt == "leaving" and self.ledger.room("device") >= target:
                    return
                self.store.end_move(chunk)

    def victims(self, short: int) -> list[Chunk]:
        """The chunks that should leave so that `short` bytes become free."""
        chunks = [
            c
            for c in self.store.chunks.values()
            if c.kind in ("param", "grad")
            and c.device is not None
            and c.move is None
            and c not in self.guarded
            and not self.store.in_use(c)
        ]
        candidates = []
        for key, chunk in enumerate(chunks):
            dirty = chunk.device_valid and not chunk.host_valid
            last = self._last[chunk.index]
            candidates.append(Candidate(key, chunk.nbytes, self._distance(chunk), last, dirty))
        return [chunks[c.key] for c in choose(self._eviction, candidates, short)]

    def stays(self, kind: str, index: int) -> bool:
        """Whether the plan that is followed never evicts a chunk."""
        return self.on_track and self.plan is not None and (kind, index) not in self.plan.evicted

    def done_with(self, chunk: Chunk) -> bool:
        """Whether, as far as is planned, this pass has no more use for a chunk that is not in use now."""
        if self.plan is None or not self.on_track:
            return False
        length = len(self.plan.record.moments)
        end = (max(self.position, 0) // length + 1) * length
        firsts = self.plan.firsts[chunk.kind, chunk.index]
        return next_use(firsts, self.position, NEVER) + self.position >= end

    def _distance(self, chunk: Chunk) -> int:
        if self.plan is None:
            return self._clock - self._last[chunk.index] if chunk.kind == "param" else NEVER
        firsts = self.plan.firsts[chunk.kind, chunk.index]
        return next_use(firsts, max(self.position, 0), len(self.plan.levels))

    def _evict(self, chunk: Chunk) -> None:
        if chunk.kind == "param":
            self.data.notice_writes(chunk.index)
            self.data.unbind(chunk.index)
        if not chunk.device_valid and chunk.move is None:
            self.store.drop(chunk, "device")
            return
        if self.store.near == "host" and not chunk.host_valid and not chunk.ssd_valid:
            self.make_host_room(self.store.room_needed(chunk, "host"))
        self.store.evict(chunk)
