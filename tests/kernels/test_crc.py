"""Checksums: zlib's, whoever computes them."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.kernels import crc


class Narrow:
    """The native one as it is on processors that multiply 16 bytes at once."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def crc_of(self, before: int, address: int, nbytes: int) -> int:
        return int(self._native.crc_by(16, before, address, nbytes))

    def crc_each(self, address: int, count: int, nbytes: int, found: int) -> None:
        into = (ctypes.c_uint32 * count).from_address(found)
        into[:] = [self.crc_of(0, address + place * nbytes, nbytes) for place in range(count)]


@pytest.fixture(params=["native", "narrow", "zlib"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    native = crc._native()
    if request.param == "zlib":
        monkeypatch.setattr(crc, "_native", lambda: None)
    elif request.param == "narrow":
        if native is None:
            pytest.skip("this processor multiplies nothing without carries")
        monkeypatch.setattr(crc, "_native", lambda: Narrow(native))
    return str(request.param)


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_length_and_address(how: str) -> None:
    memory = some_bytes(1400)
    content = memory.numpy().tobytes()
    for first in (0, 1, 7, 16):
        for count in (*range(600), 1000, 1279, 1280, 1384):
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
    memory = some_bytes(577)
    whole = crc.crc32(memory.data_ptr(), 577)
    for at in range(577):
        memory[at] ^= 1 << at % 8
        assert crc.crc32(memory.data_ptr(), 577) != whole
        memory[at] ^= 1 << at % 8


@pytest.mark.parametrize("count", [0, 1, 5])
def test_of_each_of_many(how: str, count: int) -> None:
    memory = some_bytes(count * 96 + 3)[3:]
    content = memory.numpy().tobytes()
    found = crc.crc32_each(memory.data_ptr(), count, 96)
    assert list(found) == [zlib.crc32(content[first : first + 96]) for first in range(0, count * 96, 96)]
