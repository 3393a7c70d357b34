"""Settings of the process itself, which a library must not change behind its user's back."""

from __future__ import annotations

import ctypes
import functools
import sys

from ebbtide.devices.pool import native, trim
from ebbtide.kernels.compiler import BuildError, allocator

LARGE = 1 << 18
"""Tensors from here on are the pool's. What is smaller comes and goes without a fragment to speak of."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST, _SPARING = 2**31 - 1, 32 << 20
"""The threshold from which a block is a mapping of its own, freed to the kernel. Older glibc takes no more than the
second, which maps logits and the gradients of embeddings, and no activation that others fit beside."""
_MAPPED = (4 << 20) + 1
"""Blocks of more than 4 MiB, a mapping of their own each: gradients of large matrices, logits. Smaller ones, most
activations among them, would cost more time than memory."""


keeps_freed_memory = False
"""Whether chunks that give memory back make none for others: those have it already."""


def tune_memory(scarce: bool) -> None:
    """Torch's large tensors have what chunks leave, and chunks what they leave: one pool, no larger than its tide.

    Every step allocates the activations and gradients of the one before. Given back to the kernel, each of their pages
    is faulted in and cleared anew: up to a quarter of a step on a CPU. Kept by the heap, fragments of it are never used
    again: a gigabyte for a model of 350M. Call it once the engine holds the model: what was freed on the way there (the
    weights as they were built) is given back for good.

    Where torch's allocator can't be replaced, it is one or the other: `scarce` memory is given back.
    """
    global keeps_freed_memory
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)
    trim(0)
    keeps_freed_memory = _use_pool() or not scarce
    if libc is None:
        return
    if not keeps_freed_memory:
        libc.mallopt(_MMAP_THRESHOLD, _MAPPED)
        return
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    if not libc.mallopt(_MMAP_THRESHOLD, _LARGEST):
        libc.mallopt(_MMAP_THRESHOLD, _SPARING)


@functools.cache
def _use_pool() -> bool:
    """Whether torch's large tensors are the pool's from here on."""
    pool = native()
    try:
        library = allocator().load() if pool is not None else None
    except (BuildError, OSError):
        return False  # slower or larger, never wrong: what is without a compiler has been said by the kernels
    if library is None or pool is None:
        return False
    library.allocator_use.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    library.allocator_use.restype = None
    entries = (ctypes.cast(function, ctypes.c_void_p) for function in (pool.pages_take, pool.pages_give))
    library.allocator_use(*entries, LARGE)
    return True


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
