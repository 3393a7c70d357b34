"""Mapped memory whose huge pages can move from one mapping to another.

A fresh page is dear: the kernel zeroes it, and on a virtual machine its host may have to find it first. So memory that
is given up leaves its huge pages to what is mapped next: `mremap` moves their entries in the page table; nothing is
copied or zeroed, and they stay huge, which direct transfers to disks want. Contents of such memory are undefined.

A mapping lives as long as a tensor that uses it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import Any

import torch

from ebbtide.units import round_up

HUGE = 2 << 20
APART = 1 << 14
"""Pages that have moved may be a mapping each to the kernel, and it has no more than 65,530 for a process."""
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FREE_ONLY = 0x100000
"""MAP_FIXED_NOREPLACE."""
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MOVE = 0x1 | 0x2
"""MREMAP_MAYMOVE and MREMAP_FIXED."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MOVABLE = sys.platform.startswith("linux") and hasattr(_libc, "mremap") and hasattr(mmap, "MADV_HUGEPAGE")
if MOVABLE:
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]


def map_memory(count: int) -> torch.Tensor:
    """Fresh zeroed memory, in huge pages where it is large."""
    return Mapping(count).tensor()


class Mapping:
    """Anonymous memory, for one tensor: it is mapped until the last one that shares the tensor's storage is gone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.nbytes = round_up(max(count, 1), mmap.PAGESIZE)
        self.address = _map(self.nbytes)
        self._end: weakref.finalize[..., Any] | None = None
        self._moved: list[int] = []

    def tensor(self) -> torch.Tensor:
        """To be asked for once."""
        buffer = (ctypes.c_char * self.nbytes).from_address(self.address)
        self._end = weakref.finalize(buffer, _unmap, self.address, self.nbytes, self._moved)
        # At exit the process gives everything back, and tensors may be looked at until then.
        self._end.atexit = False
        # Whoever asks, it is used again and again, and what is made in inference mode could never be trained.
        with torch.inference_mode(False):
            return torch.frombuffer(buffer, dtype=torch.uint8, count=self.count)

    @property
    def pages(self) -> int:
        """Huge pages that may be moved."""
        return self.nbytes // HUGE if MOVABLE else 0

    @property
    def wanted(self) -> int:
        """Pages of others that it could have in the place of fresh ones."""
        return max(0, min(self.pages, APART - len(_moved)))

    def take_apart(self) -> list[int]:
        """The addresses of its huge pages, which are the caller's now; the rest is given back. Nobody may look at the
        tensor any more."""
        if self._end is not None:
            self._end.detach()
        _moved.difference_update(self._moved)
        whole = self.pages * HUGE
        if whole < self.nbytes:
            _libc.munmap(self.address + whole, self.nbytes - whole)
        return list(range(self.address, self.address + whole, HUGE))

    def move_in(self, pages: list[int]) -> None:
        """Puts these huge pages in the place of its own first ones."""
        for number, page in enumerate(pages):
            place = self.address + number * HUGE
            _move(page, place)
            self._moved.append(place)
        _moved.update(self._moved)


_moved: set[int] = set()
"""Where pages are that came from elsewhere."""


def give_back(pages: list[int]) -> None:
    for page in pages:
        _libc.munmap(page, HUGE)
    pages.clear()


def _map(nbytes: int) -> int:
    """Where it is large it begins at a huge page."""
    spare = HUGE if nbytes >= HUGE else 0
    found = _libc.mmap(None, nbytes + spare, _READ_WRITE, _FLAGS, -1, 0)
    if found == _FAILED:
        _raise("mmap", nbytes)
    start = round_up(found, HUGE) if spare else found
    if start > found:
        _libc.munmap(found, start - found)
    if found + nbytes + spare > start + nbytes:
        _libc.munmap(start + nbytes, found + spare - start)
    if spare and hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: the kernel has no huge pages for shared mappings unless an administrator asks for them.
        _libc.madvise(start, nbytes, mmap.MADV_HUGEPAGE)
    return start


def _unmap(address: int, nbytes: int, moved: list[int]) -> None:
    _libc.munmap(address, nbytes)
    _moved.difference_update(moved)


def _move(page: int, place: int) -> None:
    if _libc.mremap(page, HUGE, HUGE, _MOVE, place) != _FAILED:
        return
    # What was there may be gone (too many mappings, say): a fresh page takes its place.
    found = _libc.mmap(place, HUGE, _READ_WRITE, _FLAGS | _FREE_ONLY, -1, 0)
    if found == _FAILED and ctypes.get_errno() != errno.EEXIST:
        _raise("mmap", HUGE)
    _libc.madvise(place, HUGE, mmap.MADV_HUGEPAGE)
    _libc.munmap(page, HUGE)


def _raise(call: str, nbytes: int) -> None:
    number = ctypes.get_errno()
    raise MemoryError(
        f"{call} of {nbytes} bytes: {os.strerror(number)}; the machine has no memory left to map"
    )
