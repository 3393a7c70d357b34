"""What a checkpoint says of a run beside its values, looked at before anything is taken over.

A file is input like any other: of each fact the type, the range and the names are checked, and settings and random
numbers are tried where nothing hangs on them. `resume.py` writes these facts and takes them over.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ebbtide.errors import ConfigError, IntegrityError
from ebbtide.kernels import require_settings
from ebbtide.record import PHASES, Record
from ebbtide.run.scaler import LossScaler
from ebbtide.run.setup import has_no_gaps
from ebbtide.state.plain import LARGEST, Plain

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
BESIDE = ("rank_counts",)
"""Was not there always."""


def look_at(
    content: bytes, place: str, shapes: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """`shapes`: what the index says of tensors, where it does; `sizes`: elements by tensor of the index."""
    plain = Plain.parse(content, place)
    known = plain.items()
    plain.fields(*NEEDED, others=BESIDE)
    known["steps"].number()
    known["ranks"].number(1)
    known["device"].text()
    managed = [one.text() for one in known["managed"].entries()]
    known["counts"].each(Plain.number)
    _ranks(known.get("rank_counts"), known["ranks"].value, len(managed))
    for number, group in enumerate(known["groups"].entries()):
        _group(group, number)
    _scaler(known["scaler"])
    _tensors(known["tensors"], shapes, sizes)
    for trace in known["traces"].entries():
        _trace(trace, len(managed))
    found: dict[str, Any] = plain.value
    return found


def _ranks(counts: Plain | None, ranks: int, parameters: int) -> None:
    if counts is None or counts.value is None:
        return
    for one in counts.entries(ranks):
        for count in one.entries(parameters):
            count.number()


def _group(group: Plain, number: int) -> None:
    params, settings = group.fields("params", "settings")
    for one in params.entries():
        one.text()
    settings.items()
    try:
        require_settings(settings.value, number)
    except ConfigError as error:
        settings.wrong("settings of an optimizer", found=str(error).partition(";")[0])


def _scaler(scaler: Plain) -> None:
    if scaler.value is None:
        return
    *factors, interval, quiet = scaler.fields(*LossScaler().state_dict())
    for one in factors:
        if not 0 < one.real() < float("inf"):
            one.wrong("a positive number")
    interval.number(1)
    quiet.number()


def _tensors(tensors: Plain, shapes: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
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


def _trace(trace: Plain, parameters: int) -> None:
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
        ([(record.at_backward,)], -1, LARGEST),
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
