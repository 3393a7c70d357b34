"""The journal charges each piece of time once, to the cause that it belongs to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.memory import journal as module
from ebbtide.memory.journal import COMPUTING, EBBTIDE, LOOP, Journal, StepEvents


class Ticks:
    """A clock that goes on by one each time it is read."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self.count))


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", Ticks())


def test_what_is_nested_is_not_charged_twice(ticks: None) -> None:
    one = Journal()
    one.open()  # at 0
    one.turn_to("")  # 1: the loop had 1
    one.turn_to(COMPUTING)  # 2: nobody's
    one.enter(EBBTIDE)  # 3: 1 of computing
    with one.at("ssd_read", 7):  # 4 to 5
        pass
    one.leave()  # 6: 3, of which 1 is the wait's
    one.turn_to(LOOP)  # 7: 1 of computing
    assert one.seconds == {LOOP: 1.0, COMPUTING: 2.0, "ssd_read": 1.0, EBBTIDE: 2.0}


def test_an_evaluation_is_one_cause(ticks: None) -> None:
    one = Journal()
    one.open()
    with one.apart("evaluation"):  # 1, 2
        assert not one.on
        with one.at(EBBTIDE):
            pass
    assert one.on and one.seconds["evaluation"] == 1.0 and EBBTIDE not in one.seconds


def test_a_journal_that_is_closed_keeps_nothing(ticks: None) -> None:
    one = Journal()
    with one.at(EBBTIDE), one.updating(0, "host"), one.apart("evaluation"):
        one.turn_to(COMPUTING)
    assert not one.seconds and not one.charged


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=30))
def test_pieces_add_up_to_the_time_that_passed(tree: list[Any]) -> None:
    """However they are nested: with a cause for what is between them nothing is left, and nothing is counted twice."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Ticks()
        patch.setattr(module, "time", clock)
        one = Journal()
        one.open()
        begin = clock.perf_counter() - 1

        def walk(node: list[Any], depth: int) -> None:
            with one.at(f"depth {depth}"):
                for child in node:
                    walk(child, depth + 1)

        walk(tree, 0)
        one.turn_to("")
        end = clock.perf_counter() - 1
    assert sum(one.seconds.values()) == end - begin


def test_events_beyond_the_most_are_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 5)
    one = Journal()
    one.open()
    one.events = StepEvents(0.0)
    for _ in range(9):
        one.move("ssd_read", 1, 0, "param", 0.0, ())
    assert len(one.events.moves) == 5 and one.events.lost == 4
    one.moment(0, 0, {}, 0)
    assert len(one.events.moments) == 1  # others have their own room


def test_what_an_interrupt_left_open_ends_with_the_call(ticks: None) -> None:
    one = Journal()
    one.open()
    one.turn_to("")
    one.enter(EBBTIDE)
    one.enter("ssd_read")  # and nobody leaves
    one.settle()
    one.turn_to(COMPUTING)
    one.turn_to(LOOP)
    assert one.seconds[COMPUTING] == 1.0 and one.seconds[EBBTIDE] == 2.0 and not one._stack


def test_after_a_save_the_time_is_the_loops_again(ticks: None) -> None:
    one = Journal()
    one.open()
    with one.apart("saving"):
        pass
    one.turn_to("")
    assert one.seconds[LOOP] == 2.0
