"""CRC-32 of memory, as zlib has it: natively where the processor multiplies without carries."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable


def crc32(address: int, nbytes: int, before: int = 0) -> int:
    """Of bytes that follow those whose sum is `before`. Other Python threads run meanwhile."""
    if not nbytes:
        return before
    native = _native()
    if native is not None:
        return native(before, address, nbytes)
    return zlib.crc32(memoryview((ctypes.c_char * nbytes).from_address(address)), before)


@functools.cache
def _native() -> Callable[[int, int, int], int] | None:
    from ebbtide.kernels.build import load

    library = load()
    can = getattr(library, "crc_can", None)
    if library is None or can is None or not can():
        return None
    function = library.crc_of
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64)
    function.restype = ctypes.c_uint32
    return function
