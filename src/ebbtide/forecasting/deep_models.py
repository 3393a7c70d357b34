"""The trace of a deep model, foreseen from traces of shallow ones: its layers do one after the other what a few do.

Three traces, each a layer deeper than the one before, differ by what a layer adds: rows of moments, accesses, arrivals,
tensors, at the same places. Every number in a row (bytes, moments, parameters) must then follow a straight line in the
depth, and in a layer's place among those that were added; the layers that were there before must lie on it, too. Where
all of that holds a deeper model's trace is read off the lines. Where it does not (layers of two kinds, in turn) nothing
is foreseen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from ebbtide.layout import TensorSpec
from ebbtide.planner.record import Access, Arrival, Moment, Record, Saved, event
from ebbtide.tracing.standalone import Trace

SHALLOW = (3, 4, 5)
"""Layers of the models that are traced: the first has a layer between its outer ones."""
NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _Row:
    kind: Any
    """What a layer's row has in common with its neighbours'."""
    numbers: tuple[int, ...]
    """What depth changes."""


@dataclass(frozen=True)
class _Added:
    """Rows that each further layer adds after `place` rows of the shallowest trace, or one of these rows itself."""

    place: int
    count: int


_Rows = list[_Row]


def foresee(shallow: Sequence[Trace], layers: int) -> Trace | None:
    """The trace of so many `layers`, from those of `SHALLOW`; None where they do not tell."""
    first = shallow[0]
    same = [(t.note, t.record.signature, t.record.source, bool(t.record.turns)) for t in shallow]
    if any(one != ("", first.record.signature, first.record.source, False) for one in same):
        return None
    parts: dict[str, list[_Row]] = {}
    for name, rows_of in _PARTS.items():
        found = _Match(*(rows_of(trace) for trace in shallow)).extended(layers - SHALLOW[0])
        if found is None:
            return None
        parts[name] = found
    return _made(first.record, parts)


class _Match:
    """Three lists of rows, and where a layer's are added."""

    def __init__(self, first: _Rows, second: _Rows, third: _Rows) -> None:
        self.first, self.second, self.third = first, second, third
        self.more = len(self.second) - len(self.first)
        """Rows that a layer adds in all."""

    def extended(self, further: int) -> _Rows | None:
        """With so many `further` layers; None where these rows follow no line."""
        if self.more < 0 or len(self.third) - len(self.second) != self.more:
            return None
        added = self._added()
        if added is None:
            return None
        rows: _Rows = []
        shift = place = 0
        for one in added:
            rows += [self._kept(i, shift, further) for i in range(place, one.place)]
            rows += self._layers(one, shift, further)
            place, shift = one.place, shift + one.count
        return rows + [self._kept(i, shift, further) for i in range(place, len(self.first))]

    # -- where rows are added -------------------------------------------------------------------------

    def _added(self) -> list[_Added] | None:
        """A search, row by row: each is the same in all three, or is added before it. `shift`: rows added so far."""
        dead: set[tuple[int, int]] = set()
        path: list[tuple[int, int, Iterator[tuple[int, int]]]] = [(0, 0, self._ways(0, 0))]
        while path:
            place, shift, ways = path[-1]
            if place == len(self.first) and shift == self.more:
                steps = pairwise((place, shift) for place, shift, _ in path)
                return [
                    _Added(here, after - before) for (here, before), (_, after) in steps if after > before
                ]
            following = next(ways, None)
            if following is None:
                dead.add((place, shift))
                path.pop()
            elif following not in dead:
                path.append((*following, self._ways(*following)))
        return None

    def _ways(self, place: int, shift: int) -> Iterator[tuple[int, int]]:
        if place < len(self.first) and self._is_kept(place, shift):
            yield place + 1, shift
        for count in range(1, self.more - shift + 1):
            if self._is_added(place, shift, count):
                yield place, shift + count

    def _is_kept(self, place: int, shift: int) -> bool:
        end = len(self.first) + self.more
        if place + shift >= end:
            return False
        a, b, c = self.first[place], self.second[place + shift], self.third[place + 2 * shift]
        return a.kind == b.kind == c.kind and all(
            z - y == y - x for x, y, z in zip(a.numbers, b.numbers, c.numbers, strict=True)
        )

    def _is_added(self, place: int, shift: int, count: int) -> bool:
        """Whether these rows are a layer's: those of its neighbour, on one side or the other, are on the same line."""
        lines = self._lines(place, shift, count)
        return len(lines) == count and any(
            self._follows(lines, place, shift, count, side) for side in (-1, 1)
        )

    def _lines(self, place: int, shift: int, count: int) -> list[_Line]:
        """Of the rows that a layer adds there: as many as are of one kind wherever it is added."""
        one, two = place + shift, place + 2 * shift
        alone, before = self.second[one : one + count], self.third[two : two + count]
        after = self.third[two + count : two + 2 * count]
        return [
            _Line.through(*rows)
            for rows in zip(alone, before, after, strict=False)
            if rows[0].kind == rows[1].kind == rows[2].kind
        ]

    def _follows(self, lines: list[_Line], place: int, shift: int, count: int, side: int) -> bool:
        for depth, rows in enumerate((self.first, self.second, self.third)):
            # Of the layers that were added there are none, one, two; their neighbour is before or after these.
            start = place + depth * shift + (-count if side < 0 else depth * count)
            if start < 0 or start + count > len(rows):
                return False
            at = -1 if side < 0 else depth
            for line, row in zip(lines, rows[start : start + count], strict=True):
                if line.kind != row.kind or line.numbers(depth, at) != row.numbers:
                    return False
        return True

    # -- what they are --------------------------------------------------------------------------------

    def _kept(self, place: int, shift: int, further: int) -> _Row:
        a, b = self.first[place], self.second[place + shift]
        numbers = tuple(x + further * (y - x) for x, y in zip(a.numbers, b.numbers, strict=True))
        return _Row(a.kind, numbers)

    def _layers(self, added: _Added, shift: int, further: int) -> Iterator[_Row]:
        lines = self._lines(added.place, shift, added.count)
        for layer in range(further):
            for line in lines:
                yield _Row(line.kind, line.numbers(further, layer))


