"""Connections between ranks that break without a word, as where a cable is pulled or a machine loses its power.

Who only listens never notices. So the kernel asks now and then whether the other end is there: it answers for a process
that evaluates, writes a file or is stopped, and not for one that is out of reach.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OPEN = Path("/proc/self/fd")
PROBES = 3


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Connections that are made within end with an error when the other end has been out of reach so long. Linux alone
    can tell which they are, and how long to wait."""
    before = _sockets()
    yield
    for number in _sockets() - before:
        with suppress(OSError):
            _watch(number, seconds)


def _sockets() -> set[int]:
    if not OPEN.is_dir():
        return set()
    found = set()
    for entry in OPEN.iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                found.add(int(entry.name))
    return found


def _watch(number: int, seconds: float) -> None:
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return
        each = max(1, int(seconds / (PROBES + 2)))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * each)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # Nobody is asked while something is under way that the other end has not confirmed.
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
