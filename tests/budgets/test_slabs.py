"""Memory that chunks live in: what is given up leaves its pages to what comes, and nobody's bytes change."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import mmap
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.devices import CpuBackend, pool
from ebbtide.devices.arena import Arena
from ebbtide.devices.pool import HUGE, Slabs, in_pool, keep_from_children, map_memory, trim, with_signatures
from ebbtide.kernels.compiler import KERNELS

SIZES = (1, 4096, HUGE // 3, HUGE // 2, HUGE - 1, HUGE, HUGE + 4097, 3 * HUGE, 5 * HUGE + 123)


@functools.cache
def own_library() -> ctypes.CDLL:
    """A pool of our own, in a second copy of the library: engines of other tests come and go in the process's."""
    with tempfile.TemporaryDirectory() as folder:
        library = KERNELS.find()
        assert library is not None
        return with_signatures(ctypes.CDLL(shutil.copy(library, folder)))


@contextmanager
def own_pool() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "native", own_library)
        trim(0)
        try:
            yield
        finally:
            trim(0)


@pytest.fixture
def own() -> Iterator[None]:
    with own_pool():
        yield


@pytest.fixture(params=["native", "mapped"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the native library and without."""
    if request.param == "mapped":
        monkeypatch.setattr(pool, "native", lambda: None)
    return str(request.param)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_fresh_memory_is_zero_and_large_memory_begins_at_a_huge_page() -> None:
    for size in SIZES:
        memory = map_memory(size)
        assert memory.numel() == size and not memory.any()
        assert size < HUGE or memory.data_ptr() % HUGE == 0


def test_memory_goes_back_with_the_last_tensor_that_uses_it() -> None:
    before = resident()
    memory = map_memory(64 << 20).fill_(1)
    part = memory[1 << 20 :]
    del memory
    assert (
        part[0] == part[-1] == 1
    )  # no reduction: what it allocates may stay in a heap that keeps its memory
    assert resident() > before + (48 << 20)
    del part
    assert resident() < before + (16 << 20)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 7)), min_size=1, max_size=40))
def test_what_is_out_keeps_its_bytes_whatever_is_given_up(steps: list[tuple[int, int]]) -> None:
    with own_pool():
        before = in_pool().live  # of an example that failed
        take_and_give(steps)
        assert in_pool().live == before


def take_and_give(steps: list[tuple[int, int]]) -> None:
    ours, most = Slabs(), in_pool().live
    out: list[tuple[torch.Tensor, int]] = []
    for number, (size, victim) in enumerate(steps):
        if len(out) > victim:
            slab, value = out.pop(victim)
            assert bool((slab == value).all())
            del slab
        slab = ours.take(size)
        assert slab.numel() == size and ours.owns(slab.untyped_storage()._cdata)
        assert size <= HUGE // 2 or slab.data_ptr() % mmap.PAGESIZE == 0
        out.append((slab.fill_(number % 251), number % 251))
        del slab
        most = max(most, in_pool().live)
        assert in_pool().live + in_pool().kept <= most
    starts = sorted((slab.data_ptr(), slab.numel()) for slab, _ in out)
    assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(starts))
    for slab, value in out:
        assert bool((slab == value).all())


def test_pages_of_what_is_given_up_are_not_faulted_in_again(own: None) -> None:
    ours = Slabs()
    large = ours.take(16 * HUGE).fill_(7)
    del large
    small = [ours.take(4 * HUGE) for _ in range(2)]
    parts = [ours.take(HUGE // 2) for _ in range(16)]
    # Fresh ones would be zero.
    assert all(bool((slab == 7).all()) for slab in small + parts)
    mapped = in_pool().mapped
    del small, parts
    assert bool((ours.take(16 * HUGE) == 7).all())
    assert in_pool().mapped == mapped


@pytest.mark.parametrize("rest", [HUGE // 2, HUGE // 4 + 4096])
def test_what_is_less_than_a_huge_page_is_not_faulted_in_again_either(own: None, rest: int) -> None:
    """Activations of odd sizes, whose huge pages gradients have between two passes."""
    ours = Slabs()
    activations = [ours.take(HUGE + HUGE // 2).fill_(7) for _ in range(8)]
    mapped = in_pool().mapped
    activations.clear()
    gradients = [ours.take(2 * HUGE) for _ in range(4)]
    assert all(bool((slab == 7).all()) for slab in gradients)
    gradients.clear()
    again = [ours.take(HUGE + rest) for _ in range(8)]
    assert all(bool((slab == 7).all()) for slab in again)
    assert in_pool().mapped == mapped


def test_rests_make_up_whole_pages_before_fresh_memory_does(own: None) -> None:
    """Activations of odd sizes, and logits that want all that those leave; over and over."""
    ours = Slabs()
    for fresh in (True, False, False):
        activations = [ours.take(HUGE + HUGE // 2) for _ in range(8)]
        assert fresh or all(bool((slab == 7).all()) for slab in activations)
        for slab in activations:
            slab.fill_(7)
        mapped = in_pool().mapped
        del activations, slab
        logits = ours.take(12 * HUGE)
        assert bool((logits == 7).all())
        assert in_pool().mapped == mapped and in_pool().kept == 0
        del logits


def test_huge_pages_are_cut_before_fresh_memory_takes_their_place(own: None) -> None:
    ours = Slabs()
    large = ours.take(12 * HUGE).fill_(7)
    mapped = in_pool().mapped
    del large
    odd = [ours.take(HUGE + HUGE // 2) for _ in range(8)]
    assert all(bool((slab == 7).all()) for slab in odd)
    assert in_pool().mapped == mapped and in_pool().kept == 0


def test_parts_of_a_page_leave_it_when_the_last_of_them_goes(own: None) -> None:
    ours = Slabs()
    parts = [ours.take(HUGE // 3 - mmap.PAGESIZE) for _ in range(6)]
    held = in_pool()
    assert held.kept == 0
    pages = {part.data_ptr() // HUGE for part in parts}
    assert len(pages) == 2
    lone = parts[0]
    del parts
    assert in_pool().kept == HUGE and in_pool().live == held.live - HUGE
    del lone
    assert in_pool().kept == 2 * HUGE


def test_no_more_is_kept_than_was_ever_out(own: None) -> None:
    ours = Slabs()
    before = resident()
    for size in (16 * HUGE, 5 * HUGE + 123, 3 * HUGE, HUGE // 2, 16 * HUGE, HUGE + 4097):
        for _ in range(3):
            held = [ours.take(size).fill_(1) for _ in range(16 * HUGE // size)]
            held.clear()
            assert resident() < before + 16 * HUGE + (8 << 20)
    trim(2 * HUGE)
    assert in_pool().kept <= 2 * HUGE
    assert resident() < before + 2 * HUGE + (8 << 20)


def test_who_still_looks_at_what_was_given_up_finds_it(either: str) -> None:
    ours = Slabs()
    slab = ours.take(4 * HUGE).fill_(3)
    key = slab.untyped_storage()._cdata
    seen = slab[5:]
    del slab
    assert ours.owns(key)
    other = ours.take(3 * HUGE)
    other.fill_(4)
    assert bool((seen == 3).all())
    del seen
    assert not ours.owns(key)


def test_many_threads_take_and_give_at_once(own: None) -> None:
    ours, wrong = Slabs(), list[str]()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for number in range(300):
            value = (seed * 31 + number) % 251
            held.append((ours.take(draw.choice(SIZES[:-2])).fill_(value), value))
            if len(held) > 6:
                slab, value = held.pop(draw.randrange(len(held)))
                if not bool((slab == value).all()):
                    wrong.append(f"thread {seed}, step {number}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert in_pool().live == 0


def test_memory_that_is_not_there_is_refused_and_the_pool_goes_on(own: None) -> None:
    ours = Slabs()
    ours.take(3 * HUGE)
    with pytest.raises(MemoryError, match=r"mmap of \d+ bytes"):
        ours.take(1 << 62)
    assert ours.take(3 * HUGE).numel() == 3 * HUGE


def test_a_backend_that_is_closed_keeps_nothing(own: None) -> None:
    backend = CpuBackend()
    memory = backend.allocate("device", 32 * HUGE).fill_(1)
    backend.free("device", memory)
    del memory
    assert in_pool().kept == 32 * HUGE
    backend.close()
    assert in_pool().kept == 0


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_that_an_evaluation_asked_for_can_be_trained(own: None, tier: str) -> None:
    """Chunks come back while torch.inference_mode is on, and later passes have their memory."""
    backend = CpuBackend()
    with torch.inference_mode():
        first = backend.allocate(tier, 12345)
        assert not first.is_inference() and not first[4:].is_inference()
        place = first.data_ptr()
        backend.free(tier, first)
        del first
        again = backend.allocate(tier, 12345)
    assert again.data_ptr() == place and not again.is_inference()
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.data = again[:12].view(torch.float32)
    (parameter * parameter).sum().backward()
    assert parameter._version == 0
    backend.close()


def test_registered_memory_that_an_evaluation_asked_for_can_be_trained() -> None:
    arena = Arena(map_memory, lambda segment: True, least=HUGE)
    with torch.inference_mode():
        memory = arena.take(12345)
        assert not memory.is_inference()
        arena.put(memory)
        assert not arena.take(4096).is_inference()


def test_a_child_has_nothing_of_memory_that_is_kept_from_it() -> None:
    """What a card has registered is copied by every fork, of a loader's workers say; a child that looks there ends."""
    kept, plain = map_memory(1 << 20), map_memory(1 << 20)
    keep_from_children(kept)
    kept.fill_(3)
    for memory, there in ((kept, False), (plain, True)):
        child = os.fork()
        if not child:
            faulthandler.disable()
            ctypes.string_at(memory.data_ptr(), 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV) != there
    assert int(kept.sum()) == 3 << 20
