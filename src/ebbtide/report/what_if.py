"""What would change a step: the planner asked again with other budgets and settings, and simulated on the run's rates.

The rates are the run's own: bytes over the seconds in which they flowed, what each moment took to compute. A link that
carried nothing has no rate of its own, and takes that of the machine file's defaults.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ebbtide.errors import BudgetError
from ebbtide.forecasting.simulation.machine import DeviceSpec, HostSpec, LinkSpec, Machine, SsdSpec
from ebbtide.forecasting.simulation.rates import Rates, StepJob
from ebbtide.forecasting.simulation.walk import step_seconds
from ebbtide.planner.activation_trips import OFF
from ebbtide.planner.offloaded_plan import plan_afloat
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record, Work
from ebbtide.planner.shape import ModelShape, Settings, update_bytes
from ebbtide.report.figures import busy_seconds, flat

MEASURED = "measured"
PER_MOMENT = ("computing", "gradients", "ebbtide", "loop", "device_wait")
"""Causes that a step has whatever moves: they are part of their moment."""
UNKNOWN = 10e9
"""Bytes a second of a link that nothing is known of."""
WORTH = 1.03
"""Times as fast from which on a change is worth saying."""


@dataclass(frozen=True)
class WhatIf:
    seconds: float
    """Of the step as it was, simulated."""
    lifts: list[tuple[str, float]]
    """(change, times as fast)."""
    costly: list[tuple[str, str, float]]
    """Settings that cost more than they bring: (setting, what in its place, times as fast)."""


@dataclass(frozen=True)
class Problem:
    """What the planner was asked, when it made the plan of a recorded step."""

    shape: ModelShape
    settings: Settings
    record: Record
    offload: str
    master: str
    clip: bool

    def plain(self) -> dict[str, Any]:
        """Without what operators did, for the run's clock says what they took."""
        bare = replace(self.record, moments=tuple(replace(one, work=()) for one in self.record.moments))
        shape = {one.name: getattr(self.shape, one.name) for one in fields(ModelShape)}
        return {
            "shape": shape,
            "settings": asdict(self.settings),
            "record": bare.plain(),
            "offload": self.offload,
            "master": self.master,
            "clip": self.clip,
        }

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Problem:
        shape = ModelShape(**{key: _tuples(value) for key, value in data["shape"].items()})
        settings = Settings(**data["settings"])
        record = Record.from_plain(data["record"])
        return Problem(shape, settings, record, data["offload"], data["master"], data["clip"])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def what_if(step: Mapping[str, Any], kind: str, ranks: int) -> WhatIf | None:
    """`step`: one that was recorded in full. None where it ran by no plan, or the planner can't be asked again."""
    if not step.get("problem") or step.get("lost"):
        return None
    asked = Problem.from_plain(step["problem"])
    if asked.offload != OFF:
        return None  # what leaves would have to be chosen anew, with bytes that no clock has seen
    machine = measured_machine(step, asked, kind, ranks)
    timed = replace(asked, record=_timed(asked.record, step, asked.settings.accumulate, kind))
    base = _seconds(timed, machine, kind)
    if base is None:
        return None
    lifts = [
        (name, found) for name, change in _changes(timed) if (found := _factor(base, change, machine, kind))
    ]
    costly = [
        (setting, instead, found)
        for setting, instead, change in _simpler(timed)
        if (found := _factor(base, change, machine, kind)) and found >= WORTH
    ]
    return WhatIf(base, sorted(lifts, key=lambda lift: -lift[1]), costly)


def _factor(base: float, change: Problem, machine: Machine, kind: str) -> float | None:
    seconds = _seconds(change, machine, kind)
    return None if not seconds else base / seconds


def _seconds(asked: Problem, machine: Machine, kind: str) -> float | None:
    try:
        plan: Plan = plan_afloat(asked.shape, asked.record, asked.settings, asked.offload)
    except BudgetError:
        return None
    settings = asked.settings
    return step_seconds(
        StepJob(
            asked.shape,
            plan,
            settings,
            Rates(machine),
            update_bytes(asked.shape, asked.master),
            blocking=not settings.prefetch,
            lock_free=settings.lock_free,
            clip=asked.clip,
            max_staleness=settings.max_staleness,
        )
    )


