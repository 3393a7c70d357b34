"""What follows from wishes is the same for all ranks, whichever of them asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import StateError
from ebbtide.runtime.distributed.agreement import (
    BEGIN,
    END,
    EVALUATED,
    FORWARD,
    GATHER,
    LOSS,
    REDUCE,
    STEP,
    TOKENS,
    Wish,
    judge,
)

wishes = st.lists(
    st.builds(
        Wish,
        st.sampled_from([GATHER, REDUCE, END, LOSS, STEP, TOKENS, BEGIN, FORWARD, EVALUATED]),
        st.integers(0, 2),
        st.integers(1, 2),
    ),
    min_size=2,
    max_size=4,
)


def all_ends(said: list[Wish]) -> list[object]:
    found: list[object] = []
    for one in said:
        try:
            found.append(judge(one, said))
        except StateError:
            found.append("an error")
    return found


@given(wishes)
def test_all_come_to_the_same_end(said: list[Wish]) -> None:
    found = all_ends(said)
    if any(one.deed == GATHER for one in said):
        assert found == [found[0]] * len(said)
        assert found[0] in [
            one.what for one in said if one.round == min(w.round for w in said if w.deed == GATHER)
        ]
    elif {one.deed for one in said} == {END} and len({one.round for one in said}) == 1:
        assert found == [one.what for one in said]
    elif len({one.deed for one in said}) > 1 and (left := {FORWARD, EVALUATED} & {one.deed for one in said}):
        first = min(left)  # whoever is there goes on, the others ask again
        assert found == [one.what if one.deed == first else (first, -1) for one in said]
    else:
        assert found == [found[0]] * len(said)
        assert found[0] in (None, "an error") or len({one.what for one in said}) == 1


@given(wishes)
def test_what_all_want_is_done(said: list[Wish]) -> None:
    assert all_ends([said[0]] * 3) == [said[0].what] * 3


def test_who_is_behind_goes_first() -> None:
    assert judge(Wish(GATHER, 1, 5), [Wish(GATHER, 1, 5), Wish(GATHER, 8, 4)]) == (GATHER, 8)


def test_gradients_that_are_not_complete_everywhere_wait() -> None:
    said = [Wish(REDUCE, 1, 4), Wish(REDUCE, 2, 4), Wish(END, 0, 4)]
    assert all_ends(said) == [None] * 3


def test_whoever_does_something_else_is_told_what_the_others_do() -> None:
    with pytest.raises(StateError, match=r"rank 0 takes a step, number 1 .*rank 1 begins a forward pass"):
        judge(Wish(STEP, 1, 4), [Wish(STEP, 1, 4), Wish(BEGIN, 0, 4)])
