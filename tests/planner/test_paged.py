"""What plans count for copies on the host is what the host reserves for them, in pages or not, and has room for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ebbtide
import zoo
from ebbtide.devices import CpuBackend
from ebbtide.errors import BudgetError
from ebbtide.layout import ITEMSIZE, TensorSpec, build_layout
from ebbtide.memory.budget import Ledger
from ebbtide.memory.host_space import HostSpace
from ebbtide.planner.host_side import Paged, on_host
from ebbtide.planner.shape import ModelShape
from harness import config_of
from sampling import few

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

SIZES = st.lists(st.tuples(st.integers(1, 9000), st.sampled_from(list(DTYPES))), min_size=1, max_size=12)


@given(SIZES, st.sampled_from(["page", "chunk", "tensor"]), st.lists(st.integers(0, 40), max_size=30))
def test_the_host_reserves_what_is_counted(sizes: list[tuple[int, str]], cut: str, turns: list[int]) -> None:
    specs = [TensorSpec(f"t{i}", (size,), (1,), dtype) for i, (size, dtype) in enumerate(sizes)]
    layout = build_layout(specs, cut, None if cut == "tensor" else 8192)
    parameters = tuple(chunk.size * ITEMSIZE[chunk.dtype] for chunk in layout.chunks)
    shape = ModelShape((), (), parameters, parameters, parameters, (), *layout.stored)
    ledger = Ledger({"device": 0, "host": 1 << 30, "ssd": 0})
    space = HostSpace(layout, CpuBackend(), ledger)
    # Moments: four bytes an element, whatever the parameters have.
    copies = Paged(shape, tuple(chunk.size * 4 for chunk in layout.chunks))
    there: set[int] = set()
    count = 0
    for turn in turns:
        index = turn % len(layout.chunks)
        if index in there:
            there.remove(index)
            space.release("momentum", index, torch.float32)
            count -= copies.take(index)
        else:
            there.add(index)
            space.acquire("momentum", index, torch.float32)
            count += copies.put(index)
        assert count == ledger.tags["host"].get("momentum", 0)
    assert on_host(shape, there, tuple(chunk.size * 4 for chunk in layout.chunks)) == count
    for index in there:
        space.release("momentum", index, torch.float32)


def test_a_page_that_goes_with_a_neighbour_is_made_room_for() -> None:
    """Room may come from a chunk that has a page in common with the one that it is for: that page is needed, too."""
    module = nn.Sequential(*(nn.Linear(*(96, 288)[:: 1 - 2 * (place % 2)]) for place in range(4)))
    config = config_of(layout="page", chunk_size="100KiB", precision="fp32")
    engine = ebbtide.initialize(module, config)
    try:
        engine.backward(engine(torch.ones(2, 96)).square().mean())
        engine.step()
        store, room = engine._session.store, engine._session.room
        chunks = [store.get("param", index) for index in range(len(store.layout.chunks))]
        for chunk, *others in itertools.permutations(chunks, 3):
            store.ledger.budgets["host"] = 1 << 30
            for other in chunks:
                if other.host is not None:
                    store.drop(other, "host")
            for other in others:
                store.mirror(other)
            # As much as the others have, and what the chunk needs beside them, but for one byte.
            store.ledger.budgets["host"] = (
                store.ledger.reserved["host"] + store.room_needed(chunk, "host") - 1
            )
            room.make_for(chunk, "host")
            store.mirror(chunk)
        engine.check_integrity()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("layout", "size", "width", "device", "hosts", "placement"),
    [
        ("page", "8KiB", 96, 258_058, (4_310_000, 4_700_000), "host"),
        ("chunk", "16KiB", 48, 119_240, (1_660_000, 1_780_000), "host"),
        ("chunk", "16KiB", 48, 3_000_000, (1_570_000, 1_780_000), "static"),
    ],
)
def test_gradients_that_wait_for_others_of_their_chunk_have_room_on_the_host(
    layout: str, size: str, width: int, device: int, hosts: tuple[int, int], placement: str
) -> None:
    """Of the smallest hosts the plan refuses those that are too small for that. Where one of a chunk never comes, as in
    the smaller model, the others wait to the end of backward. Where parameters are static they have copies there."""
    config = config_of(layout=layout, chunk_size=size, placement=placement, updates="in-backward", clip=None)
    trained = refused = 0
    for host in few(range(*hosts, 15_000), 7):
        budgets = {"device": {"kind": "cpu", "memory": device}, "host": {"memory": host}}
        torch.manual_seed(0)
        engine = ebbtide.initialize(zoo.Blocks(5, width, unused=width == 48), config | budgets)
        try:
            for step in range(3):
                ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(step))
                engine.backward(engine(ids))
                engine.step()
            trained += 1
        except BudgetError as error:
            assert "raise host.memory" in str(error)
            refused += 1
        finally:
            engine.close()
    assert trained and refused
