"""Registered host memory: what was asked for in one size serves others; what is registered stays mapped."""

from __future__ import annotations

import gc
import itertools
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.devices import cuda_device
from ebbtide.devices.arena import SEGMENT, Arena
from ebbtide.devices.cuda_device import CudaBackend
from ebbtide.errors import BudgetError

PAGE = 4096


class Source:
    """Makes segments, and knows which it was told to give up."""

    def __init__(self, keeps: bool = False) -> None:
        self.made: list[torch.Tensor] = []
        self.ended: list[torch.Tensor] = []
        self._keeps = keeps
        self.refuses = False

    def make(self, count: int) -> torch.Tensor:
        if self.refuses:
            raise MemoryError(count)
        self.made.append(torch.empty(count, dtype=torch.uint8))  # nobody touches it, so it takes no memory
        return self.made[-1]

    def end(self, segment: torch.Tensor) -> bool:
        if not self._keeps:
            self.ended.append(segment)
        return not self._keeps

    @property
    def asked(self) -> int:
        return sum(segment.numel() for segment in self.made)

    @property
    def held(self) -> int:
        return self.asked - sum(segment.numel() for segment in self.ended)


def span(memory: torch.Tensor) -> tuple[int, int]:
    first = memory.untyped_storage().data_ptr() + int(memory.storage_offset())
    return first, first + max(memory.numel(), 1)


def test_many_sizes_take_no_more_than_one() -> None:
    source = Source()
    arena = Arena(source.make, source.end)
    for size in range(1, 201):
        memory = arena.take(size << 20)
        assert memory.numel() == size << 20
        arena.put(memory)
    assert source.asked == SEGMENT and arena.free_bytes() == SEGMENT


def test_what_is_out_in_many_sizes_leaves_room_for_the_next_ones() -> None:
    """As in passes over batches that are padded to their own length: all that a pass keeps, then the next one's."""
    source = Source()
    arena = Arena(source.make, source.end)
    for length in range(100, 300):
        kept = [arena.take(length << 15) for _ in range(64)]  # up to 600 MiB
        for memory in kept:
            arena.put(memory)
    assert source.asked == SEGMENT and arena.free_bytes() == SEGMENT


@pytest.mark.parametrize("keeps", [False, True])
def test_sizes_beyond_a_segment_replace_what_is_too_small(keeps: bool) -> None:
    source = Source(keeps)
    arena = Arena(source.make, source.end, least=PAGE)
    for pages in range(1, 50):
        arena.put(arena.take(pages * PAGE))
    assert source.held == (source.asked if keeps else 49 * PAGE) == arena.free_bytes()


def test_a_segment_of_which_something_is_out_stays() -> None:
    source = Source()
    arena = Arena(source.make, source.end, least=4 * PAGE)
    small = arena.take(PAGE)
    large = arena.take(16 * PAGE)
    assert not source.ended
    arena.put(small)
    arena.take(17 * PAGE)
    assert [segment.numel() for segment in source.ended] == [4 * PAGE]
    arena.put(large)
    assert arena.free_bytes() == 16 * PAGE


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30 * PAGE), st.integers(0, 9)), min_size=1, max_size=80),
    st.sampled_from([PAGE, 8 * PAGE, 64 * PAGE]),
)
def test_parts_never_overlap_and_all_is_free_again(steps: list[tuple[int, int]], least: int) -> None:
    places = []
    for _ in range(2):
        source = Source()
        arena = Arena(source.make, source.end, least)
        out: list[torch.Tensor] = []
        found = []
        for count, victim in steps:
            if len(out) > victim:
                arena.put(out.pop(victim))
            memory = arena.take(count)
            assert memory.numel() == count
            number = next(
                n for n, s in enumerate(source.made) if s.data_ptr() == memory.untyped_storage().data_ptr()
            )
            found.append((number, int(memory.storage_offset())))
            out.append(memory)
            spans = sorted(map(span, out))
            assert all(last <= first for (_, last), (first, _) in itertools.pairwise(spans))
            assert all(segment is not source.made[number] for segment in source.ended)
        while out:
            arena.put(out.pop())
        assert arena.free_bytes() == source.held
        places.append(found)
    assert places[0] == places[1]


def test_an_interrupt_while_memory_is_given_back_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    arena = Arena(source.make, source.end)
    memory, lock = arena.take(100), threading.Lock()

    class Interrupted:
        """Ctrl-C, right after the lock was got."""

        def acquire(self, blocking: bool = True) -> bool:
            lock.acquire(blocking)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena, "_lock", Interrupted())
        with suppress(KeyboardInterrupt):
            arena.put(memory)
    monkeypatch.setattr(arena, "_lock", lock)
    assert not lock.locked()
    assert arena.free_bytes() == SEGMENT


def test_a_source_that_refuses_leaves_the_books_as_they_were() -> None:
    source = Source()
    arena = Arena(source.make, source.end, least=4 * PAGE)
    held = arena.take(PAGE)
    source.refuses = True
    with pytest.raises(MemoryError):
        arena.take(5 * PAGE)
    arena.put(held)
    assert arena.free_bytes() == 4 * PAGE and arena.take(4 * PAGE).numel() == 4 * PAGE


# -- the CUDA back end, with a driver that only keeps books -------------------------------------------


class Driver:
    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        if self.refuses:
            return 2
        self.registered[address] = count
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def has(self, memory: torch.Tensor) -> bool:
        first, last = span(memory)
        return any(start <= first and last <= start + count for start, count in self.registered.items())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(cuda_device, "_expandable_segments", lambda: None)
    monkeypatch.setattr(cuda_device, "_open_products", lambda device: None)
    monkeypatch.setattr(cuda_device, "_forget_last_error", lambda: None)
    monkeypatch.setattr(
        cuda_device, "REGISTERED", Arena(cuda_device._register, cuda_device._unregister, least=1 << 20)
    )
    return made


def test_registered_memory_outlives_the_back_end_that_asked_for_it(driver: Driver) -> None:
    first = CudaBackend()
    memory = first.allocate("host", 300_000)
    place = span(memory)
    memory.fill_(1)
    first.free("host", memory)
    del first, memory
    gc.collect()
    second = CudaBackend()
    again = second.allocate("host", 500_000)
    assert len(driver.registered) == 1 and driver.has(again)
    assert span(again)[0] == place[0] and again[:300_000].all()  # it is what was mapped before
    assert second.held() == {"device": 0, "host": 500_000}
    second.free("host", again)
    assert second.held() == {"device": 0, "host": 0}


def test_what_is_too_small_is_unregistered_before_it_is_unmapped(driver: Driver) -> None:
    backend = CudaBackend()
    for size in (1 << 20, 2 << 20, 3 << 20):
        memory = backend.allocate("host", size)
        assert driver.has(memory)
        backend.free("host", memory)
    assert list(driver.registered.values()) == [3 << 20]


def test_memory_that_was_refused_is_not_counted(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    driver.refuses = True
    with pytest.raises(BudgetError, match="register"):
        backend.allocate("host", 4096)

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        backend.allocate("device", 4096)
    assert backend.held() == {"device": 0, "host": 0}
