"""Optimizer state on its way from and to SSD, piece by piece, through a few buffers.

Reads go ahead in the order in which updates are expected, as far as there are free buffers; a piece that was updated is
written while the next ones are. Where updates come in another order than expected, what was read ahead is thrown
away (it is clean) and reading goes on from there: slower, never wrong. An order that holds for the rest of a round
can be told (`detour`), and what is left for that rest (`put_off`).

Some pieces may have a buffer of their own for good: they are read once, and written when somebody else reads what SSD
has of their chunk (`settle`), or the buffers are given up.

The computation's thread and the updating one share the buffers under one lock. A write that fails is reported by the
next `take` or `drain`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ebbtide.devices.device import Event, wait_for_all
from ebbtide.errors import IntegrityError
from ebbtide.memory.disk.space import Extent
from ebbtide.memory.links import SSD_READ, SSD_WRITE, Traffic
from ebbtide.memory.ssd_space import Group, SsdSpace, offsets

STATE = "state"
"""What pieces are of, in the journal."""
Key = tuple[int, int]
"""(chunk, first element)."""


@dataclass(slots=True, eq=False)
class Slot:
    memory: torch.Tensor
    key: Key = (-1, -1)
    events: list[Event] = field(default_factory=list)
    """Of the reads or the write under way."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """By kind: the piece's elements, flat."""
    extent: Extent | None = None
    used: int = 0
    """Bytes of the piece."""
    holds: bool = False
    """It stays, and has the newest state of its piece."""
    changed: bool = False
    """SSD has not: it stays, and was updated since."""


