"""Room on the device and on the host: who leaves so that somebody else fits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakSet

from ebbtide.errors import BudgetError
from ebbtide.memory.budget import AVERAGE, SNAPSHOT
from ebbtide.memory.chunk import PASSING, Chunk
from ebbtide.memory.links import SSD_READ, SSD_WRITE, TO_DEVICE, TO_HOST, WIRE
from ebbtide.planner.eviction_choice import Candidate, choose
from ebbtide.planner.shape import GRAD, PARAM, WHOLE, may_leave
from ebbtide.runtime.movement.claims import Claims
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.movement.protocols import GivesRoom, LeavingActivations, PendingUpdates
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.units import format_size

HOSTED, EXCHANGE = "host modules", "exchange"
"""Tags of what is reserved for good."""
STATE = "state"


class Room:
    def __init__(
        self,
        data: ModelData,
        cursor: PlanCursor,
        updates: PendingUpdates,
        eviction: str,
        peers: WeakSet[Room],
    ) -> None:
        """`peers`: those of all engines that share the budgets, this one included once it is."""
        self.data, self.store, self.ledger = data, data.store, data.store.ledger
        self.peers = peers
        self.activations: LeavingActivations | None = None
        """Those that leave the device between forward and backward, where that is asked for."""
        self._givers: dict[str, weakref.ref[GivesRoom]] = {}
        self.claims = Claims(self.ledger, cursor)
        self.cursor, self._updates, self._eviction = cursor, updates, eviction
        self._leaving = may_leave(self.ledger.device_alone)
        self._guarded: set[Chunk] = set()
        """Chunks that somebody is about to use: they do not leave for another's sake."""

    def add_giver(self, what: str, giver: GivesRoom) -> None:
        """Who gives room that no plan counts with (EXCHANGE, SNAPSHOT), or optimizer state to other engines (STATE)."""
        self._givers[what] = weakref.ref(giver)

    def _give(self, what: str, short: int = 0) -> bool:
        known = self._givers.get(what)
        giver = None if known is None else known()
        return giver is not None and giver.give_room(short)

    def end_exchange(self) -> bool:
        """Ends an exchange of gradients between ranks, which keeps a whole chunk here; whether there was one."""
        return self._give(EXCHANGE)

    def budget(self, tier: str) -> int:
        """What other engines on the same tier leave of the budget."""
        taken = sum(peer.keeps(tier) for peer in self.peers if peer is not self)
        tags = self.ledger.tags[tier]
        beside = sum(tags.get(tag, 0) for tag in (HOSTED, EXCHANGE, AVERAGE))
        return max(0, self.ledger.budgets[tier] - beside - taken)

    def keeps(self, tier: str) -> int:
        """Bytes that no other engine's pass can have: optimizer state, though a plan's may only come with the first
        update, and where the host is the last tier what leaves the device for that pass."""
        last = tier == "host" and self.ledger.budgets["host"] > 0 and not self.ledger.budgets["ssd"]
        return sum(
            c.nbytes
            for c in self.store.chunks.values()
            if (last and (c.kind == PARAM or (c.kind == GRAD and not c.free)))
            or (c.kind not in PASSING and (getattr(c, tier) is not None or self._expects(c, tier)))
        )

    def _expects(self, chunk: Chunk, tier: str) -> bool:
        return chunk.free and self.cursor.plan is not None and self.store.state_homes[chunk.index] == tier

    @contextmanager
    def together(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """None of the chunks makes room for another meanwhile."""
        before, self._guarded = self._guarded, {*self._guarded, *chunks}
        try:
            yield
        finally:
            self._guarded = before

    def make(self, tier: str, needed: int) -> None:
        """Frees memory of the device or the host until `needed` bytes fit."""
        if tier == "device":
            self._make_on_device(needed)
        else:
            self._make_on_host(needed)

    def make_for(self, chunk: Chunk, tier: str) -> None:
        """Room for a copy of the chunk. What leaves for it may have a page in common with it, which is needed then."""
        needed = -1
        while (now := self.store.room_needed(chunk, tier)) > needed:
            needed = now
            self.make(tier, needed)

    # -- non-model data -------------------------------------------------------------------------------

    def begin_turn(self, evaluates: bool = False) -> None:
        """This engine goes on, maybe after another one. Chunks make room for what a pass under way has left here."""
        claims = self.claims
        if not claims.begin_turn((peer.claims for peer in self.peers), evaluates):
            return
        try:
            if claims.while_waiting is not None:
                needed = claims.level + claims.outputs + claims.elsewhere() - self.ledger.level["device"]
                self._make_on_device(max(0, needed), rising=True, guess=claims.of_pass.guess)
        finally:
            claims.set_level(claims.level, claims.of_pass.guess)

    def end_turn(self) -> None:
        """An evaluation is over that another engine waited for: what that one computes next has its room, as far as
        chunks have somewhere to go."""
        self.claims.end_turn()
        for room in self.peers:
            if room is not self and room.claims.waits:
                with suppress(BudgetError):
                    room.begin_turn()

    def hold(self, count: int, guess: bool = False) -> None:
        """So many bytes of outputs are held from now on. A guess gets as much as chunks can make room for."""
        claims = self.claims
        try:
            self._make_on_device(count - claims.outputs, rising=True, guess=guess)
        except BudgetError:
            if not guess:
                raise
            count = max(0, claims.most() + claims.outputs - claims.level)
        claims.set_outputs(count)

    def raise_level(self, level: int, guess: bool = False) -> None:
        """Non-model data will take `level` bytes: chunks make room before they do. Where that is a guess, as far as
        they have somewhere to go."""
        try:
            self._make_on_device(level - self.claims.level, rising=True, guess=guess)
        except BudgetError:
            if not guess:
                raise
            level = self.claims.most()
        self.claims.set_level(level, guess)
        self.store.backend.trim(self.ledger.room("device") + self.ledger.room("host"))

    def end_pass(self) -> None:
        """One is over. Where it was no planned one, the highest tide it may have had is no longer there."""
        if self.cursor.plan is not None and not self.cursor.on_track:
            self.claims.set_level(self.claims.level, guess=True)

    def go_back(self, level: int, guess: bool) -> None:
        """To the level before a guess. Chunks that the guess made room for leave."""
        if level - self.claims.level > self.ledger.room("device"):
            self.raise_level(level, guess=True)
        if level <= self.claims.most():
            self.claims.set_level(level, guess)

    def spare(self) -> int:
        """Bytes next to SSD that nothing needs for the rest of the iteration: neither what is computed then, nor chunks
        that come back for it."""
        plan = self.cursor.plan
        if plan is None or not self.cursor.on_track:
            return 0
        if self.store.has_host:
            return self.ledger.room("host")
        place = max(self.cursor.position, 0)
        return self.claims.most() - (plan.growth[place] if place < len(plan.growth) else 0)

    def always(self, needed: int) -> bool:
        """Whether the device has so much beside what any moment of the plan uses, once everything else has left."""
        plan = self.cursor.plan
        if plan is None or not self.cursor.on_track:
            return False
        return needed <= self.budget("device") - self.claims.outputs - plan.static_bytes - plan.in_use

    def late(self, place: int, wait: bool = False) -> int:
        """Bytes of activations that the plan has away at a moment and that are still here: their copies are waited for
        only where there is no room for that, or with `wait`."""
        plan = self.cursor.plan
        length = len(plan.record.moments) if plan is not None else 0
        if plan is None or self.activations is None or place >= length * plan.accumulate:
            return 0
        free = (
            self.ledger.budgets["device"]
            - self.ledger.reserved["device"]
            - plan.levels[place]
            - self.claims.outputs
        )
        return self.activations.depart(place % length, -1 if wait else free)

    def _hurry(self, needed: int) -> bool:
        """Waits for activations that are late in leaving; whether that is enough."""
        before = self.activations.late if self.activations is not None else 0
        if not before:
            return False
        self.claims.set_level(self.claims.level - before + self.late(self.cursor.position, wait=True))
        return needed <= self.ledger.room("device")

    # -- the device -----------------------------------------------------------------------------------

    def ready(self, needed: int) -> bool:
        """Whether the device has room, once what has left is counted; nobody waits for a chunk."""
        if self.ledger.room("device") >= needed or self._hurry(needed):
            return True
        if self.end_exchange() and self.ledger.room("device") >= needed:
            return True
        return self.left(needed)

    def left(self, needed: int, sparing: Sequence[Chunk] = ()) -> bool:
        """Whether the device has room, once what has left is counted, but for those that are to stay; nobody is
        hurried."""
        for chunk in self.leaving():
            if chunk in sparing:
                continue
            if self.ledger.room("device") >= needed or not chunk.arrived:
                break
            self.store.end_move(chunk)
        return needed <= self.ledger.room("device")

    def leaving(self) -> list[Chunk]:
        """Chunks on their way off the device."""
        return self.store.moving(TO_HOST if self.store.has_host else SSD_WRITE)

    def _make_on_device(self, needed: int, rising: bool = False, guess: bool = False) -> None:
        """Frees device memory until `needed` bytes fit beside the level, or raises with what is in the way."""
        if needed <= self.ledger.room("device") or (not rising and self._hurry(needed)):
            return
        others = [peer for peer in self.peers if peer is not self]
        # Where all is as planned and RAM is one tier, what is short is what late updates have not given back yet.
        late = self.cursor.on_track and not self.store.has_host
        first = ("exchange", "leaving", "ready updates") if late else ("exchange", "leaving")
        try:
            for attempt in (*first, "evict", "updates", "arriving", "evict", "evict all", "saving"):
                for peer in (*others, self):
                    short = needed - self.ledger.room("device")
                    if short <= 0:
                        return
                    peer.give(attempt, short)
        except BudgetError:
            if rising or not self._lower(needed):
                raise
            return
        short = needed - self.ledger.room("device")
        if short <= 0 or (not rising and self._lower(needed)):
            return
        if not guess:
            self.ask(lambda: needed - self.ledger.room("device"))
        short = needed - self.ledger.room("device")
        if short > 0 and (guess or not self.ledger.stretch("device", short)):
            raise self._refusal(needed)

    def _lower(self, needed: int) -> bool:
        """Whether the level makes room: as long as it is a share, or what training takes, and no prediction, what is in
        use goes before it."""
        unforeseen = (self.cursor.plan is None and not self.claims.imagined) or self.ledger.is_guess("device")
        if not unforeseen or self.claims.most() < needed + self.claims.lasting:
            return False
        self.claims.set_level(min(self.claims.level, self.claims.most() - needed), guess=True)
        return True

    def _refusal(self, needed: int) -> BudgetError:
        short = needed - self.ledger.room("device")
        held = sum(c.nbytes for p in self.peers for c in p.store.chunks.values() if c.device is not None)
        outputs = self.claims.outputs
        return BudgetError(
            f"device: {format_size(needed)} are needed{self.cursor}, with {format_size(held)} of chunks in "
            f"use and {format_size(self.ledger.level['device'])} of non-model data in a budget of "
            f"{format_size(self.ledger.budgets['device'])}: short by {format_size(short)}",
            tier="device",
            short=short,
            advice=f"raise device.memory by {short} bytes, or use a smaller batch, sequence or chunk_size"
            + (f", or let go of outputs of passes before ({format_size(outputs)})" if outputs else ""),
        )

    def ask(self, short: Callable[[], int]) -> None:
        """Other engines on the same tier give up optimizer state, until nothing is short."""
        for peer in self.peers:
            if peer is not self and (missing := short()) > 0:
                peer._give(STATE, missing)

    def give(self, attempt: str, short: int) -> None:
        """Gives up device memory until `short` bytes more are free: by ending what ranks exchange, by ending evictions
        under way, by evicting, by ending updates, by ending fetches so that those can be evicted, too, or by waiting for
        a checkpoint's copy."""
        if attempt == "exchange":
            self.end_exchange()
            return
        if attempt == "saving":
            self._give(SNAPSHOT)
            return
        target = self.ledger.room("device") + short
        if attempt in ("evict", "evict all"):
            for chunk in self._victims(short, sparing=attempt == "evict"):
                if chunk.device is not None and chunk.move is None:  # not gone for the sake of one before it
                    with chunk.apart():
                        self.evict(chunk)
                        self.store.settle(chunk)
            return
        if attempt in ("updates", "ready updates"):
            ready = attempt != "updates"
            while self.ledger.room("device") < target and self._updates.settle_oldest(ready):
                continue
            return
        for link in (TO_HOST, SSD_WRITE) if attempt == "leaving" else (TO_DEVICE, SSD_READ, WIRE):
            for chunk in self.store.moving(link):
                if attempt == "leaving" and self.ledger.room("device") >= target:
                    return
                self.store.end_move(chunk)

    def _victims(self, short: int, sparing: bool) -> list[Chunk]:
        """The chunks that should leave so that `short` bytes become free. `sparing`: not those of this moment."""
        chunks = [c for c in self._unused() if c.move is None and c not in self._guarded]
        cursor = self.cursor
        candidates = (
            Candidate(
                key,
                c.nbytes,
                cursor.distance(c),
                cursor.last(c),
                self.store.only_here(c),
            )
            for key, c in enumerate(chunks)
            if not (sparing and cursor.used_now(c))
        )
        return [chunks[c.key] for c in choose(self._eviction, candidates, short)]

    def copies(self) -> int:
        """Bytes on the device that are elsewhere, too, and are in nobody's use: they go for whoever needs the room."""
        return sum(c.nbytes for c in self._unused() if not self.store.only_here(c))

    def _unused(self) -> list[Chunk]:
        """The chunks on the device that may leave it, and that nobody uses."""
        return [
            c
            for c in self.store.chunks.values()
            if c.kind in self._leaving and c.device is not None and not self.store.in_use(c)
        ]

    def evict(self, chunk: Chunk) -> None:
        """Starts a chunk's way off the device; what is out of date there just goes."""
        if chunk is self.data.computed(chunk.index):
            self.data.notice_writes(chunk.index)
            self.data.unbind(chunk.index)
        if not chunk.device_valid and chunk.move is None:
            self.store.drop(chunk, "device")
            return
        if self.store.has_host and not chunk.host_valid and not chunk.ssd_valid and chunk.kind != WHOLE:
            self.make_for(chunk, "host")
        self.store.evict(chunk)

    # -- the host -------------------------------------------------------------------------------------

    def _make_on_host(self, needed: int) -> None:
        """Frees host memory where there is SSD: copies of parameters that are elsewhere, then parameters themselves,
        those of the farthest next use first, then those on their way from here or to here. What is short after that, the
        reservation will say."""
        if needed <= self.ledger.room("host"):
            return
        self._updates.collect()
        for attempt in ("spare", "updates", "spill"):
            for chunk in sorted(self._host_copies(), key=self.cursor.distance, reverse=True):
                if needed <= self.ledger.room("host"):
                    return
                self._off_the_host(chunk, attempt == "spill")
            while attempt == "updates" and needed > self.ledger.room("host"):
                if not self._updates.settle_oldest():
                    break
        for link in (SSD_READ, TO_DEVICE, TO_HOST):
            for chunk in self.store.moving(link):
                if needed > self.ledger.room("host") and self._is_free_parameter(chunk):
                    self.store.end_move(chunk)
                    self._off_the_host(chunk, spill=True)
        if needed > self.ledger.room("host"):
            self._give(SNAPSHOT)
        if needed > self.ledger.room("host") and self.store.has_host:
            self._off_to_the_device(needed)

    def _off_to_the_device(self, needed: int) -> None:
        """Parameters that have left it for the sake of a level that is none yet go back, and those that a plan never has
        on the host come before they are used."""
        for chunk in self._host_copies():
            if needed <= self.ledger.room("host"):
                return
            count = self.store.room_needed(chunk, "device")
            stays = self.cursor.stays(PARAM, chunk.index) and count <= self.ledger.room("device")
            if chunk.host_valid and (stays or self._lower(count)):
                self.store.fetch(chunk)
                self.store.settle(chunk)
                self.store.drop(chunk, "host")

    def drop_unplanned_copies(self) -> None:
        """Of parameters that this plan never has leave the device; another one did."""
        for chunk in self._host_copies():
            if chunk.device_valid and self.cursor.stays(PARAM, chunk.index):
                self.store.drop(chunk, "host")

    def _off_the_host(self, chunk: Chunk, spill: bool) -> None:
        if chunk.ssd_valid or chunk.device_valid:
            self.store.drop(chunk, "host")
        elif spill and self.store.ssd_space is not None:
            self.store.save(chunk)
            self.store.settle(chunk)

    def _is_free_parameter(self, chunk: Chunk) -> bool:
        return chunk.kind == PARAM and chunk.work is None and chunk not in self._guarded

    def _host_copies(self) -> list[Chunk]:
        """Of parameters, and left alone."""
        return [
            c
            for c in self.store.chunks.values()
            if c.host is not None and c.move is None and self._is_free_parameter(c)
        ]
