"""The journal: where a step's time goes, and, of a few steps, each event with its beginning and end.

Seconds are charged to one cause at a time on the thread that trains. Work that says what it is (`enter`, `leave`) is
charged by itself, without what is nested in it; between such pieces time goes to what the thread was turned to: the
model's computation, the user's loop, or to nothing. What is charged to nothing is the step's unexplained rest.

Events are kept only while a step is recorded in full. The journal writes down; it decides nothing, and knows no files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ebbtide.devices.device import OURS, Event

COMPUTING, LOOP, EBBTIDE, PLANNING, GRADIENTS = "computing", "loop", "ebbtide", "planning", "gradients"
UPDATES, UPDATE_WAIT, DEVICE_WAIT, RANKS = "updates", "update_wait", "device_wait", "ranks"
EVALUATION, SAVING, RECORDING = "evaluation", "saving", "recording"
MOST = 100_000
"""Events of a kind in a step; what comes after so many is counted and not kept."""
Kept = TypeVar("Kept")


class Timing(Protocol):
    """When something began and ended, as it is known by the time it is asked for."""

    def span(self) -> tuple[float, float] | None: ...


@dataclass(frozen=True, slots=True)
class MoveEvent:
    """Bytes that moved over a link."""

    link: str
    chunk: int | None
    kind: str
    nbytes: int
    issued: float
    parts: Sequence[Timing] = ()
    """They know when each part began and ended, where the device can tell. They hold nothing else: neither memory nor
    collectives stay alive for them."""


@dataclass(frozen=True, slots=True)
class PieceEvent:
    """The training thread was at something."""

    cause: str
    begin: float
    end: float
    depth: int
    """How many other spans it lies in."""
    chunk: int = -1


@dataclass(frozen=True, slots=True)
class UpdateEvent:
    chunk: int
    tier: str
    begin: float
    end: float
    beside: bool
    """On a thread beside the computation."""


@dataclass(frozen=True, slots=True)
class MomentEvent:
    begin: float
    event: int
    position: int
    """In the plan; -1 where none is followed."""


@dataclass(frozen=True, slots=True)
class LevelEvent:
    """What a tier holds from now on, by tag, and what is left free for non-model data."""

    begin: float
    tier: str
    tags: Mapping[str, int]
    non_model: int


@dataclass(slots=True)
class StepEvents:
    """All that happened in one step. Times are those of `time.perf_counter`."""

    begin: float
    end: float = 0.0
    moments: list[MomentEvent] = field(default_factory=list)
    spans: list[PieceEvent] = field(default_factory=list)
    moves: list[MoveEvent] = field(default_factory=list)
    updates: list[UpdateEvent] = field(default_factory=list)
    levels: list[LevelEvent] = field(default_factory=list)
    latest: dict[str, LevelEvent] = field(default_factory=dict)
    """By tier."""
    lost: int = 0
    """Events beyond the most of a kind that are kept."""

    def keep(self, kept: list[Kept], event: Kept) -> None:
        if len(kept) < MOST:
            kept.append(event)
        else:
            self.lost += 1


@dataclass(slots=True)
class _Open:
    """A piece of the training thread's time that has not ended."""

    cause: str
    begin: float
    chunk: int
    nested: float = 0.0
    """Seconds of the pieces within."""


class _Piece:
    """Of the training thread's time, charged to one cause."""

    __slots__ = ("_cause", "_chunk", "_journal")

    def __init__(self, journal: Journal, cause: str, chunk: int) -> None:
        self._journal, self._cause, self._chunk = journal, cause, chunk

    def __enter__(self) -> None:
        self._journal.enter(self._cause, self._chunk)

    def __exit__(self, *_: object) -> None:
        self._journal.leave()


_NOTHING = nullcontext()


