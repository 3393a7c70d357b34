"""Memory at chosen addresses, and a system that can be told to fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ebbtide.memory.disk.space import BLOCK, READ, WRITE, SystemIO

MIB = 1 << 20


def memory(count: int, skew: int = 0, seed: int | None = None) -> torch.Tensor:
    """Bytes whose address is `skew` past a block."""
    whole = torch.empty(count + 2 * BLOCK, dtype=torch.uint8)
    first = -whole.data_ptr() % BLOCK + skew
    flat = whole[first : first + count]
    if seed is not None:
        flat.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return flat


def uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class FaultyIO(SystemIO):
    """The system, with `on_call(link, file, buffers, offset)` before each transfer: raises, or says how many bytes
    are moved; None leaves it alone. Transfers wait while `gate` is closed. Whether files are direct can be said."""

    def __init__(self, on_call: Callable[..., int | None] | None = None, direct: bool | None = None) -> None:
        self.on_call = on_call
        self.calls: list[tuple[str, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._direct = direct
        self._here = threading.Condition()
        self._arrived = 0

    def close_gate(self) -> None:
        self.gate.clear()
        self._arrived = 0

    def at_gate(self, count: int) -> None:
        """Waits until so many transfers stand there."""
        with self._here:
            assert self._here.wait_for(lambda: self._arrived == count, 20)

    def open(self, path: str, flags: int) -> int:
        if self._direct is False and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return super().open(path, flags)

    def preadv(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return self._move(READ, os.preadv, file, buffers, offset)

    def pwritev(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return self._move(WRITE, os.pwritev, file, buffers, offset)

    def _move(self, link: str, move: Any, file: int, buffers: Sequence[Any], offset: int) -> int:
        with self._here:
            self._arrived += 1
            self._here.notify_all()
        assert self.gate.wait(20)
        self.calls.append((link, offset, sum(len(one) for one in buffers)))
        count = self.on_call(link, file, buffers, offset) if self.on_call else None
        if count is None:
            return int(move(file, buffers, offset))
        short = []
        for one in buffers:
            short.append(one[:count])
            count -= len(short[-1])
        return int(move(file, [one for one in short if len(one)], offset)) if sum(map(len, short)) else 0


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
