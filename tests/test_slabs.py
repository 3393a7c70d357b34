"""Memory that chunks live in: what is given up leaves its pages to what comes, and nobody's bytes change."""

from __future__ import annotations

import gc
import itertools
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.backend import CpuBackend, pages
from ebbtide.backend.arena import Arena
from ebbtide.backend.pages import HUGE, map_memory
from ebbtide.backend.slabs import Slabs

SIZES = (1, 4096, HUGE - 1, HUGE, HUGE + 4097, 3 * HUGE, 5 * HUGE + 123)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_fresh_memory_is_zero_and_large_memory_begins_at_a_huge_page() -> None:
    for count in SIZES:
        memory = map_memory(count)
        assert memory.numel() == count and not memory.any()
        assert count < HUGE or memory.data_ptr() % HUGE == 0


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
    slabs = Slabs()
    out: list[tuple[torch.Tensor, int]] = []
    for number, (count, victim) in enumerate(steps):
        if len(out) > victim:
            slab, value = out.pop(victim)
            assert bool((slab == value).all())
            slabs.put(slab)
        slab = slabs.take(count)
        assert slab.numel() == count and slabs.owns(slab.untyped_storage()._cdata)
        out.append((slab.fill_(number % 251), number % 251))
    starts = sorted((slab.data_ptr(), slab.numel()) for slab, _ in out)
    assert all(one + count <= other for (one, count), (other, _) in itertools.pairwise(starts))
    for slab, value in out:
        assert bool((slab == value).all())


def test_pages_of_what_is_given_up_are_not_faulted_in_again() -> None:
    if not pages.MOVABLE:
        pytest.skip("this system has no mremap")
    slabs = Slabs()
    large = slabs.take(16 * HUGE).fill_(7)
    slabs.put(large)
    del large
    small = [slabs.take(4 * HUGE) for _ in range(4)]
    # Fresh ones would be zero.
    assert all(bool((slab == 7).all()) for slab in small)
    for slab in small:
        slabs.put(slab)
    del slab, small
    assert bool((slabs.take(16 * HUGE) == 7).all())


def test_no_more_is_kept_than_was_ever_out() -> None:
    slabs = Slabs()
    before = resident()
    for count in (16 * HUGE, 5 * HUGE + 123, 3 * HUGE, 16 * HUGE, HUGE + 4097):
        for _ in range(3):
            held = [slabs.take(count).fill_(1) for _ in range(16 * HUGE // count)]
            while held:
                slabs.put(held.pop())
            assert resident() < before + 16 * HUGE + (8 << 20)
    slabs.trim(2 * HUGE)
    assert resident() < before + 2 * HUGE + (8 << 20)


def test_who_still_looks_at_what_was_given_up_finds_it() -> None:
    slabs = Slabs()
    slab = slabs.take(4 * HUGE).fill_(3)
    seen = slab[5:]
    slabs.put(slab)
    del slab
    other = slabs.take(3 * HUGE)
    other.fill_(4)
    assert bool((seen == 3).all())


def test_without_mappings_to_spare_pages_are_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    if not pages.MOVABLE:
        pytest.skip("this system has no mremap")
    slabs = Slabs()
    slabs.put(slabs.take(4 * HUGE).fill_(7))
    monkeypatch.setattr(pages._libc, "mremap", lambda *_: pages._FAILED)
    before = resident()
    slab = slabs.take(3 * HUGE)
    assert not slab.any()
    slab.fill_(1)
    assert resident() <= before + (1 << 20)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_that_an_evaluation_asked_for_can_be_trained(tier: str) -> None:
    """Chunks come back while torch.inference_mode is on, and later passes have their memory."""
    backend = CpuBackend()
    with torch.inference_mode():
        first = backend.allocate(tier, 12345)
        assert not first.is_inference() and not first[4:].is_inference()
        backend.free(tier, first)
        again = backend.allocate(tier, 12345)
    assert again is first and not again.is_inference()
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


def test_slabs_that_nobody_holds_give_their_loose_pages_back() -> None:
    slabs = Slabs()
    slabs.put(slabs.take(32 * HUGE).fill_(1))
    slabs.take(HUGE)
    before = resident()
    del slabs
    gc.collect()
    assert resident() < before - 24 * HUGE