@dataclass(frozen=True, slots=True)
class _Line:
    """The numbers of a row that each layer adds: by how many were added, and its layer's place among them."""

    kind: Any
    start: tuple[int, ...]
    by_depth: tuple[int, ...]
    by_place: tuple[int, ...]

    @staticmethod
    def through(alone: _Row, before: _Row, after: _Row) -> _Line:
        """`alone`: where one layer was added; `before` and `after`: where two were."""
        by_depth = tuple(y - x for x, y in zip(alone.numbers, before.numbers, strict=True))
        by_place = tuple(y - x for x, y in zip(before.numbers, after.numbers, strict=True))
        start = tuple(x - y for x, y in zip(alone.numbers, by_depth, strict=True))
        return _Line(alone.kind, start, by_depth, by_place)

    def numbers(self, depth: int, place: int) -> tuple[int, ...]:
        return tuple(
            c + depth * d + place * p
            for c, d, p in zip(self.start, self.by_depth, self.by_place, strict=True)
        )


# -- a trace as rows, and back --------------------------------------------------------------------------


def _facts(trace: Trace) -> _Rows:
    r = trace.record
    return [_Row(None, (r.fixed, r.between, r.forward, r.at_backward, r.carried, r.aside))]


def _moments(trace: Trace) -> _Rows:
    return [_Row((m.phase, m.work), (m.subject, m.peak, m.alive)) for m in trace.record.moments]


def _accesses(trace: Trace) -> _Rows:
    return [_Row(a.phase, (a.run, a.first, a.last)) for a in trace.record.accesses]


