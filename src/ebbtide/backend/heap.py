"""Settings of the process itself, which a library must not change behind its user's back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST, _SPARING = 2**31 - 1, 32 << 20
"""The threshold from which a block is a mapping of its own, freed to the kernel. Older glibc takes no more than the
second, which maps logits and the gradients of embeddings, and no activation that others fit beside."""


_MAPPED = (4 << 20) + 1
"""Blocks of more than 4 MiB, a mapping of their own each: gradients of large matrices, logits. Smaller ones, most
activations among them, would cost more time than memory."""


_kept = False


def keeps_freed_memory() -> bool:
    """Whether the heap has its highest tide for good, so that others who give memory back gain nothing."""
    return _kept


def return_freed_memory() -> None:
    """Tells glibc to give what is freed back to the kernel, in place of keeping all blocks like those it once freed.

    For a process whose memory is scarce: what it takes follows what it uses, without the fragments of a heap of
    gradients and activations that come and go (a third of a gigabyte for a model of 350M), for a few hundredths of
    its time.
    """
    global _kept
    _kept = False
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, _MAPPED)


def keep_freed_memory(sparing: bool = False) -> None:
    """Tells glibc to keep what is freed for the next allocation, instead of giving it back to the kernel.

    Every step allocates the activations of the one before. Given back, each of their pages is faulted in and
    zeroed anew: up to a quarter of a step on a CPU. Call it once the engine holds the model: what was freed on
    the way there (the weights as they were built) is given back for good. `sparing`: but for the few largest blocks,
    in whose holes small ones would settle (0.24 GB of a 1B model with 256 tokens, for a twentieth of its time).
    """
    global _kept
    libc = _glibc()
    if libc is None:
        return
    _kept = True
    libc.malloc_trim(0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    if sparing or not libc.mallopt(_MMAP_THRESHOLD, _LARGEST):
        libc.mallopt(_MMAP_THRESHOLD, _SPARING)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
