"""What ranks promise each other: the same on all, and nothing that did not happen twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.runtime.distributed.agreement import GATHER, REDUCE
from ebbtide.runtime.distributed.collective_cache import CollectiveCache

Pass = list[tuple[int, list[int]]]
"""Agreements, each with the gathers that are wanted after it."""


def play(ahead: CollectiveCache, passes: list[Pass], others: int = 0) -> list[tuple[int, bool]]:
    """What was gathered, and whether that was promised. `others`: how far another rank had a use for promises."""
    found = []

    def follow(wanted: list[int]) -> None:
        for index in wanted:
            while (promised := ahead.promised) is not None:
                ahead.kept(promised[1] == index)
                found.append((promised[1], True))
                if promised[1] == index:
                    break
            else:
                ahead.heard(max(others, ahead.wanted))
                ahead.did((GATHER, index, 0))
                found.append((index, False))
        while (promised := ahead.promised) is not None:
            ahead.kept(False)
            found.append((promised[1], True))
        ahead.heard(max(others, ahead.wanted))

    for one in passes:
        ahead.heard(0)
        ahead.begin()
        for subject, wanted in one:
            ahead.agreed(REDUCE, subject)
            follow(wanted)
        ahead.end()
    return found


def test_what_came_twice_is_promised() -> None:
    step = [(7, [0, 1, 2]), (8, [3])]
    found = play(CollectiveCache(), [step] * 4)
    assert [index for index, _ in found] == [0, 1, 2, 3] * 4
    assert [promised for _, promised in found] == [False] * 8 + [True] * 8


def test_what_came_once_is_not() -> None:
    usual, once = [(7, [0, 1])], [(7, [0, 1, 5])]
    found = play(CollectiveCache(), [usual, usual, once, usual, usual])
    assert (
        found
        == [(0, False), (1, False)] * 2 + [(0, True), (1, True), (5, False)] + [(0, True), (1, True)] * 2
    )


def test_what_nobody_wants_any_more_is_not_promised_again() -> None:
    long, short = [(7, [0, 1, 2])], [(7, [0])]
    found = play(CollectiveCache(), [long, long, short, short, short])
    assert found[6:9] == [(0, True), (1, True), (2, True)]
    assert found[9:] == [(0, True)] * 2


def test_what_another_rank_wants_is() -> None:
    long, short = [(7, [0, 1, 2])], [(7, [0])]
    assert (
        play(CollectiveCache(), [long, long, short, short], others=3)[6:]
        == [(0, True), (1, True), (2, True)] * 2
    )


def test_nothing_is_promised_beyond_a_pass() -> None:
    ahead = CollectiveCache()
    play(ahead, [[(7, [0])]] * 3)
    assert ahead.promised is None
    ahead.agreed(REDUCE, 7)
    ahead.did((GATHER, 0, 0))
    assert ahead.promised is None


def test_what_could_not_be_done_ends_what_is_promised() -> None:
    """Until it was done twice again."""
    ahead = CollectiveCache()
    step = [(7, [0, 1, 2])]
    play(ahead, [step] * 2)
    ahead.begin()
    ahead.agreed(REDUCE, 7)
    ahead.kept(True)
    assert ahead.promised == (GATHER, 1, 0)
    ahead.kept(False)
    ahead.refused()
    assert ahead.promised is None
    ahead.heard(2)
    ahead.end()
    assert play(ahead, [step]) == [(0, True), (1, False), (2, False)]
    assert [promised for _, promised in play(ahead, [step] * 2)] == [True, False, False, True, True, True]


def test_passes_that_are_never_alike_do_not_fill_the_memory() -> None:
    ahead = CollectiveCache()
    for subject in range(120_000):
        ahead.begin()
        ahead.agreed(REDUCE, subject)
        ahead.end()
    assert len(ahead._last) <= 100_002


passes = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=5)), max_size=4), max_size=6
)


@given(passes)
def test_all_that_is_wanted_is_gathered(wanted_passes: list[Pass]) -> None:
    found = play(CollectiveCache(), wanted_passes)
    wanted = [index for one in wanted_passes for _, run in one for index in run]
    rest = iter(index for index, _ in found)
    assert all(any(index == other for other in rest) for index in wanted)  # in this order, among others
