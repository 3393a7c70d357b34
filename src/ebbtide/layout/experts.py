"""Experts' tensors, laid out so that a rank's slice of a chunk is of the experts that it has.

Ranks share a chunk in equal slices. A chunk that has as many experts of one layer for each rank, those of the first
rank first, is cut between experts: what a rank computes with is its slice, and nothing is gathered. Where experts are
fewer, a few ranks in a row have the same ones, and gather their slices among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ebbtide.errors import LayoutError
from ebbtide.layout.packing import build_layout
from ebbtide.layout.spans import ALIGNMENT, ChunkSpec, Layout, Span, TensorSpec
from ebbtide.units import round_up


@dataclass(frozen=True)
class Bank:
    """The experts of a layer."""

    count: int
    stacked: tuple[str, ...] = ()
    """Tensors that have all experts along their first dimension."""
    own: tuple[tuple[str, ...], ...] = ()
    """By expert, tensors that are its alone; in the same order for all."""

    @property
    def names(self) -> Iterator[str]:
        yield from self.stacked
        for names in self.own:
            yield from names


@dataclass(frozen=True)
class _Draft:
    """A chunk that has no number yet. `places`: elements by name."""

    dtype: str
    size: int
    places: Mapping[str, int]
    alike: int
    """Ranks in a row that have the same of it."""


def expert_sets(count: int, ranks: int) -> int:
    """In how many sets `count` experts are cut, each of which as many ranks in a row have."""
    return gcd(count, ranks)


def odd_bank(bank: Bank, specs: Mapping[str, TensorSpec], ranks: int) -> str:
    """Why ranks cannot have whole experts of a layer; empty where they can."""
    shares = expert_sets(bank.count, ranks)
    if shares == 1:
        return f"{bank.count} experts do not divide by {ranks} ranks, nor by a part of them"
    border = ranks // shares * ALIGNMENT
    missing = [name for name in bank.names if name not in specs]
    if missing:
        return f"{missing[0]} is not managed"
    for name in bank.stacked:
        spec = specs[name]
        if spec.shape[0] != bank.count or spec.stride[0] != spec.numel // bank.count:
            return f"{name} does not have its {bank.count} experts one after the other"
        if spec.numel // shares % border:
            found = f"{name} has {spec.numel // shares} elements for {ranks // shares} ranks"
            return f"{found}, which is no multiple of {border}"
    alike = {tuple((specs[n].shape, specs[n].stride, specs[n].dtype) for n in names) for names in bank.own}
    if bank.own and (len(bank.own) != bank.count or len(alike) != 1):
        return f"its {bank.count} experts are not alike"
    if len({specs[name].dtype for names in bank.own for name in names}) > 1:
        return "its experts have tensors of several dtypes"
    return ""


def build_spread_layout(
    specs: Sequence[TensorSpec], banks: Sequence[Bank], cut: str, chunk_size: int | None, ranks: int
) -> Layout:
    """The layout of `specs` where ranks have whole experts of `banks`: a chunk holds nothing else than some of one
    layer's. All banks must be fit for it (`odd_bank`)."""
    if ranks < 2 or not banks:
        return build_layout(specs, cut, chunk_size)
    named = {spec.name: spec for spec in specs}
    theirs = {name for bank in banks for name in bank.names}
    if len(theirs) == len(named):
        raise LayoutError("expected tensors that are no experts' (a router at least), found none")
    rest = build_layout([spec for spec in specs if spec.name not in theirs], cut, chunk_size)
    drafts = [draft for bank in banks for draft in _drafts(bank, named, rest.unit, ranks)]
    return _joined(rest, drafts, named)


def _drafts(bank: Bank, specs: Mapping[str, TensorSpec], unit: int, ranks: int) -> Iterator[_Draft]:
    shares = expert_sets(bank.count, ranks)
    alike = ranks // shares
    for name in bank.stacked:
        yield _Draft(specs[name].dtype, specs[name].numel, {name: 0}, alike)
    if not bank.own:
        return
    sizes = [round_up(specs[name].numel, ALIGNMENT) for name in bank.own[0]]
    each, local = sum(sizes), bank.count // shares
    together = max(1, min(local, unit // (shares * each)))
    for first in range(0, local, together):
        held = min(together, local - first)
        places: dict[str, int] = {}
        at = 0
        for share in range(shares):
            for expert in range(share * local + first, share * local + first + held):
                for name, size in zip(bank.own[expert], sizes, strict=True):
                    places[name] = at
                    at += size
            at = round_up(at, alike * ALIGNMENT)
        yield _Draft(specs[bank.own[0][0]].dtype, at, places, alike)


def _joined(rest: Layout, drafts: Sequence[_Draft], specs: Mapping[str, TensorSpec]) -> Layout:
    """Chunks are numbered in the order of their first tensors, as they are without experts."""
    order = {name: position for position, name in enumerate(specs)}
    ends = dict(rest.ends)
    found: list[tuple[int, ChunkSpec, Mapping[str, int]]] = []
    for chunk in rest.chunks:
        names = rest.names_of(chunk.index)
        found.append((order[names[0]], chunk, {name: rest.spans[name].offset for name in names}))
    experts: dict[int, int] = {}
    for draft in drafts:
        start = round_up(ends.get(draft.dtype, 0), rest.unit if rest.cut == "page" else ALIGNMENT)
        chunk = ChunkSpec(0, draft.dtype, draft.size, start, draft.size)
        ends[draft.dtype] = start + draft.size
        first = min(order[name] for name in draft.places)
        experts[first] = draft.alike
        found.append((first, chunk, draft.places))
    found.sort(key=lambda one: one[0])
    spans: dict[str, Span] = {}
    for index, (_, _, places) in enumerate(found):
        for name, offset in places.items():
            spec = specs[name]
            spans[name] = Span(name, index, offset, spec.numel, spec.shape, spec.stride)
    return Layout(
        rest.cut,
        rest.unit,
        tuple(replace(chunk, index=index) for index, (_, chunk, _) in enumerate(found)),
        {name: spans[name] for name in specs},
        {index: experts[first] for index, (first, _, _) in enumerate(found) if first in experts},
    )
