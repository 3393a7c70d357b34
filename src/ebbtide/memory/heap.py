"""Settings of the process itself, which a library must not change behind its user's back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST, _LARGEST_OF_OLD = 2**31 - 1, 32 << 20
"""The threshold from which a block is a mapping of its own, freed to the kernel; older glibc takes less."""


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed for the next allocation, instead of giving it back to the kernel.

    Every step allocates the activations of the one before. Given back, each of their pages is faulted in and
    zeroed anew: up to a quarter of a step on a CPU. Call it once the engine holds the model: what was freed on
    the way there (the weights as they were built) is given back for good.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.malloc_trim(0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    if not libc.mallopt(_MMAP_THRESHOLD, _LARGEST):
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)