def _arrivals(trace: Trace) -> _Rows:
    return [_Row(None, (a.parameter, a.moment)) for a in trace.record.arrivals]


def _saved(trace: Trace) -> _Rows:
    return [
        _Row((s.bytes, s.checkpoint, s.alone < 0, s.back < 0), (s.first, s.alone, s.back))
        for s in trace.record.saved
    ]


def _tensors(trace: Trace) -> _Rows:
    rows = []
    for tensor in trace.tensors:
        parts = NUMBER.split(tensor.name)
        kind = (tuple(parts[::2]), tensor.shape, tensor.stride, tensor.dtype, tensor.trained)
        rows.append(_Row(kind, tuple(map(int, parts[1::2]))))
    return rows


def _runs(trace: Trace) -> _Rows:
    return [_Row(len(run), run) for run in trace.runs]


_PARTS: dict[str, Callable[[Trace], _Rows]] = {
    "facts": _facts,
    "tensors": _tensors,
    "runs": _runs,
    "arrivals": _arrivals,
    "accesses": _accesses,
    "saved": _saved,
    "moments": _moments,
}


def _made(like: Record, parts: dict[str, _Rows]) -> Trace:
    fixed, between, forward, at_backward, carried, aside = parts["facts"][0].numbers
    moments = [(row.kind, *row.numbers) for row in parts["moments"]]
    record = replace(
        like,
        moments=tuple(
            Moment(event(phase, subject), peak, 0.0, work, alive)
            for (phase, work), subject, peak, alive in moments
        ),
        accesses=tuple(
            Access(run, first, last, row.kind)
            for row in parts["accesses"]
            for run, first, last in [row.numbers]
        ),
        arrivals=tuple(Arrival(*row.numbers) for row in parts["arrivals"]),
        saved=tuple(
            Saved(row.kind[0], first, alone, back, row.kind[1])
            for row in parts["saved"]
            for first, alone, back in [row.numbers]
        ),
        fixed=fixed,
        between=between,
        forward=forward,
        at_backward=at_backward,
        carried=carried,
        aside=aside,
    )
    tensors = tuple(TensorSpec(_named(row.kind[0], row.numbers), *row.kind[1:5]) for row in parts["tensors"])
    return Trace(record, tensors, tuple(row.numbers for row in parts["runs"]))


def _named(texts: tuple[str, ...], numbers: tuple[int, ...]) -> str:
    return "".join(text + str(number) for text, number in zip(texts, (*numbers, ""), strict=True))


PLAIN = (bool, int, float, str, type(None))
Fact = tuple[str, object]


def layers_alike(module: nn.Module, config: Any, layers: int) -> bool:
    """Whether all layers but the first are made alike, and the config names none of them apart."""
    for value in vars(config).values():
        if isinstance(value, (list, tuple)) and len(value) == layers and any(v != value[0] for v in value):
            return False
    stacks = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    return all(_alike(stack) for stack in stacks)


def _alike(stack: nn.ModuleList) -> bool:
    made = [[*_description(layer)] for layer in stack]
    return all(
        len(one) == len(made[1]) and all(_same(*pair, 1, place) for pair in zip(made[1], one, strict=True))
        for place, one in enumerate(made)
        if place > 1
    )


def _same(one: Fact, other: Fact, place: int, elsewhere: int) -> bool:
    """A number that is the layer's place says nothing about it."""
    name, value = one
    return other == one or (name == other[0] and (value, other[1]) == (place, elsewhere))


def _description(layer: nn.Module) -> Iterator[Fact]:
    """Of all its modules: what they are, their settings, the shapes of their tensors."""
    for name, child in layer.named_modules():
        yield name, type(child)
        for key, value in vars(child).items():
            if isinstance(value, PLAIN):
                yield f"{name}.{key}", value
        for key, tensor in (*child._parameters.items(), *child._buffers.items()):
            yield f"{name}.{key}", None if tensor is None else tuple(tensor.shape)
