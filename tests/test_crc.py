"""Checksums: zlib's, whoever computes them."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.kernels import crc


@pytest.fixture(params=["native", "zlib"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "zlib":
        monkeypatch.setattr(crc, "_native", lambda: None)
    return str(request.param)


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_length_and_address(how: str) -> None:
    memory = some_bytes(700)
    content = memory.numpy().tobytes()
    for first in (0, 1, 7, 16):
        for count in (*range(300), 600):
            part = content[first : first + count]
            assert crc.crc32(memory.data_ptr() + first, count) == zlib.crc32(part), (first, count)


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 5000), max_size=5), seed=st.integers(0, 100))
def test_parts_one_after_the_other(cuts: list[int], seed: int) -> None:
    memory = some_bytes(5000, seed)
    found, start = 0, 0
    for end in (*sorted(cuts), 5000):
        found = crc.crc32(memory.data_ptr() + start, end - start, found)
        start = end
    assert found == zlib.crc32(memory.numpy().tobytes())


def test_every_bit_counts(how: str) -> None:
    memory = some_bytes(257)
    whole = crc.crc32(memory.data_ptr(), 257)
    for at in range(257):
        memory[at] ^= 1 << at % 8
        assert crc.crc32(memory.data_ptr(), 257) != whole
        memory[at] ^= 1 << at % 8


@pytest.mark.parametrize("count", [0, 1, 5])
def test_of_each_of_many(how: str, count: int) -> None:
    memory = some_bytes(count * 96 + 3)[3:]
    content = memory.numpy().tobytes()
    found = crc.crc32_each(memory.data_ptr(), count, 96)
    assert list(found) == [zlib.crc32(content[first : first + 96]) for first in range(0, count * 96, 96)]
