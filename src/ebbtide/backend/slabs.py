"""Memory of chunks, from the pool of the process: fresh memory is dear, so what one leaves the next one has.

Where torch's own tensors are the pool's, too (`backend.heap`), what activations leave is for chunks, and the other way
round. Without the native library every slab is mapped anew.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ebbtide.backend.pages import map_memory, out_of_memory, tensor_at
from ebbtide.kernels.build import load


class Slabs:
    """Those of one backend."""

    def __init__(self) -> None:
        self._ours: set[int] = set()
        """Storages that are still looked at."""
        # Whoever is left has no use for what these were.
        weakref.finalize(self, trim, 0).atexit = False

    def take(self, count: int) -> torch.Tensor:
        """Whoever takes it has it until nobody looks at it."""
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