class StateStream:
    def __init__(
        self,
        space: SsdSpace,
        slots: Sequence[torch.Tensor],
        traffic: Traffic,
        prefetch: bool = True,
        kept: Mapping[int, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        """`traffic` counts the bytes that are read and written. Without `prefetch` each piece is read when it is wanted,
        and written before the next. `kept`: by chunk, buffers for its first pieces, which stay in them."""
        self._space = space
        self._prefetch = prefetch
        self._traffic = traffic
        self._lock = threading.Lock()
        self._free = [Slot(memory) for memory in slots]
        self._ahead: OrderedDict[Key, Slot] = OrderedDict()
        """Read, or being read; clean."""
        self._kept: dict[Key, Slot] = {}
        for index, memories in (kept or {}).items():
            firsts = [first for first, _, _ in space.group(index).pieces]
            self._kept |= {(index, first): Slot(one) for first, one in zip(firsts, memories, strict=False)}
        self._taken: set[Key] = set()
        """What SSD has of these is about to be out of date."""
        self._writing: list[Slot] = []
        self._order: list[Key] = []
        """Of a round."""
        self._coming: deque[Key] = deque()
        """What is left to be read of this one."""
        self._put_off: set[Key] = set()
        """What is read when it is wanted, or as a detour says; the next round begins after that."""
        self._known: dict[int, frozenset[str]] = {}
        """By chunk, the kinds that SSD has; the others are all zeros."""
        self._updated: set[Key] = set()
        """Pieces that SSD has of all kinds since."""
        self.failed: Exception | None = None
        self.misses = 0
        """Pieces that were wanted out of the expected order."""

    # -- what the computation's thread says -------------------------------------------------------------

    def note(self, index: int, kinds: Iterable[str]) -> None:
        """What SSD has of a chunk's state, after it came or went by another way: what was read ahead is void."""
        with self._lock:
            for key in [key for key in self._ahead if key[0] == index]:
                self._recycle(self._ahead.pop(key))
            self._updated = {key for key in self._updated if key[0] != index}
            for _, slot in self._kept_of(index):
                slot.holds = slot.changed = False
            self._known[index] = frozenset(kinds)
            self._turn_to([])

    def expect(self, chunks: Sequence[int]) -> None:
        """The order in which chunks will be updated, again and again; reading ahead begins."""
        order = self._passing(chunks)
        with self._lock:
            if order != self._order:
                self._drop_ahead()
                self._turn_to(order)
            self._read_ahead()

    def detour(self, under_way: Sequence[int], chunks: Sequence[int]) -> list[int] | None:
        """What is left of this round comes in ascending order, but for what has been read ahead; the next one as always.

        `under_way`: chunks whose updates have begun; `chunks`: those that follow, in the order so far. Returns the new
        order; None while the updating thread has the buffers."""
        if self._lock.locked():
            return None
        with self._lock:
            read = {index for index, _ in self._ahead}
            order = [i for i in chunks if i in read] + sorted(i for i in chunks if i not in read)
            wanted = self._passing(order)
            if not all(key in self._ahead for key in wanted):  # else reading has gone round
                left = {*self._rest(), *self._put_off} - self._ahead.keys() - self._taken
                self._turn_to(
                    self._order, [key for key in (*self._passing(under_way), *wanted) if key in left]
                )
                self._read_ahead()
            return order

    def put_off(self, index: int) -> bool:
        """Leaves a chunk's update for a detour, or until somebody wants it; False where its state is being read, or the
        updating thread has the buffers."""
        if self._lock.locked():
            return False
        with self._lock:
            keys = self._passing([index])
            under_way = any(key in self._ahead or key in self._taken for key in keys)
            if not keys or under_way or not {*keys} <= {*self._rest()}:
                return False
            self._put_off.update(keys)
            self._coming = deque(key for key in self._coming if key not in self._put_off)
            return True

    def _passing(self, chunks: Sequence[int]) -> list[Key]:
        """Their pieces that stream."""
        streamed = [index for index in chunks if index in self._known]
        every = [(index, first) for index in streamed for first, _, _ in self._space.group(index).pieces]
        return [key for key in every if key not in self._kept]

    def _turn_to(self, order: list[Key], coming: Iterable[Key] = ()) -> None:
        """Reading goes on with what is coming, and then round by round."""
        self._order, self._coming = order, deque(coming)
        self._put_off.clear()

    def advance(self) -> None:
        """Reads ahead into buffers that have become free."""
        if not self._lock.locked():  # else the updating thread is at it
            with self._lock:
                self._read_ahead()

    def drain(self) -> None:
        """Waits until everything that was given back is on SSD."""
        with self._lock:
            while self._writing:
                self._collect(wait=True)
            self._raise_failed()

    def settle(self, index: int | None = None) -> None:
        """SSD has all of a chunk's newest state afterwards, or of all chunks'; no update of them is under way."""
        with self._lock:
            while any(index in (None, slot.key[0]) for slot in self._writing):
                self._collect(wait=True)
            self._raise_failed()
            behind = [(key, slot) for key, slot in self._kept_of(index) if slot.changed]
            writes: list[Event] = []
            for _, slot in behind:
                assert slot.extent is not None
                writes.append(self._space.disk.write(slot.extent, [slot.memory[: slot.used]]))
            failed = wait_for_all(writes)
            if failed is not None:
                raise failed
            for key, slot in behind:
                slot.changed = False
                self._traffic.count(SSD_WRITE, slot.used, key[0], STATE, writes)
                self._updated.add(key)

    def _kept_of(self, index: int | None) -> list[tuple[Key, Slot]]:
        return [(key, slot) for key, slot in self._kept.items() if index is None or key[0] == index]

    def forget(self) -> None:
        """After a failure: what was read ahead, and what failed. All values will be written anew."""
        with self._lock:
            self._drop_ahead()
            while self._writing:
                self._collect(wait=True)
            self._turn_to([])
            self.failed = None

    def close(self) -> None:
        """Waits for what is under way, and lets the buffers go; what only they have is lost (see `settle`)."""
        with self._lock:
            self._turn_to([])
            self._drop_ahead()
            while self._writing:
                self._collect(wait=True)
            self._free.clear()
            self._kept.clear()

    # -- what the updating thread says --------------------------------------------------------------------

    def take(self, index: int, first: int) -> Slot:
        """A buffer with the state of a piece, which is the caller's until it gives it back."""
        key = (index, first)
        with self._lock:
            self._raise_failed()
            kept = self._kept.get(key)
            slot = kept or self._ahead.pop(key, None)
            if slot is None:
                self._resume_after(key)
                slot = self._free_slot()
                self._read(slot, key)
            elif slot is kept and not slot.holds:
                self._read(slot, key)
            self._taken.add(key)
            self._read_ahead()
        failed = wait_for_all(slot.events)  # all of them: the others still write to the buffer
        slot.events = []
        if failed is not None:
            self.give(slot, changed=False)
            raise failed
        slot.holds = kept is not None
        return slot

    def give(self, slot: Slot, changed: bool = True) -> None:
        """The caller is done with a piece: if it has changed, it is written."""
        with self._lock:
            self._taken.discard(slot.key)
            if slot.key in self._kept:
                slot.changed |= changed
            elif changed:
                assert slot.extent is not None
                slot.events = [self._space.disk.write(slot.extent, [slot.memory[: slot.used]])]
                self._traffic.count(SSD_WRITE, slot.used, slot.key[0], STATE, slot.events)
                self._writing.append(slot)
                self._updated.add(slot.key)
            else:
                self._recycle(slot)
            self._read_ahead()

    # -- buffers ------------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        self._collect(wait=not self._prefetch)
        while self._prefetch and self._free and len(self._ahead) < len(self._order):
            key = self._expected()
            if key is None or key in self._ahead or key in self._taken:
                return
            self._coming.popleft()
            slot = self._free.pop()
            self._read(slot, key)
            self._ahead[key] = slot

    def _read(self, slot: Slot, key: Key) -> None:
        group = self._space.group(key[0])
        starts = self._lay_out(slot, key, group)
        assert slot.extent is not None
        if key in self._updated:
            slot.events = [self._space.disk.read(slot.extent, [slot.memory[: slot.used]])]
            self._traffic.count(SSD_READ, slot.used, key[0], STATE, slot.events)
            return
        known = self._known.get(key[0])
        if known is None:
            raise IntegrityError(
                f"the state of chunk {key[0]} is on SSD, and the stream was not opened for it"
            )
        slot.events = []
        for (kind, _), start, end in zip(group.kinds, starts, starts[1:], strict=False):
            if kind in known:
                part = self._space.disk.read(slot.extent, [slot.memory[start:end]], start)
                slot.events.append(part)
                self._traffic.count(SSD_READ, end - start, key[0], STATE, [part])
            else:
                ctypes.memset(slot.memory.data_ptr() + start, 0, end - start)

    def _lay_out(self, slot: Slot, key: Key, group: Group) -> list[int]:
        count, extent = next((count, extent) for first, count, extent in group.pieces if first == key[1])
        starts = offsets(group.kinds, count)
        slot.key, slot.extent, slot.used = key, extent, starts[-1]
        slot.parts = [
            slot.memory[start : start + count * dtype.itemsize].view(dtype)
            for start, (_, dtype) in zip(starts, group.kinds, strict=False)
        ]
        return starts

    def _free_slot(self) -> Slot:
        while not self._free:
            if self._writing:
                self._collect(wait=True)
            else:
                self._give_up_last()
        return self._free.pop()

    def _give_up_last(self) -> None:
        """Of what is read ahead, what is wanted last; it will be read again."""
        key, slot = self._ahead.popitem()
        self._coming.appendleft(key)
        self._recycle(slot)

    def _resume_after(self, key: Key) -> None:
        """It was not read ahead. Where another was expected, reading goes on after this one; one that never is expected
        changes nothing."""
        if key == self._expected():
            self._coming.popleft()
            return
        self.misses += 1
        if key in self._put_off:
            self._put_off.discard(key)
        elif key in self._order:
            self._drop_ahead()
            self._coming = deque(self._order[self._order.index(key) + 1 :])

    def _expected(self) -> Key | None:
        """What is read next."""
        rest = self._rest()
        return rest[0] if rest else None

    def _rest(self) -> deque[Key]:
        """What is left to be read of this round, or all of the next."""
        if not self._coming and not self._put_off:
            self._coming.extend(self._order)
        return self._coming

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._recycle(self._ahead.popitem()[1])

    def _recycle(self, slot: Slot) -> None:
        """Nobody needs what the buffer holds; a read under way still writes to it."""
        failed = wait_for_all(slot.events)  # of bytes that nobody waits for
        slot.events, slot.parts = [], []
        self._free.append(slot)
        if failed is not None and not isinstance(failed, Exception):
            raise failed

    def _collect(self, wait: bool) -> None:
        """Takes back buffers whose writes are over; with `wait`, one at least."""
        while self._writing and (wait or all(event.done() for event in self._writing[0].events)):
            wait = False
            slot = self._writing[0]
            failed = wait_for_all(slot.events)
            self._writing.pop(0)
            slot.events, slot.parts = [], []
            self._free.append(slot)
            if failed is not None and not isinstance(failed, Exception):
                raise failed
            self.failed = self.failed or failed

    def _raise_failed(self) -> None:
        if self.failed is not None:
            raise self.failed.with_traceback(None)
