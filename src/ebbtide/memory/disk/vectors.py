"""How a request's memory becomes vectored calls: pure, no file is touched.

Direct transfers want the place in the file, the length and the address on blocks. A stretch of memory whose
address agrees with its place in the file is taken as it is, but for its ends; all else goes through a bounce buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.units import round_up

MAX_CALL = 64 << 20
BOUNCE = 4 << 20
MAX_VECTORS = 1024
"""IOV_MAX on Linux, which is the largest that systems have."""


class Memory(NamedTuple):
    address: int
    nbytes: int


def view(address: int, nbytes: int) -> memoryview:
    """Memory as the system calls take it. It holds nothing: somebody else keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class ByteSpan(NamedTuple):
    """Bytes of a file and the memory that they go to or come from, in order."""

    start: int
    memory: Sequence[Memory]
    end: int
    loose: bool
    """Whether the rest of the last block is nobody's, so that it may be overwritten."""


class ByteCopy(NamedTuple):
    place: int
    """In the part's piece of the bounce buffer."""
    address: int
    nbytes: int


@dataclass(slots=True)
class BytePart:
    """Whole blocks of a file, and one vector of a call."""

    offset: int
    nbytes: int
    address: int = -1
    """Of a part that bounces: where its piece of the buffer is, once it has one."""
    copies: list[ByteCopy] = field(default_factory=list)
    """Empty for memory that is transferred directly."""
    loose: bool = False

    def cut(self, nbytes: int) -> tuple[BytePart, BytePart | None]:
        if nbytes == self.nbytes:
            return self, None
        if not self.copies:
            first = BytePart(self.offset, nbytes, self.address)
            return first, BytePart(self.offset + nbytes, self.nbytes - nbytes, self.address + nbytes)
        ahead = [_between(copy, 0, nbytes) for copy in self.copies if copy.place < nbytes]
        behind = [_between(c, nbytes, self.nbytes) for c in self.copies if c.place + c.nbytes > nbytes]
        rest = BytePart(self.offset + nbytes, self.nbytes - nbytes, -1, behind, self.loose)
        return BytePart(self.offset, nbytes, -1, ahead), rest


def _between(copy: ByteCopy, first: int, last: int) -> ByteCopy:
    skip = max(0, first - copy.place)
    end = min(copy.place + copy.nbytes, last)
    return ByteCopy(copy.place + skip - first, copy.address + skip, end - copy.place - skip)


def parts(span: ByteSpan, block: int) -> Iterator[BytePart]:
    """The blocks of a span, as long parts; neighbouring stretches that bounce share one."""
    bounced: BytePart | None = None
    offset = span.start
    for address, nbytes in span.memory:
        agrees = (address - offset) % block == 0
        head = min(nbytes, -offset % block) if agrees else nbytes
        straight = (nbytes - head) // block * block
        tail = nbytes - head - straight
        if head:
            bounced = _bounce(bounced, offset, Memory(address, head), block)
        if straight:
            if bounced is not None:
                yield bounced
                bounced = None
            yield BytePart(offset + head, straight, address + head)
        if tail:
            bounced = _bounce(bounced, offset + nbytes - tail, Memory(address + nbytes - tail, tail), block)
        offset += nbytes
    if bounced is not None:
        bounced.loose = span.loose
        yield bounced


def _bounce(part: BytePart | None, offset: int, memory: Memory, block: int) -> BytePart:
    if part is None:
        part = BytePart(offset // block * block, 0)
    place = offset - part.offset
    part.copies.append(ByteCopy(place, memory.address, memory.nbytes))
    part.nbytes = round_up(place + memory.nbytes, block)
    return part


def calls(spans: Iterable[ByteSpan], block: int, bounce: int) -> Iterator[list[BytePart]]:
    """Parts of neighbouring spans by calls; those that bounce get their pieces of the buffer at `bounce`."""
    call: list[BytePart] = []
    room, used = MAX_CALL, 0
    for span in spans:
        for part in parts(span, block):
            left: BytePart | None = part
            while left is not None:
                fit = min(left.nbytes, room, BOUNCE - used if left.copies else room) // block * block
                if not fit or len(call) == MAX_VECTORS:
                    yield call
                    call, room, used = [], MAX_CALL, 0
                    continue
                first, left = left.cut(fit)
                if first.copies:
                    first.address = bounce + used
                    used += fit
                call.append(first)
                room -= fit
    if call:
        yield call
