"""A parameter's elements, wherever its chunk and its master's are: read and written in master precision."""

from __future__ import annotations

import torch

from ebbtide.kernels import Kernels
from ebbtide.memory.chunk import Chunk, Slices, cut
from ebbtide.memory.chunk_access import peek, poke, portions
from ebbtide.runtime.parameters.binding import ModelData


def copies_of(data: ModelData, member: int) -> list[tuple[Chunk, str]]:
    """Where a value is: the parameter's chunk and, where it has one, its master's, each with the tier to use."""
    data.before_values()
    index = data.places[member].chunk
    data.notice_writes(index)
    data.notice_live_write(member)
    found = [data.store.chunks.get((kind, index)) for kind in ("param", "master")]
    copies = []
    for chunk in found:
        if chunk is not None and not chunk.free:
            data.store.settle(chunk, host=True)
            copies.append((chunk, next(t for t in ("host", "device", "ssd") if chunk.valid_on(t))))
    return copies


def store_value(data: ModelData, member: int, value: torch.Tensor, kernels: Kernels, first: int = 0) -> None:
    """Writes a parameter's value (dense, in storage order), or its elements from `first` on, into parameter and
    master, where they are; what other ranks have is theirs to write."""
    place, share = data.places[member], data.shares[member]
    begin, end = share.common(first, value.numel())
    if begin >= end:
        return
    value, count = value[begin - first : end - first], end - begin
    offset = share.offset + begin - share.first
    copies = copies_of(data, member)
    for start, number in portions(count):
        _store(data, copies, offset + start, value[start : start + number], kernels)
    for chunk, tier in copies:
        data.store.written(chunk, tier)
    if any(tier == "ssd" for _, tier in copies):
        data.store.written_on_ssd(place.chunk)


def _store(
    data: ModelData, copies: list[tuple[Chunk, str]], offset: int, value: torch.Tensor, kernels: Kernels
) -> None:
    count = value.numel()
    changed = {
        chunk: torch.empty(count, dtype=chunk.dtype, device="cpu") for chunk, tier in copies if tier == "ssd"
    }
    parts: list[Slices] = [
        [(0, changed[chunk])] if tier == "ssd" else list(chunk.slices(tier, offset, count))
        for chunk, tier in copies
    ]
    for start, row in cut(parts, count):
        part = value[start : start + row[0].numel()]
        if len(row) == 1 and row[0].dtype == torch.float32:
            row[0].copy_(part)
            continue
        held = [piece if piece.is_cpu else torch.empty_like(piece, device="cpu") for piece in row]
        # Without a master, too: it is rounded as in a chunk that has one, so that layouts change no number.
        kernels.split(part.to("cpu", torch.float32), held[0], held[1] if len(held) > 1 else None)
        for piece, value_there in zip(row, held, strict=True):
            if piece is not value_there:
                piece.copy_(value_there)
    for chunk, flat in changed.items():
        poke(data.store, chunk, offset, flat)


def load_value(data: ModelData, member: int, kernels: Kernels) -> torch.Tensor:
    """A parameter's value in master precision, as a new fp32 tensor on the host, with its strides. Ranks that share
    chunks call it together."""
    place, share = data.places[member], data.shares[member]
    flat = torch.empty(place.numel, dtype=torch.float32, device="cpu")
    load_range(data, member, share.first, flat[share.first : share.first + share.numel], kernels)
    data.collect(member, flat)
    return flat.as_strided(place.shape, place.stride)


def load_range(data: ModelData, member: int, first: int, out: torch.Tensor, kernels: Kernels) -> None:
    """Fills `out` with its elements from `first` on, in storage order, which are this rank's; what is on SSD is
    read."""
    share, count = data.shares[member], out.numel()
    if not count:
        return
    offset, copies = share.offset + first - share.first, copies_of(data, member)
    for start, number in portions(count):
        _load(data, copies, offset + start, out[start : start + number], kernels)


def _load(
    data: ModelData, copies: list[tuple[Chunk, str]], offset: int, out: torch.Tensor, kernels: Kernels
) -> None:
    count = out.numel()
    parts: list[Slices] = [
        [(0, peek(data.store, chunk, offset, count))]
        if tier == "ssd"
        else list(chunk.slices(tier, offset, count))
        for chunk, tier in copies
    ]
    for start, row in cut(parts, count):
        target = out[start : start + row[0].numel()]
        if len(row) == 1:
            target.copy_(row[0])
        else:
            kernels.join(row[0].cpu(), row[1].cpu(), target)


def lend_range(data: ModelData, member: int, first: int, count: int) -> list[torch.Tensor] | None:
    """The same where they lie: in one stretch of host memory, or in two to be joined."""
    share, copies = data.shares[member], copies_of(data, member)
    if copies and copies[-1][0].dtype == torch.float32:
        copies = copies[-1:]  # a master of its own
    offset = share.offset + first - share.first
    found = [chunk.stretch(tier, offset, count) for chunk, tier in copies]
    there = [one for one in found if one is not None]
    return there if there and len(there) == len(copies) else None
