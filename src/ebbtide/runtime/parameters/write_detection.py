"""Writes into parameters that stay in place for a while, found by their bits.

PyTorch counts a write into a tensor, but not one through `.data`, which is how adapters are merged and reference models
follow. So while all parameters are resident a checksum of each tells whether it was written. Where a master is split
between a parameter and what rounding took off it, nothing else tells which elements were: there a copy is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from ebbtide.kernels.crc import crc32

PORTION = 1 << 22
"""Elements that a GPU looks at together."""


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in storage order, as one flat view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def checksum(tensor: torch.Tensor) -> int:
    """Of a dense tensor's bits."""
    flat = dense(tensor)
    if flat.is_cpu:
        return crc32(flat.data_ptr(), flat.nbytes)
    bits, found = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]), 0
    for part in bits.split(PORTION):
        wide = part.to(torch.int64)
        weights = torch.arange(1, wide.numel() + 1, device=wide.device)
        found = hash((found, int(wide.sum()), int((wide * weights).sum())))
    return found


class LiveWrites:
    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        """`memory`: by parameter, the tensor that is bound."""
        self._memory = memory
        self._sums: dict[int, int | None] = {}
        """By parameter; None where the engine itself has written since."""
        self._before: dict[int, torch.Tensor] = {}
        """By parameter: its elements in storage order, on the host, where they are kept."""
        self._scopes = 0

    def begin(self, members: Iterable[int], kept: Collection[int] = ()) -> None:
        """From now on these are looked at; of some their values are kept."""
        self._scopes += 1
        for member in members:
            if member not in self._sums:
                self._sums[member] = checksum(self._memory[member])
            if member in kept and member not in self._before:
                self._before[member] = dense(self._memory[member]).to("cpu", copy=True)

    def end(self) -> None:
        self._scopes -= 1
        if not self._scopes:
            self._sums.clear()
            self._before.clear()

    def note(self, member: int) -> None:
        """Somebody takes the memory of one: it is looked at from now on."""
        if member not in self._sums:
            self._sums[member] = checksum(self._memory[member])

    def let_go(self) -> None:
        """Those that were noted one by one have been looked at."""
        if not self._scopes:
            self._sums.clear()

    def rebase(self) -> None:
        """What the engine has written is there: from here on it is the user who writes."""
        for member, known in self._sums.items():
            if known is None:
                self._sums[member] = checksum(self._memory[member])
                self.seen(member)

    def before(self, member: int) -> torch.Tensor | None:
        """What a parameter was when it was looked at last, where that is kept."""
        return self._before.get(member) if self._sums.get(member) is not None else None

    def seen(self, member: int) -> None:
        """What was written is known."""
        if member in self._before:
            self._before[member].copy_(dense(self._memory[member]))

    def ours(self, member: int) -> None:
        """The engine writes this one."""
        if member in self._sums:
            self._sums[member] = None

    def found(self, member: int) -> bool:
        """Whether it was written since the last look."""
        if member not in self._sums:
            return False
        before, now = self._sums[member], checksum(self._memory[member])
        self._sums[member] = now
        return before is not None and before != now

    @property
    def noted(self) -> set[int]:
        """Parameters whose memory somebody has taken, outside of a scope."""
        return set() if self._scopes else set(self._sums)

    @property
    def members(self) -> list[int]:
        return list(self._sums)
