"""A session's values as flat tensors by key, read and written in ranges: what a checkpoint holds.

Keys say what and whose: `weights/NAME` in master precision, `exp_avg/NAME` and the like for optimizer state,
`buffers/NAME`. A tensor's elements are in storage order. None of this depends on layout, chunk size, tiers or
the form of the master. State that no update has touched is all zeros and has no part. Where ranks share the chunks,
each has a range of every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ebbtide.checkpoint import values
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunk_access import clear, copy_out, poke, tier_of
from ebbtide.runtime.parameters import element_access
from ebbtide.runtime.parameters.binding import dense
from ebbtide.runtime.session import Session

WEIGHTS, BUFFERS = "weights", "buffers"


@dataclass(frozen=True)
class TensorPart:
    key: str
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    load: Callable[[int, torch.Tensor], None]
    """(first element, a flat tensor on the host that is filled)."""
    store: Callable[[int, torch.Tensor], None]
    """(first element, flat values); what other ranks have of them is left out."""
    lend: Callable[[int, int], list[torch.Tensor] | None] = lambda first, count: None
    """(first element, how many): where they lie until the next step, in one stretch of host memory or, with masters that
    are split, in two; None where they do not."""
    first: int = 0
    count: int = -1
    """This rank's elements; -1: all of them."""

    @property
    def common(self) -> bool:
        """Every rank has all of it, for itself."""
        return self.count < 0

    @property
    def range(self) -> tuple[int, int]:
        """First and last (exclusive) of the elements that are here."""
        return (0, self.numel) if self.common else (self.first, self.first + self.count)


def parts_of(session: Session, everything: bool = False) -> Iterator[TensorPart]:
    """In the order of the chunks. With `everything`, state that was never written, too, for values that may come."""
    yield from parts_of_model(session, everything)
    for average in session.averages:
        yield from average.parts()


def parts_of_model(session: Session, everything: bool = False) -> Iterator[TensorPart]:
    """All but averages."""
    for index, members in enumerate(session.data.members):
        states = [chunk for chunk in session.store.state_chunks(index) if chunk.kind != "master"]
        for member in members:
            yield _weights(session, member)
            for chunk in states:
                if everything or not chunk.free:
                    yield _state(session, member, chunk)
    yield from _unmanaged(session, everything)
    for name, buffer in values.persistent_buffers(session.module):
        yield _of_tensor(f"{BUFFERS}/{name}", buffer)


def _weights(session: Session, member: int) -> TensorPart:
    data, kernels = session.data, session.updates.kernels["host"]
    place, share = data.places[member], data.shares[member]
    has_master = ("master", place.chunk) in session.store.chunks
    dtype = torch.float32 if has_master else data.parameter_chunk(place.chunk).dtype

    def load(first: int, out: torch.Tensor) -> None:
        element_access.load_range(data, member, first, out, kernels)

    def store(first: int, flat: torch.Tensor) -> None:
        values.store(session, member, flat, first)

    def lend(first: int, count: int) -> list[torch.Tensor] | None:
        return element_access.lend_range(data, member, first, count)

    key = f"{WEIGHTS}/{place.name}"
    return TensorPart(
        key, place.numel, dtype, place.shape, place.stride, load, store, lend, share.first, share.numel
    )


def _state(session: Session, member: int, chunk: Chunk) -> TensorPart:
    place, share, space = session.data.places[member], session.data.shares[member], session.store

    def load(first: int, out: torch.Tensor) -> None:
        copy_out(space, chunk, share.offset + first - share.first, out)

    def store(first: int, found: torch.Tensor) -> None:
        begin, end = share.common(first, found.numel())
        if begin >= end:
            return
        found = found[begin - first : end - first]
        if chunk.free:
            session.updates.chunks.open_states(place.chunk)
        space.settle(chunk, host=True)
        offset, tier = share.offset + begin - share.first, session.store.state_homes[place.chunk]
        if tier == "ssd":
            if not chunk.ssd_valid:
                clear(space, chunk)
                space.reserve_ssd(chunk, valid=True)
            poke(space, chunk, offset, found)
            session.store.written_on_ssd(place.chunk)
            return
        tier = tier_of(chunk)
        for start, piece in chunk.slices(tier, offset, found.numel()):
            piece.copy_(found[start : start + piece.numel()])
        space.written(chunk, tier)

    def lend(first: int, count: int) -> list[torch.Tensor] | None:
        space.settle(chunk, host=True)
        found = chunk.stretch(tier_of(chunk), share.offset + first - share.first, count)
        return None if found is None else [found]

    key = f"{chunk.kind}/{place.name}"
    return TensorPart(
        key, place.numel, chunk.dtype, place.shape, place.stride, load, store, lend, share.first, share.numel
    )


def _unmanaged(session: Session, everything: bool) -> Iterator[TensorPart]:
    unmanaged = session.unmanaged
    for name, parameter in unmanaged.parameters.items():
        master = unmanaged.master_of(name)
        value = parameter.detach()
        if master is None:
            yield _of_tensor(f"{WEIGHTS}/{name}", value)
        else:
            yield _with_master(session, name, master, value)
        if everything and parameter.requires_grad:
            unmanaged.open_states(name)
        for kind, state in zip(unmanaged.rule.states, unmanaged.states.get(name, ()), strict=False):
            yield _of_tensor(f"{kind}/{name}", state.as_strided(value.shape, value.stride()))


def _with_master(session: Session, name: str, master: torch.Tensor, value: torch.Tensor) -> TensorPart:
    flat = dense(value)

    def load(first: int, out: torch.Tensor) -> None:
        out.copy_(master[first : first + out.numel()])

    def store(first: int, found: torch.Tensor) -> None:
        there = found.to(master.device)
        target, kept = (flat[first : first + found.numel()], master[first : first + found.numel()])
        kept.copy_(there)
        session.unmanaged.kernels_of(name).split(kept, target, kept)

    key = f"{WEIGHTS}/{name}"
    return TensorPart(key, flat.numel(), master.dtype, tuple(value.shape), tuple(value.stride()), load, store)


def _of_tensor(key: str, tensor: torch.Tensor) -> TensorPart:
    """Of one that lies by itself."""

    def flat() -> torch.Tensor:
        return dense(tensor)

    def load(first: int, out: torch.Tensor) -> None:
        out.copy_(flat()[first : first + out.numel()])

    def store(first: int, found: torch.Tensor) -> None:
        flat()[first : first + found.numel()].copy_(found)

    return TensorPart(
        key, tensor.numel(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), load, store
    )
