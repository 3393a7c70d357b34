"""Optimizer state that streams: whoever updates a piece has its newest values, in whatever order pieces come."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.devices.cpu_device import OVER
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.disk.space import DiskSpace
from ebbtide.memory.links import Traffic
from ebbtide.memory.ssd_space import SsdSpace
from ebbtide.memory.state_stream import StateStream
from ebbtide.planner.sizes import SLOTS
from ebbtide.runtime.updates.update_queue import UpdateQueue

CHUNKS, SIZE, PIECE = 6, 3 * 4096, 2 * 4 * 4096
KINDS = (("m", torch.float32), ("v", torch.float32))


@contextmanager
def streaming(prefetch: bool = True, kept: int = 0) -> Iterator[StateStream]:
    """Of chunks with three pieces each, all zeros. `kept`: of the first chunk, pieces that stay."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger({"device": 0, "host": 0, "ssd": 1 << 24})
        disk = DiskSpace([Path(folder)], 1 << 24)
        space = SsdSpace(disk, ledger, PIECE)
        for index in range(CHUNKS):
            space.acquire("m", index, SIZE, KINDS)
        buffer = PIECE + 3 * 4096
        stream = StateStream(
            space,
            [torch.empty(buffer, dtype=torch.uint8) for _ in range(SLOTS)],
            Traffic(),
            prefetch,
            {0: [torch.empty(buffer, dtype=torch.uint8) for _ in range(kept)]} if kept else None,
        )
        for index in range(CHUNKS):
            stream.note(index, [])
        try:
            yield stream
        finally:
            stream.close()
            disk.close()


def update(stream: StateStream, index: int, seen: dict[tuple[int, int], int]) -> None:
    """Counts a chunk's pieces up; `seen`: what they must have."""
    for first, _, _ in stream._space.group(index).pieces:
        slot = stream.take(index, first)
        wanted = seen.get((index, first), 0)
        assert all(bool((part == wanted).all()) for part in slot.parts)
        for part in slot.parts:
            part.fill_(wanted + 1)
        seen[index, first] = wanted + 1
        stream.give(slot)


@settings(deadline=None)
@given(
    prefetch=st.booleans(),
    kept=st.integers(0, 2),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("expect"), st.permutations(range(CHUNKS))),
            st.tuples(st.just("update"), st.lists(st.integers(0, CHUNKS - 1), max_size=4)),
            st.tuples(st.just("detour"), st.lists(st.integers(0, CHUNKS - 1), max_size=4, unique=True)),
            st.tuples(st.just("put off"), st.lists(st.integers(0, CHUNKS - 1), max_size=3, unique=True)),
        ),
        max_size=12,
    ),
)
def test_every_update_finds_the_newest_values(
    prefetch: bool, kept: int, steps: list[tuple[str, Any]]
) -> None:
    with streaming(prefetch, kept) as stream:
        seen: dict[tuple[int, int], int] = {}
        for what, chunks in steps:
            if what == "expect":
                stream.expect(chunks)
            elif what == "detour":
                stream.detour(chunks[:1], chunks[1:])
            elif what == "put off":
                for index in chunks:
                    stream.put_off(index)
            else:
                for index in chunks:
                    update(stream, index, seen)
        for index in range(CHUNKS):
            update(stream, index, seen)


@pytest.mark.parametrize("done", range(CHUNKS))
def test_a_detour_that_is_told_throws_nothing_away(done: int) -> None:
    """Round after round, with the rest of each in another order."""
    order = list(reversed(range(CHUNKS)))
    with streaming() as stream:
        seen: dict[tuple[int, int], int] = {}
        stream.expect(order)
        for _ in range(3):
            for index in order[:done]:
                update(stream, index, seen)
            left = stream.detour([], order[done:])
            assert left is not None and sorted(left) == sorted(order[done:])
            for index in left:
                update(stream, index, seen)
        assert stream.misses == 0
        stream.drain()
        pieces = sum(len(stream._space.group(index).pieces) for index in order)
        assert len(seen) == pieces and set(seen.values()) == {3}
        # The first time there was nothing on the disk; what is read ahead is of the next round.
        moved = stream._traffic.moved
        assert moved["ssd_write"] == 3 * pieces * PIECE
        assert moved["ssd_read"] <= (2 * pieces + SLOTS) * PIECE


