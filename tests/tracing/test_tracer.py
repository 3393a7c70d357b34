"""What a recorded pass takes of a GPU beside the chunks, with an allocator that only keeps books."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.planner.record import BACKWARD, FORWARD, Record, event
from ebbtide.runtime.planning.calls import Call
from ebbtide.runtime.planning.tracer import Tracer

TEACHER, UNMANAGED, CHUNKS, STATE = 10_000, 100, 500, 60
"""`STATE`: of the optimizer, for what is outside the chunks; the first update makes it."""


class Card:
    """The allocator's counters."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.allocated = self.peak = 0
        self.missing = STATE

    def update(self) -> None:
        self.hold(self.missing)
        self.missing = 0

    def hold(self, count: int) -> None:
        self.allocated += count
        self.peak = max(self.peak, self.allocated)

    def reset(self) -> None:
        self.peak = self.allocated


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card(CHUNKS)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: made.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: made.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: made.reset())
    return made


@pytest.fixture
def recording(card: Card) -> Tracer:
    """Of an engine that has begun, beside a teacher."""
    backend: Any = SimpleNamespace(
        kind="cuda",
        device=torch.device("cuda", 0),
        held=lambda: {"device": card.chunks, "host": 0},
        watch=lambda meter: None,
    )
    unmanaged: Any = SimpleNamespace(
        fixed_bytes=lambda: UNMANAGED + STATE, missing_bytes=lambda: card.missing, storages=set()
    )
    kept: Any = SimpleNamespace(watch_by=lambda watches: None, owns=lambda storage: False)
    made = Tracer(backend, unmanaged, kept)
    card.hold(TEACHER + UNMANAGED + CHUNKS)
    made.begin()
    return made


def a_pass(card: Card, recording: Tracer, carried: int, held: int = 0) -> None:
    """Forward makes 50 bytes more; at its end the loop lets go of what it had of the pass before, and backward of all
    but 20. `held`: what it has of others all along."""
    recording.start(Call(print, (), {}, "train"), carried + held, None)
    assert recording.recorder is not None
    recording.recorder.moment(event(FORWARD, 0))
    card.hold(50)
    recording.recorder.moment(event(BACKWARD, 0))
    card.hold(-carried)
    recording.reverse(held, list)
    recording.recorder.moment(event(BACKWARD, 1))
    card.hold(-30)
    recording.finish()


def taken(recording: Tracer) -> Record:
    record = recording.take()
    assert record is not None
    return record


ALL = UNMANAGED + STATE


def test_what_was_there_before_the_engine_is_not_counted(card: Card, recording: Tracer) -> None:
    a_pass(card, recording, carried=0)
    card.hold(-20)
    record = taken(recording)
    assert [moment.peak for moment in record.moments] == [ALL + 50] * 3
    assert [moment.alive for moment in record.moments] == [ALL + 50, ALL + 50, ALL + 20]
    assert record.between == ALL + 20


def test_what_the_loop_still_holds_is_counted_once(card: Card, recording: Tracer) -> None:
    a_pass(card, recording, carried=0)
    card.update()
    first = taken(recording)
    assert [moment.peak for moment in first.moments] == [ALL + 50 + 20] * 2 + [ALL + 50]
    a_pass(card, recording, carried=20)
    second = taken(recording)
    assert [moment.peak for moment in second.moments] == [moment.peak for moment in first.moments]
    assert second.between == first.between
    assert (first.carried, first.aside) == (second.carried, second.aside) == (20, 0)


def test_a_record_says_what_of_others_it_has(card: Card, recording: Tracer) -> None:
    """The allocator counts outputs that the loop holds of an evaluation, in backward, too."""
    card.hold(40)
    a_pass(card, recording, carried=0, held=40)
    card.update()
    record = taken(recording)
    assert [moment.peak for moment in record.moments] == [ALL + 40 + 50 + 20] * 2 + [ALL + 40 + 50]
    assert (record.carried, record.aside) == (60, 40)


def test_chunks_that_come_are_no_activations(card: Card, recording: Tracer) -> None:
    recording.start(Call(print, (), {}, "train"), 0, None)
    assert recording.recorder is not None
    meter = recording._meter
    recording.recorder.moment(event(FORWARD, 0))
    meter.split()
    card.hold(300)
    card.chunks += 300
    meter.restart()
    recording.recorder.moment(event(BACKWARD, 0))
    recording.finish()
    assert {moment.peak for moment in taken(recording).moments} == {ALL}


def test_what_others_give_up_makes_nothing_negative(card: Card, recording: Tracer) -> None:
    card.hold(-TEACHER)
    a_pass(card, recording, carried=0)
    record = taken(recording)
    assert min(moment.peak for moment in record.moments) >= 0 and record.between >= 0
