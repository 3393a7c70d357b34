"""What a checkpoint says of a run beside its values: checked field by field before anything is taken over.

A file is input like any other. Types, ranges and names are checked, and settings and random numbers are tried where
nothing depends on them. `resume.py` writes these facts and takes them over.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NoReturn

import torch

from ebbtide.errors import ConfigError, IntegrityError
from ebbtide.kernels import require_settings
from ebbtide.planner.record import PHASES, Record
from ebbtide.runtime.parameters.selection import has_no_gaps
from ebbtide.runtime.updates.loss_scale import LossScaler

LARGEST = 1 << 62
"""No count, size or offset is larger."""


class PlainData:
    """A value, and where it is from."""

    __slots__ = ("_at", "_within", "value")

    def __init__(self, value: Any, within: PlainData | str, at: str | int = "") -> None:
        """`within`: the place as text, or the value that has this one at `at`."""
        self.value, self._within, self._at = value, within, at

    @property
    def place(self) -> str:
        if isinstance(self._within, str):
            return self._within
        return (
            f"{self._within.place}[{self._at}]"
            if isinstance(self._at, int)
            else f"{self._within.place}: {self._at}"
        )

    @classmethod
    def parse(cls, content: bytes, place: str) -> PlainData:
        try:
            return cls(json.loads(content), place)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{place}: is damaged ({error}); load another checkpoint") from error

    def wrong(self, expected: str, found: Any = None) -> NoReturn:
        shown = repr(self.value if found is None else found)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        raise IntegrityError(
            f"{self.place}: is damaged: expected {expected}, found {shown}; load another checkpoint"
        )

    def items(self) -> dict[str, PlainData]:
        if not isinstance(self.value, dict):
            self.wrong("names with values")
        return {key: PlainData(one, self, key) for key, one in self.value.items()}

    def fields(self, *names: str, others: tuple[str, ...] = ()) -> list[PlainData]:
        """Those of a mapping that has all of these, and at most `others` beside."""
        found = self.items()
        missing = [name for name in names if name not in found]
        unknown = [name for name in found if name not in (*names, *others)]
        if missing or unknown:
            self.wrong(f"{', '.join(names)}", found=", ".join(found) or "nothing")
        return [found[name] for name in names]

    def entries(self, count: int | None = None) -> list[PlainData]:
        if not isinstance(self.value, list) or (count is not None and len(self.value) != count):
            self.wrong("a list" if count is None else f"a list of {count}")
        return [PlainData(one, self, place) for place, one in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not _encodes(self.value):
            self.wrong("text")
        return self.value

    def number(self, least: int = 0, most: int = LARGEST) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            self.wrong(
                f"a whole number from {least} on" if most == LARGEST else f"a whole number in {least}..{most}"
            )
        return self.value

    def real(self) -> float:
        if type(self.value) not in (int, float):
            self.wrong("a number")
        return float(self.value)

    def numbers(self) -> tuple[int, ...]:
        if isinstance(self.value, list) and all(
            type(one) is int and 0 <= one <= LARGEST for one in self.value
        ):
            return tuple(self.value)
        return tuple(one.number() for one in self.entries())

    def each(self, read: Callable[[PlainData], Any]) -> Mapping[str, Any]:
        return {key: read(one) for key, one in self.items().items()}


def _encodes(text: str) -> bool:
    """JSON can spell halves of characters, which no file can be named by."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


NEEDED = (
    "steps",
    "counts",
    "groups",
    "scaler",
    "device",
    "managed",
    "traces",
    "ranks",
    "tensors",
)
BESIDE = ("rank_counts", "passes", "rule")
"""Was not there always."""


