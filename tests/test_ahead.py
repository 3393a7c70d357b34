"""What ranks promise each other: the same on all, and nothing that did not happen twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.run.ahead import Ahead

STEP, REDUCE = 5, 2


def play(ahead: Ahead, steps: list[list[tuple[int, list[int]]]]) -> list[tuple[int, bool]]:
    """Steps of agreements, each with the gathers that all ranks want after it: which were promised."""
    found = []
    for step in steps:
        ahead.agreed(STEP, 99, step=True)
        for subject, wanted in step:
            ahead.agreed(REDUCE, subject, step=False)
            for index in wanted:
                while (promised := ahead.promised) not in (None, index):
                    ahead.gathered(promised)
                    found.append((promised, True))
                found.append((index, promised is not None))
                ahead.gathered(index)
            while (promised := ahead.promised) is not None:
                ahead.gathered(promised)
                found.append((promised, True))
        ahead.stop()
    return found


def test_what_came_twice_is_promised() -> None:
    step = [(7, [0, 1, 2]), (8, [3])]
    found = play(Ahead(), [step] * 4)
    assert [index for index, _ in found] == [0, 1, 2, 3] * 4
    assert [promised for _, promised in found] == [False] * 8 + [True] * 8


def test_what_came_once_is_not() -> None:
    usual, once = [(7, [0, 1])], [(7, [0, 1, 5])]
    found = play(Ahead(), [usual, usual, once, usual, usual])
    assert (
        found
        == [(0, False), (1, False)] * 2 + [(0, True), (1, True), (5, False)] + [(0, True), (1, True)] * 2
    )


def test_nothing_is_promised_after_a_stop() -> None:
    ahead = Ahead()
    play(ahead, [[(7, [0])]] * 3)
    assert ahead.promised is None
    ahead.gathered(0)
    assert ahead.promised is None


steps = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=5)), max_size=4), max_size=6
)


@given(steps)
def test_all_that_is_wanted_is_gathered_and_promises_end(
    given_steps: list[list[tuple[int, list[int]]]],
) -> None:
    found = play(Ahead(), given_steps)
    wanted = [index for step in given_steps for _, run in step for index in run]
    rest = iter(index for index, _ in found)
    assert all(any(index == other for other in rest) for index in wanted)  # in this order, among others