class Journal:
    def __init__(self) -> None:
        self.on = False
        """Whether seconds are charged. Whoever would write something down asks this first."""
        self.seconds: dict[str, float] = {}
        """By cause, since the journal was opened."""
        self.charged = 0
        """How often something was charged."""
        self.events: StepEvents | None = None
        """Of the step that is recorded in full, while one is."""
        self._stack: list[_Open] = []
        self._outside = ""
        self._since = 0.0

    # -- seconds --------------------------------------------------------------------------------------

    def open(self) -> None:
        self.on = True
        self._stack = []
        self._outside, self._since = LOOP, time.perf_counter()

    def close(self) -> None:
        self.on, self.events = False, None

    def enter(self, cause: str, chunk: int = -1) -> None:
        """The thread that trains begins something."""
        now = time.perf_counter()
        if not self._stack:
            self._charge(self._outside, self._since, now, 0.0)
        self._stack.append(_Open(cause, now, chunk))

    def leave(self) -> None:
        """It has ended."""
        now = time.perf_counter()
        if not self._stack:
            return  # the journal was opened in the midst of it
        piece = self._stack.pop()
        self._charge(piece.cause, piece.begin, now, piece.nested, piece.chunk)
        if self._stack:
            self._stack[-1].nested += now - piece.begin
        else:
            self._since = now

    def settle(self) -> None:
        """The engine's call is over: what an interrupt left open in it ends here."""
        while self._stack:
            self.leave()

    def turn_to(self, cause: str) -> None:
        """What the thread is at between the pieces that say so themselves; "" for what nobody has a name for."""
        if not self.on:
            return
        now = time.perf_counter()
        if not self._stack:
            self._charge(self._outside, self._since, now, 0.0)
            self._since = now
        self._outside = cause

    def _charge(self, cause: str, begin: float, end: float, nested: float, chunk: int = -1) -> None:
        if not cause:
            return
        self.charged += 1
        self.seconds[cause] = self.seconds.get(cause, 0.0) + end - begin - nested
        events = self.events
        if events is not None:
            events.keep(events.spans, PieceEvent(cause, begin, end, len(self._stack), chunk))

    def at(self, cause: str, chunk: int = -1) -> AbstractContextManager[None]:
        """Around a piece of work. On a thread of ours it is not the step's time."""
        return _Piece(self, cause, chunk) if self.on and not _on_ours() else _NOTHING

    @contextmanager
    def apart(self, cause: str) -> Iterator[None]:
        """All of what happens within is one cause, whatever it is in itself: an evaluation."""
        if not self.on:
            yield
            return
        outside = self._outside
        self.turn_to("")
        self.on, begin = False, time.perf_counter()
        try:
            yield
        finally:
            self.on, self._since, self._outside = True, time.perf_counter(), outside
            self._charge(cause, begin, self._since, 0.0)

    # -- events ---------------------------------------------------------------------------------------

    def moment(self, event: int, position: int, tiers: Mapping[str, Mapping[str, int]], level: int) -> None:
        """A moment begins. `tiers`: what each holds, by tag; `level`: what the device leaves to non-model data."""
        events = self.events
        if events is not None:
            events.keep(events.moments, MomentEvent(time.perf_counter(), event, position))
            self.note_levels(tiers, level)

    def note_levels(self, tiers: Mapping[str, Mapping[str, int]], level: int) -> None:
        """What has changed since it was noted last."""
        events = self.events
        if events is None:
            return
        now = time.perf_counter()
        for tier, tags in tiers.items():
            held = {tag: count for tag, count in tags.items() if count}
            beside = level if tier == "device" else 0
            before = events.latest.get(tier)
            if before is None or before.tags != held or before.non_model != beside:
                events.latest[tier] = found = LevelEvent(now, tier, held, beside)
                events.keep(events.levels, found)

    def move(
        self, link: str, nbytes: int, chunk: int | None, kind: str, issued: float, parts: Sequence[Event]
    ) -> None:
        events = self.events
        if events is not None:
            timings = [part.timing for part in parts]
            found = MoveEvent(link, chunk, kind, nbytes, issued or time.perf_counter(), timings)
            events.keep(events.moves, found)

    @contextmanager
    def updating(self, chunk: int, tier: str) -> Iterator[None]:
        """Around the arithmetic of an update, on whatever thread."""
        if not self.on:
            yield
            return
        beside, begin = _on_ours(), time.perf_counter()
        if not beside:
            self.enter(UPDATES, chunk)
        try:
            yield
        finally:
            if not beside:
                self.leave()
            events = self.events
            if events is not None:
                events.keep(events.updates, UpdateEvent(chunk, tier, begin, time.perf_counter(), beside))


def _on_ours() -> bool:
    return threading.current_thread().name.startswith(OURS)


class Here:
    """As an event: a move that the thread makes itself."""

    __slots__ = ("begin", "end")

    def __init__(self) -> None:
        self.begin = self.end = time.perf_counter()

    def over(self) -> Here:
        self.end = time.perf_counter()
        return self

    def span(self) -> tuple[float, float]:
        return self.begin, self.end

    @property
    def timing(self) -> Here:
        return self

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def done(self) -> bool:
        return True


def extent(move: MoveEvent) -> tuple[float, float] | None:
    """When a move's bytes began to flow, and when the last were there; None where its events cannot say."""
    spans = [found for part in move.parts if (found := part.span()) is not None]
    if len(spans) < len(move.parts) or not spans:
        return None
    return min(begin for begin, _ in spans), max(end for _, end in spans)
