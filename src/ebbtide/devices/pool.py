"""Memory of chunks, from one pool of the process: fresh memory is dear, so the next chunk gets what the last one left.

Where torch's own tensors are the pool's, too (`devices.heap`), activations and chunks use the same memory in turn.
Without the native library every slab is mapped anew, and unmapped when the last tensor that shares its storage is gone.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ebbtide.kernels.compiler import load
from ebbtide.units import round_up

HUGE = 2 << 20
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
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


def map_memory(count: int, end: Callable[[], object] = lambda: None) -> torch.Tensor:
    """Fresh zeroed memory, in huge pages where it is large; `end` is called when nobody looks at it any more."""
    nbytes = round_up(max(count, 1), mmap.PAGESIZE)
    address = _map(nbytes)

    def unmap() -> None:
        end()
        _libc.munmap(address, nbytes)

    return tensor_at(address, count, unmap)


def keep_from_children(memory: torch.Tensor) -> None:
    """A process that is forked from now on has nothing there. `memory`: as `map_memory` gave it."""
    if hasattr(mmap, "MADV_DONTFORK"):
        _libc.madvise(memory.data_ptr(), round_up(max(memory.numel(), 1), mmap.PAGESIZE), mmap.MADV_DONTFORK)


def tensor_at(address: int, count: int, end: Callable[[], object]) -> torch.Tensor:
    """Bytes that are there already; `end` is called when nobody looks at them any more."""
    if torch.is_inference_mode_enabled():
        # Whoever asks, it is used again and again, and what is made in inference mode could never be trained.
        with torch.inference_mode(False):
            return tensor_at(address, count, end)
    buffer = (ctypes.c_char * max(count, 1)).from_address(address)
    watch = _Watch(buffer, _gone)
    watch.end = end
    _watched[id(watch)] = watch
    return torch.frombuffer(buffer, dtype=torch.uint8, count=count)


class _Watch(weakref.ref[ctypes.Array[ctypes.c_char]]):
    """Calls `end` when its buffer is gone. Not at exit, for the process gives everything back, and tensors may be looked
    at until then. `weakref.finalize` takes a few times as long, and chunks come and go in every step."""

    __slots__ = ("end",)
    end: Callable[[], object]


_watched: dict[int, _Watch] = {}
"""By identity: what they watch has no hash."""


def _gone(watch: weakref.ref[ctypes.Array[ctypes.c_char]]) -> None:
    assert isinstance(watch, _Watch)
    del _watched[id(watch)]
    watch.end()


def _map(nbytes: int) -> int:
    """Where it is large it begins at a huge page."""
    spare = HUGE if nbytes >= HUGE else 0
    found = _libc.mmap(None, nbytes + spare, _READ_WRITE, _FLAGS, -1, 0)
    if found == _FAILED:
        raise out_of_memory(nbytes, ctypes.get_errno())
    start = round_up(found, HUGE) if spare else found
    if start > found:
        _libc.munmap(found, start - found)
    if found + nbytes + spare > start + nbytes:
        _libc.munmap(start + nbytes, found + spare - start)
    if spare and hasattr(mmap, "MADV_HUGEPAGE"):
        # Private: the kernel has no huge pages for shared mappings unless an administrator asks for them.
        _libc.madvise(start, nbytes, mmap.MADV_HUGEPAGE)
    return start


def out_of_memory(nbytes: int, number: int) -> MemoryError:
    return MemoryError(
        f"mmap of {nbytes} bytes: {os.strerror(number)}; the machine has no memory left to map"
    )


class Slabs:
    """Those of one backend."""

    def __init__(self) -> None:
        self._ours: set[int] = set()
        """Storages that are still looked at."""
        # The survivors have no use for what these were.
        weakref.finalize(self, trim, 0).atexit = False

    def take(self, count: int) -> torch.Tensor:
        """The block that is taken stays taken until no tensor views it."""
        ours, keys = self._ours, list[int]()
        slab = _taken(count, lambda: ours.difference_update(keys))
        keys.append(slab.untyped_storage()._cdata)
        ours.update(keys)
        return slab

    def owns(self, storage: int) -> bool:
        return storage in self._ours


def _taken(count: int, end: Callable[[], None]) -> torch.Tensor:
    pool = native()
    if pool is None:
        return map_memory(count, end)
    address = pool.pages_take(count)
    if address is None:
        raise out_of_memory(count, errno.ENOMEM)

    def give() -> None:
        end()
        pool.pages_give(address)

    return tensor_at(address, count, give)


def trim(most: int) -> None:
    """Gives back to the system what is kept for reuse until no more than `most` bytes of it are left."""
    pool = native()
    if pool is not None:
        pool.pages_trim(most)


@dataclass(frozen=True)
class Pool:
    live: int
    """Bytes that are out."""
    kept: int
    """Bytes that are kept for reuse."""
    mapped: int
    """Bytes that were ever fresh."""


def in_pool() -> Pool:
    pool = native()
    found = (ctypes.c_size_t * 3)()
    if pool is not None:
        pool.pages_count(found)
    return Pool(*found)


def users(memory: torch.Tensor) -> int:
    """How many look at a tensor's storage."""
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata)


@functools.cache
def native() -> ctypes.CDLL | None:
    library = load()
    return None if library is None else with_signatures(library)


def with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    library.pages_take.argtypes, library.pages_take.restype = (ctypes.c_size_t,), ctypes.c_void_p
    library.pages_give.argtypes, library.pages_give.restype = (ctypes.c_void_p,), ctypes.c_int
    library.pages_trim.argtypes, library.pages_trim.restype = (ctypes.c_size_t,), None
    library.pages_count.argtypes, library.pages_count.restype = (ctypes.c_void_p,), None
    return library
