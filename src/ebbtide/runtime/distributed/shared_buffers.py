"""Buffers, of which every rank has its own: once forward has written some, the step makes them the first rank's.

So it is under DistributedDataParallel, too, which does it before each forward pass. A checkpoint has the first rank's,
and an evaluation computes with the same on every rank. Buffers that a checkpoint leaves out (`persistent=False`) stay as
they are: they follow from what the rank has seen, and its module may keep more of that elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from ebbtide.kernels.crc import crc32
from ebbtide.runtime.distributed.ranks import Ranks, all_or_none

Facts = tuple[tuple[int, ...], str, int]
"""Shape, dtype and checksum."""


class SharedBuffers:
    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module, self.ranks = module, ranks
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._remember()

    @property
    def written(self) -> bool:
        """Whether this rank's have changed since they were alike, or were replaced."""
        now = dict(self._buffers())
        return now.keys() != self._before.keys() or any(
            seen() is not now[name] or now[name]._version != version
            for name, (seen, version) in self._before.items()
        )

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen = set()
        for prefix, module in self._module.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                plain = type(buffer) in (torch.Tensor, nn.Buffer) and buffer.layout == torch.strided
                if plain and not buffer.is_inference():  # those have no version, and take no writes
                    yield f"{prefix}.{key}", buffer

    def _remember(self) -> None:
        self._before = {name: (weakref.ref(buffer), buffer._version) for name, buffer in self._buffers()}

    def align(self) -> None:
        """All ranks call it together. A buffer whose shape is another one elsewhere, as a cache's may be, stays."""
        buffers = dict(self._buffers())
        with all_or_none(self.ranks):
            facts = {name: _facts(buffer) for name, buffer in buffers.items() if buffer.numel()}
        everywhere = self.ranks.objects(facts)
        differing = [
            name
            for name, (shape, dtype, checksum) in everywhere[0].items()
            if all(theirs.get(name, ())[:2] == (shape, dtype) for theirs in everywhere)
            and any(theirs[name][2] != checksum for theirs in everywhere)
        ]
        if differing:
            values = torch.cat([_bytes(buffers[name]) for name in differing])
            self.ranks.spread(values, 0)
            if self.ranks.rank:
                _write([buffers[name] for name in differing], values)
        self._remember()


def _facts(buffer: torch.Tensor) -> Facts:
    here = _bytes(buffer)
    return tuple(buffer.shape), str(buffer.dtype), crc32(here.data_ptr(), here.nbytes)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    """Of its elements in order, on the host."""
    return buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _write(buffers: list[torch.Tensor], values: torch.Tensor) -> None:
    for buffer, mine in zip(buffers, values.split([buffer.nbytes for buffer in buffers]), strict=True):
        buffer.copy_(mine.clone().view(buffer.dtype).view(buffer.shape))