def look_at(
    content: bytes, place: str, shapes: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """`shapes`: what the index says of tensors, where it does; `sizes`: elements by tensor of the index."""
    plain = PlainData.parse(content, place)
    known = plain.items()
    plain.fields(*NEEDED, others=BESIDE)
    known["steps"].number()
    known["ranks"].number(1)
    known["device"].text()
    managed = [one.text() for one in known["managed"].entries()]
    known["counts"].each(PlainData.number)
    _ranks(known.get("rank_counts"), known["ranks"].value, len(managed))
    for name in ("passes", "rule"):
        if name in known:
            known[name].text()
    for number, group in enumerate(known["groups"].entries()):
        _group(group, number)
    _scaler(known["scaler"])
    _tensors(known["tensors"], shapes, sizes)
    for trace in known["traces"].entries():
        _trace(trace, len(managed))
    found: dict[str, Any] = plain.value
    return found


def _ranks(counts: PlainData | None, ranks: int, parameters: int) -> None:
    if counts is None or counts.value is None:
        return
    for one in counts.entries(ranks):
        for count in one.entries(parameters):
            count.number()


def _group(group: PlainData, number: int) -> None:
    params, settings = group.fields("params", "settings")
    for one in params.entries():
        one.text()
    settings.items()
    try:
        require_settings(settings.value, number)
    except ConfigError as error:
        settings.wrong("settings of an optimizer", found=str(error).partition(";")[0])


def _scaler(scaler: PlainData) -> None:
    if scaler.value is None:
        return
    *factors, interval, quiet = scaler.fields(*LossScaler().state_dict())
    for one in factors:
        if not 0 < one.real() < float("inf"):
            one.wrong("a positive number")
    interval.number(1)
    quiet.number()


def _tensors(tensors: PlainData, shapes: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for key, described in tensors.items().items():
        shape, stride = (one.numbers() for one in described.entries(2))
        if len(shape) != len(stride):
            described.wrong("as many strides as sizes")
        if not has_no_gaps(shape, stride):
            described.wrong("strides of elements that lie one after the other")
        if key not in sizes or prod(shape) != sizes[key]:
            described.wrong(f"the shape of {sizes.get(key, 'a tensor that is there')} elements")
        if key in shapes and shapes[key] != (shape, stride):
            described.wrong(f"{shapes[key]}, as in the index")
    missing = set(sizes) - set(tensors.value)
    if missing:
        tensors.wrong(f"the shape of {min(missing)}", found="none")


def _trace(trace: PlainData, parameters: int) -> None:
    """One that a plan can be made of: whatever it says is a hint, but its places are used as such."""
    try:
        record = Record.from_plain(trace.value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        trace.wrong("a trace", found=f"{type(error).__name__}: {error}")
    counts = [
        *((m.event, m.peak, m.alive) for m in record.moments),
        *((w.flops, w.bytes) for m in record.moments for w in m.work),
        *((a.run, a.phase) for a in record.accesses),
        *((s.bytes,) for s in record.saved),
        (record.fixed, record.between, record.carried, record.aside),
    ]
    places = [
        *((a.first, a.last) for a in record.accesses),
        *((a.moment,) for a in record.arrivals),
        *((s.first,) for s in record.saved),
    ]
    ends = [*((s.alone, s.back) for s in record.saved), record.turns, (record.forward,)]
    length = len(record.moments)
    for several, least, most in (
        (counts, 0, LARGEST),
        ([(record.at_backward, record.packed)], -1, LARGEST),
        ([(a.parameter,) for a in record.arrivals], 0, parameters - 1),
        (places, 0, length - 1),
        (ends, -1, length),
    ):
        for number in (one for numbers in several for one in numbers):
            if type(number) is not int or not least <= number <= most:
                trace.wrong(f"whole numbers in {least}..{most}", found=number)
    if any(a.last < a.first for a in record.accesses):
        trace.wrong("accesses that end after they begin")
    if not all(type(m.host_seconds) in (int, float) for m in record.moments):
        trace.wrong("seconds by moment")
    if not all(0 <= a.phase < len(PHASES) for a in record.accesses) or not isinstance(record.signature, str):
        trace.wrong("phases and a signature")


def look_at_state(state: Any, place: str) -> None:
    """What this rank goes on with. Random numbers are tried on generators made for it."""
    if (
        not isinstance(state, dict)
        or set(state) != {"user", "random"}
        or not isinstance(state["random"], dict)
    ):
        raise IntegrityError(
            f"{place}: is damaged: expected state and random numbers; load another checkpoint"
        )
    drawn = state["random"]
    try:
        torch.Generator().set_state(drawn["torch"])
        version, numbers, following = drawn["python"]
        random.Random().setstate((version, tuple(numbers), following))
        if not isinstance(following, float | None):
            raise TypeError(f"{type(following).__name__} as the number to come")
        if "numpy" in drawn and "numpy" in sys.modules:
            name, keys, *rest = drawn["numpy"]
            sys.modules["numpy"].random.RandomState().set_state((name, keys.numpy().astype("uint32"), *rest))
        for one in drawn.get("cuda", ()):
            if one.dtype != torch.uint8:
                raise TypeError(f"a {one.dtype} tensor of random numbers")
    except Exception as error:
        raise IntegrityError(
            f"{place}: is damaged: its random numbers cannot be taken up ({type(error).__name__}: {error}); load "
            "another checkpoint"
        ) from error
