"""The order in which a checkpoint's pieces are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.checkpoint.rank_files import PIECE
from ebbtide.checkpoint.shards import _mixed

pieces = st.lists(st.tuples(st.integers(0, 2 * PIECE), st.booleans()), max_size=40)


@given(pieces, st.integers(0, 5))
def test_each_piece_comes_once(found: list[tuple[int, bool]], first: int) -> None:
    first = min(first, len(found))
    order = _mixed([size for size, _ in found], [lent for _, lent in found], first)
    assert order[:first] == list(range(first))
    assert sorted(order) == list(range(len(found)))


def test_what_is_filled_is_spread_over_the_rest() -> None:
    sizes, lent = [PIECE] * 30, [False] * 10 + [True] * 20
    order = _mixed(sizes, lent, 0)
    for at in range(0, 30, 3):
        assert [lent[number] for number in order[at : at + 3]] == [False, True, True]
