"""CRC-32 of memory, as zlib has it: natively where the processor multiplies without carries."""

from __future__ import annotations

import ctypes
import functools
import zlib
from array import array

from ebbtide.kernels.compiler import load


def crc32(address: int, nbytes: int, before: int = 0) -> int:
    """Of bytes that follow those whose sum is `before`. Other Python threads run meanwhile."""
    if not nbytes:
        return before
    native = _native()
    if native is not None:
        return int(native.crc_of(before, address, nbytes))
    return zlib.crc32(memoryview((ctypes.c_char * nbytes).from_address(address)), before)


def crc32_each(address: int, count: int, nbytes: int) -> array[int]:
    """Of each of `count` runs of `nbytes` bytes, one behind the other."""
    native = _native()
    if native is None:
        return array("I", (crc32(address + place * nbytes, nbytes) for place in range(count)))
    found = array("I", bytes(4 * count))
    native.crc_each(address, count, nbytes, found.buffer_info()[0])
    return found


@functools.cache
def _native() -> ctypes.CDLL | None:
    library = load()
    can = getattr(library, "crc_can", None)
    if library is None or can is None or not can():
        return None
    library.crc_of.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64)
    library.crc_of.restype = ctypes.c_uint32
    library.crc_by.argtypes = (ctypes.c_int32, *library.crc_of.argtypes)
    library.crc_by.restype = ctypes.c_uint32
    library.crc_each.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.crc_each.restype = None
    return library
