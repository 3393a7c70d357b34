"""What plans count for copies on the host is what the host reserves for them, in pages or not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.backend import CpuBackend
from ebbtide.layout import ITEMSIZE, TensorSpec, build_layout
from ebbtide.memory.host import HostSpace
from ebbtide.memory.ledger import Ledger
from ebbtide.plan.paged import Paged, on_host
from ebbtide.plan.shape import ModelShape

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
