"""Checksums of what was written, kept in memory: what comes back otherwise was changed on the disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ebbtide.disk.extents import Extent
from ebbtide.disk.vectors import Memory
from ebbtide.errors import IntegrityError
from ebbtide.kernels.crc import crc32


class Checksums:
    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[int, int], int]] = {}
        """By the start of an extent: (first, last) byte of a write and its sum."""
        self._lock = threading.RLock()

    def forget(self, extent: Extent, first: int = 0, last: int | None = None) -> None:
        """Of writes that touch [first, last)."""
        with self._lock:
            kept = self._kept.get(extent.start, {})
            end = extent.nbytes if last is None else last
            left = {key: value for key, value in kept.items() if key[1] <= first or end <= key[0]}
            self._kept[extent.start] = left
            if not left:
                del self._kept[extent.start]

    def keep(self, extent: Extent, first: int, last: int, memory: Sequence[Memory]) -> None:
        self.forget(extent, first, last)
        found = _sum(memory, 0, last - first)
        with self._lock:
            self._kept.setdefault(extent.start, {})[first, last] = found

    def verify(self, where: str, extent: Extent, first: int, last: int, memory: Sequence[Memory]) -> None:
        """Compares each write that lies whole in what was read."""
        with self._lock:
            kept = [one for one in self._kept.get(extent.start, {}).items() if first <= one[0][0]]
        for (begin, end), expected in kept:
            if end > last:
                continue
            found = _sum(memory, begin - first, end - first)
            if found != expected:
                raise IntegrityError(
                    f"{where}: bytes {begin} to {end} of the extent at {extent.start} came back changed ({end - begin} "
                    f"bytes): expected checksum {expected:08x}, found {found:08x}; check the disk, and start again from "
                    "a checkpoint"
                )


def _sum(memory: Sequence[Memory], first: int, last: int) -> int:
    found, start = 0, 0
    for address, nbytes in memory:
        begin, end = max(first - start, 0), min(last - start, nbytes)
        if begin < end:
            found = crc32(address + begin, end - begin, found)
        start += nbytes
    return found