def _changes(asked: Problem) -> list[tuple[str, Problem]]:
    """What one could buy, or set."""
    settings = asked.settings

    def of(**changes: Any) -> Problem:
        return replace(asked, settings=replace(settings, given={}, **changes))

    found = [("a quarter more device.memory", of(device=settings.device * 5 // 4))]
    if settings.ssd and settings.host:
        found.append(("a quarter more host.memory", of(host=settings.host * 5 // 4)))
    if not settings.in_backward and not settings.lock_free and settings.accumulate == 1 and not asked.clip:
        found.append(('updates = "in-backward"', of(in_backward=True, in_parameter_space=False)))
    return found


def _simpler(asked: Problem) -> list[tuple[str, str, Problem]]:
    """Settings that are not the usual ones, and the usual one: (setting, the usual one, the question)."""
    settings = asked.settings
    rows: list[tuple[bool, str, str, dict[str, Any]]] = [
        (
            settings.lock_free,
            'updates = "lock-free"',
            "exact updates",
            {"waiting_width": 0, "max_staleness": 1},
        ),
        (settings.in_backward, 'updates = "in-backward"', "exact updates", {"in_backward": False}),
        (not settings.prefetch, "prefetch = false", "prefetch = true", {"prefetch": True}),
        (
            settings.placement != "auto",
            f'placement = "{settings.placement}"',
            'placement = "auto"',
            {"placement": "auto"},
        ),
        (
            settings.eviction != "farthest-next-use",
            f'eviction = "{settings.eviction}"',
            'eviction = "farthest-next-use"',
            {"eviction": "farthest-next-use"},
        ),
    ]
    return [
        (setting, usual, replace(asked, settings=replace(settings, **change)))
        for unusual, setting, usual, change in rows
        if unusual
    ]


# -- what the run has measured ------------------------------------------------------------------------


def measured_machine(step: Mapping[str, Any], asked: Problem, kind: str, ranks: int) -> Machine:
    moved, settings = _moved_rates(step), asked.settings
    link = max(moved.get("host_to_device", 0.0), moved.get("device_to_host", 0.0)) or UNKNOWN
    read, write = moved.get("ssd_read", 0.0), moved.get("ssd_write", 0.0)
    disk = SsdSpec(memory=max(1, settings.ssd))
    disk = replace(disk, read=read or disk.read, write=write or disk.write)
    disk = replace(disk, total=max(disk.read, disk.write))
    memory = max(1, settings.device)
    return Machine(
        name=MEASURED,
        device=DeviceSpec(memory=memory, flops=1e9, bandwidth=UNKNOWN, kind=kind, efficiency=1.0, launch=0.0),
        host=HostSpec(
            memory=memory + settings.host,
            cores=8,
            bandwidth=8 * link,
            update=_update_rate(step, asked, kind) or None,
        ),
        links=LinkSpec(host_device=link, node_node=moved.get("wire", 0.0) or UNKNOWN, latency=0.0),
        ssd=disk,
        nodes=ranks,
    )


def _moved_rates(step: Mapping[str, Any]) -> dict[str, float]:
    """Bytes a second by link, while there were some on it."""
    found = {}
    for link in step["bytes"]:
        rows = [row for row in step["moves"] if row[0] == link and row[5] is not None and row[6] is not None]
        busy = busy_seconds(link, [[row[5], row[6], 0, ""] for row in rows])
        if busy > 0:
            found[link] = sum(row[3] for row in rows) / busy
    return found


def _update_rate(step: Mapping[str, Any], asked: Problem, kind: str) -> float:
    """Bytes a second of the optimizer's arithmetic, over the chunks that it came to."""
    volume = update_bytes(asked.shape, asked.master)
    rows = [
        row for row in step["updates"] if kind == "cpu" or row[1] != "device"
    ]  # a GPU's was only launched there
    busy = busy_seconds("updates", [[begin, end, 0, ""] for _, _, begin, end, _ in rows])
    if kind == "cpu":
        beside = Together([(begin, end) for _, _, begin, end, apart in rows if apart])
        computing = [row for row in flat(step["spans"]) if row[3] in PER_MOMENT]
        busy -= sum(beside.within(row[0], row[1]) for row in computing) / 2
    chunks = {chunk for chunk, *_ in rows if chunk < len(volume)}
    return sum(volume[chunk] for chunk in chunks) / busy if busy > 0 else 0.0


def _timed(record: Record, step: Mapping[str, Any], accumulate: int, kind: str) -> Record:
    """The record with what each moment takes by itself, as work for a device of 1e9 operations a second."""
    length = len(record.moments)
    spent = [0.0] * length
    place_at = _places(step["moments"], length)
    beside = Together([(begin, end) for _, _, begin, end, apart in step["updates"] if apart])
    for begin, end, _, cause, *_ in flat(step["spans"]):
        if cause in PER_MOMENT:
            spent[place_at(begin)] += end - begin - (beside.within(begin, end) / 2 if kind == "cpu" else 0.0)
    moments = tuple(
        replace(moment, work=(Work(MEASURED, max(1, round(1e9 * seconds / accumulate)), 0),))
        for moment, seconds in zip(record.moments, spent, strict=True)
    )
    return replace(record, moments=moments)


class Together:
    """Stretches of time in which updates ran beside the computation. On a CPU both want all cores, and each had half of
    them: the simulation adds that again, where a plan has them at the same time."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        for begin, end in sorted(spans):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def within(self, begin: float, end: float) -> float:
        """Their seconds between two points of time."""
        found = 0.0
        for place in range(max(0, bisect_right(self._begins, begin) - 1), len(self._begins)):
            if self._begins[place] >= end:
                break
            found += max(0.0, min(end, self._ends[place]) - max(begin, self._begins[place]))
        return found


def _places(moments: Sequence[Sequence[Any]], length: int) -> Callable[[float], int]:
    """Gives the moment of the record in which a time lies. Updates come after the last one."""
    known = [row for row in moments if row[1] != "update" and row[3] >= 0]
    begins = [row[0] for row in known]

    def place(time: float) -> int:
        index = bisect_right(begins, time) - 1
        return known[index][3] % length if index >= 0 else 0

    return place