@pytest.mark.parametrize("begun", range(CHUNKS))
def test_what_is_under_way_is_no_part_of_the_next_round(begun: int) -> None:
    order = list(reversed(range(CHUNKS)))
    with streaming() as stream:
        seen: dict[tuple[int, int], int] = {}
        stream.expect(order)
        for number in range(3):
            for index in order[:begun]:
                update(stream, index, seen)
            (first, _, _), *rest = stream._space.group(order[begun]).pieces
            slot = stream.take(order[begun], first)
            left = stream.detour([order[begun]], order[begun + 1 :])
            assert left is not None
            for part in slot.parts:
                part.fill_(number + 1)
            stream.give(slot)
            seen[order[begun], first] = number + 1
            for first, _, _ in rest:
                slot = stream.take(order[begun], first)
                for part in slot.parts:
                    part.fill_(number + 1)
                stream.give(slot)
                seen[order[begun], first] = number + 1
            for index in left:
                update(stream, index, seen)
            stream.drain()
            stream.advance()
            # As many as there are buffers, and none of a later time.
            coming = [(i, at) for i in order for at, _, _ in stream._space.group(i).pieces][:SLOTS]
            assert list(stream._ahead) == coming
        assert stream.misses == 0


@pytest.mark.parametrize("wanted", [False, True])
def test_what_is_put_off_is_read_once_and_late(wanted: bool) -> None:
    """Round after round some chunks are put off: their state comes with the detour, or where somebody wants it sooner;
    what is read ahead of the others stays."""
    order = list(reversed(range(CHUNKS)))
    with streaming() as stream:
        seen: dict[tuple[int, int], int] = {}
        for index in order:
            update(stream, index, seen)
        stream.drain()
        stream.expect(order)
        assert not stream.put_off(order[0])  # it is being read
        before, missed = stream._traffic.moved["ssd_read"], stream.misses
        for _ in range(3):
            update(stream, 5, seen)
            assert stream.put_off(2)
            assert stream.put_off(1)
            assert not stream.put_off(2)
            for index in (4, 3, *([2] if wanted else []), 0):
                update(stream, index, seen)
            stream.drain()
            stream.advance()
            assert not stream._ahead  # nothing of the next round before what was put off
            left = [1] if wanted else [2, 1]
            assert stream.detour([], left) == sorted(left)
            assert {index for index, _ in stream._ahead} >= {*left}
            for index in sorted(left):
                update(stream, index, seen)
        stream.drain()
        pieces = sum(len(stream._space.group(index).pieces) for index in order)
        assert stream.misses - missed == (3 * 3 if wanted else 0)
        assert set(seen.values()) == {4}
        read = (stream._traffic.moved["ssd_read"] - before) // PIECE
        assert 3 * pieces - SLOTS <= read <= 3 * pieces + SLOTS


def test_a_piece_that_nobody_expected_throws_one_buffer_away_at_most() -> None:
    order = list(reversed(range(1, CHUNKS)))
    with streaming() as stream:
        seen: dict[tuple[int, int], int] = {}
        stream.expect(order)
        for _ in range(2):
            for index in order:
                update(stream, index, seen)
        stream.drain()
        stream.advance()
        before = stream._traffic.moved["ssd_read"]
        update(stream, 0, seen)
        for index in order:
            update(stream, index, seen)
        stream.drain()
        stream.advance()  # as much is read ahead as before
        pieces = sum(len(stream._space.group(index).pieces) for index in order)
        assert stream.misses == 3
        read = (stream._traffic.moved["ssd_read"] - before) // PIECE
        assert pieces <= read <= pieces + stream.misses < pieces + SLOTS  # the others have no state yet


def test_state_that_does_not_stream_is_no_part_of_a_detour() -> None:
    with streaming() as stream:
        stream.expect([3, 2])
        assert stream.detour([11], [3, 10, 2, 9]) == [3, 2, 9, 10]


def chunk(index: int) -> Chunk:
    return Chunk("param", index, torch.float32, 1024, 4096)


def test_what_is_left_is_done_in_the_order_of_the_chunks() -> None:
    updater, ran = UpdateQueue(True, SimpleNamespace(state_stream=None, traffic=Traffic())), list[int]()
    go = threading.Event()
    begun = threading.Event()

    def work(index: int) -> None:
        begun.set()
        go.wait(60)
        ran.append(index)

    finished = list[int]()
    for index in (5, 4, 3, 0, 1):
        updater.submit(
            [chunk(index)],
            [OVER],
            lambda index=index: work(index),
            lambda done, index=index: finished.append(index),
        )
    begun.wait(60)
    updater.reorder()
    go.set()
    updater.flush()
    assert ran == [5, 0, 1, 3, 4]
    assert finished == ran


def test_what_is_read_ahead_goes_first() -> None:
    updater, ran = UpdateQueue(True, SimpleNamespace(state_stream=None, traffic=Traffic())), list[int]()
    answers: list[list[int] | None] = [None, [3, 0, 2]]
    updater._store.state_stream = SimpleNamespace(  # type: ignore[assignment]
        detour=lambda under_way, chunks: answers.pop(0), advance=lambda: None, drain=lambda: None
    )
    go, begun = threading.Event(), threading.Event()

    def work(index: int) -> None:
        begun.set()
        go.wait(60)
        ran.append(index)

    for index in (5, 3, 2, 0):
        updater.submit([chunk(index)], [OVER], lambda index=index: work(index), lambda done: None)
    begun.wait(60)
    updater.reorder()  # the stream is busy
    updater.collect()
    go.set()
    updater.flush()
    assert ran == [5, 3, 0, 2]
    assert not answers


class Later:
    """State that comes when it is told: of these chunks it is being read."""

    def __init__(self, read: set[int]) -> None:
        self.read, self.told = read, list[list[int]]()

    def put_off(self, index: int) -> bool:
        return index not in self.read

    def detour(self, under_way: list[int], chunks: list[int]) -> list[int]:
        self.told.append(list(chunks))
        return sorted(chunks)

    def advance(self) -> None:
        pass

    drain = advance


def put_off_jobs(
    indices: list[int], read: set[int], spare: int = 1
) -> tuple[UpdateQueue, list[int], dict[int, Chunk], Any]:
    """A job of each, put off as it may be, behind one that waits for what is returned last."""
    updater, ran = UpdateQueue(True, SimpleNamespace(state_stream=None, traffic=Traffic())), list[int]()
    updater._store.state_stream = Later(read)  # type: ignore[assignment]
    go, begun = threading.Event(), threading.Event()

    def work(index: int) -> None:
        begun.set()
        go.wait(60)
        ran.append(index)

    chunks = {index: chunk(index) for index in indices}
    for index, one in chunks.items():
        updater.submit([one], [OVER], lambda index=index: work(index), lambda done: None)
        begun.wait(60)
        updater.put_off(spare)
    return updater, ran, chunks, go


def test_the_longest_waiting_are_put_off_until_backward_is_over() -> None:
    updater, ran, _, go = put_off_jobs([9, 8, 7, 6, 5, 4], read={8})
    assert [job.index for job in updater._put_off] == [7, 6, 5]  # 9 runs, 8 is being read, two may wait
    go.set()
    while updater.settle_oldest() and updater._pending:
        continue
    assert ran == [9, 8, 4]
    assert all(not job.done() for job in updater._put_off)
    updater.reorder()
    updater.flush()
    assert ran == [9, 8, 4, 5, 6, 7]
    assert updater.stream.told == [[7, 6, 5]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("spare", "expected"), [(9, [9, 8, 7]), (0, [9, 8]), (-1, [9]), (-2, []), (-9, [])])
def test_those_whose_gradients_room_will_be_wanted_are_not_put_off(spare: int, expected: list[int]) -> None:
    updater, _, _, go = put_off_jobs([10, 9, 8, 7, 6, 5], read=set(), spare=spare)
    assert [job.index for job in updater._put_off] == expected
    go.set()
    updater.flush()


def test_one_that_is_put_off_and_wanted_is_the_next() -> None:
    updater, ran, chunks, go = put_off_jobs([9, 8, 7, 6, 5, 4], read={8})
    go.set()
    work = chunks[6].work
    assert work is not None
    work.settle()
    assert chunks[6].work is None
    assert 6 in ran and not {5, 7} & {*ran}
    updater.flush()
    assert sorted(ran) == [4, 5, 6, 7, 8, 9]
    assert not updater.settle_oldest()


def test_what_is_put_off_ends_with_everything_else() -> None:
    updater, ran, chunks, go = put_off_jobs([9, 8, 7, 6, 5, 4], read=set())
    go.set()
    updater.drop()
    assert sorted(ran) == [4, 5, 6, 7, 8, 9]
    assert all(one.work is None for one in chunks.values())


def test_a_job_that_fails_after_a_change_of_order_is_reported_by_whoever_wants_it() -> None:
    updater = UpdateQueue(True, SimpleNamespace(state_stream=None, traffic=Traffic()))
    go, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(60)

    def fail() -> None:
        raise OSError("broken")

    chunks = {index: chunk(index) for index in (3, 2, 1)}
    updater.submit([chunks[3]], [OVER], wait, lambda done: None)
    updater.submit([chunks[2]], [OVER], fail, lambda done: None)
    ended = list[bool]()
    updater.submit([chunks[1]], [OVER], lambda: None, ended.append)
    begun.wait(60)
    updater.reorder()
    go.set()
    work = chunks[2].work
    assert work is not None
    with pytest.raises(OSError, match="broken"):
        work.settle()
    assert "broken" in updater.failed
    updater.flush()
    assert ended == [True]
