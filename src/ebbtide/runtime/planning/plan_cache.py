"""Which iteration is traced, which plan it runs under, and when it is traced again."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from ebbtide.errors import BudgetError
from ebbtide.forecasting.simulation.bound import least_traffic
from ebbtide.planner.activation_trips import OFF
from ebbtide.planner.offloaded_plan import plan_afloat
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record
from ebbtide.planner.search import Cost
from ebbtide.planner.shape import ModelShape, Settings
from ebbtide.runtime.planning.input_shapes import (
    DERIVED,
    NEAR,
    SWITCHES,
    Kind,
    alike,
    beyond,
    grown,
    kind_of,
    raised,
    same,
)

REMEMBERED = 16
MUCH = 1.25
"""A pass that saves more than that many times what any did before is another: it is traced."""
SPARE = 16
"""Of what passes save whose sizes vary, this part more is planned for."""
ROOMS = 8
"""So many plans are kept of one kind of input."""
WATCHED = 4
"""So many passes are traced after one that was not as planned: the next need not be like it."""


@dataclass
class KnownInput:
    """What is known of one kind of input."""

    record: Record
    plans: dict[tuple[int, int], Plan | None] = field(default_factory=dict)
    """By bytes of the device and of the host; None where there is none."""
    stale: bool = False
    """Execution left this trace: it is used as far as it goes, and made again."""
    followed: bool = False
    """A pass went as planned from its beginning to its end."""
    watched: int = 0
    """Passes that are still to be traced, for those of this kind are not all alike."""
    largest: Record | None = None
    """Of those that have been since."""
    imagined: Record | None = None
    """The pass as it was before one ran: without what the loop holds beside it."""
    recalled: bool = False
    """It is from a file: where no plan comes of it, it is made anew."""
    peak: int | None = None
    """Bytes of non-model data by the plan that a pass of it has begun with, at the highest."""

    packed: int = -1
    """Bytes that autograd has saved, at the most; -1 where that is not known."""
    beyond: int = 0
    """Bytes that passes may take beside the record."""
    after_forward: int = 0
    """Bytes of non-model data when forward had ended, at the most: the loop may let go of outputs before backward."""

    @property
    def to_trace(self) -> bool:
        """Whether the next pass is to be recorded. What was derived from other shapes holds as it is."""
        return self.stale or self.record.source not in ("live", DERIVED)

    def widen(self, packed: int) -> bool:
        """A pass has saved so many bytes, a little more than its plan is for: what varies varies again, so plans are
        made for a little more than that. False where it was much more."""
        if packed > self.packed * MUCH or self.stale:
            return False
        wanted = packed + packed // SPARE
        if wanted > self.packed:
            grown = wanted / max(1, self.packed)
            self.beyond += max(wanted - self.packed, math.ceil(self.record.peak * (grown - 1)))
            self.packed = wanted
            self.plans.clear()
        return True

    @property
    def roomier(self) -> Record:
        """The pass, with that much more at every moment."""
        if not self.beyond:
            return self.record
        return replace(raised(self.record, self.beyond), packed=self.packed)

    def keep(self, room: tuple[int, int], plan: Plan | None) -> None:
        """With what engines beside this one leave there may be as many rooms as steps: the last few have a plan."""
        self.plans.pop(room, None)
        self.plans[room] = plan
        while len(self.plans) > ROOMS:
            del self.plans[next(iter(self.plans))]

    def watch(self, passes: int) -> None:
        """A pass was another than planned, and nobody saw what it took: the next is traced, and where the largest of
        several is wanted so many are."""
        self.stale, self.watched, self.largest = True, passes, None

    def after(self, record: Record) -> KnownInput:
        """What is known when a pass has been traced. The plan is for the largest of several that differ."""
        watched, found = self.watched, self._after(record)
        seen = max(record.packed, found.record.packed, self.record.packed if watched else -1)
        if seen != found.record.packed:
            found.record = replace(found.record, packed=seen)
        found.packed = max(seen, self.packed if watched else -1)
        found.beyond = self.beyond if watched else 0
        return found

    def _after(self, record: Record) -> KnownInput:
        if not self.watched:
            return KnownInput(record, imagined=self.imagined, after_forward=self.after_forward)
        left = self.watched - 1
        largest = max((one for one in (self.largest, record) if one is not None), key=lambda one: one.peak)
        if record.peak > self.record.peak or (not left and largest is not self.record):
            found = KnownInput(largest, stale=left > 0, watched=left, largest=largest, imagined=self.imagined)
            found.after_forward = self.after_forward
            return found
        self.stale, self.watched, self.largest = left > 0, left, largest
        return self


class PlanCache:
    """Records and plans by signature, the most recently used ones."""

    def __init__(
        self, shape: ModelShape, settings: Settings, cost: Cost | None = None, offload: str = OFF
    ) -> None:
        """`offload`: which activations leave the device between forward and backward."""
        self.shape = shape
        self.settings = settings
        self.cost = cost
        self.offload = offload
        self.count = 0
        self._known: OrderedDict[str, KnownInput] = OrderedDict()
        self._derived: OrderedDict[str, KnownInput] = OrderedDict()
        """What serves smaller shapes, by the signature that it is known from."""
        self._idle: dict[tuple[str, ...], bool] = {}
        """By structure: whether the numbers among the arguments make no difference, where that was tried."""
        self._one_size: set[tuple[str, ...]] = set()
        """Structures of which no pass of a larger size could be imagined."""
        self._least: tuple[Record, int] | None = None

    def find(self, signature: str) -> KnownInput | None:
        known = self._known.get(signature)
        if known is not None:
            self._known.move_to_end(signature)
        return known

    def learn(self, record: Record) -> KnownInput:
        self.count += 1
        before = self._known.get(record.signature)
        known = KnownInput(record, packed=record.packed) if before is None else before.after(record)
        if record.source == "symbolic":
            known.imagined = record
        self._known[record.signature] = known
        self._known.move_to_end(record.signature)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known

    def foresee(self, record: Record) -> KnownInput:
        """One that was imagined. It is to be recorded when it runs, unless one of its kind was, and was alike."""
        known, kind = self.learn(record), kind_of(record.signature)
        for signature, other in self._known.items():
            if (
                kind_of(signature).structure == kind.structure
                and other.record.source == "live"
                and other.imagined is not None
                and alike(record, other.imagined)
            ):
                known.record = raised(replace(record, source=DERIVED), self._unimagined(kind))
        return known

    def to_compare(self, signature: str) -> tuple[tuple[int, ...], ...] | None:
        """Sizes to imagine a batch of, to see whether its numbers make a difference: those of a known one with others.
        None where that was tried, or there is none."""
        kind = kind_of(signature)
        if kind.structure in self._idle:
            return None
        for name, known in self._known.items():
            other = kind_of(name)
            alike_but = other.structure == kind.structure and other.numbers != kind.numbers
            if alike_but and known.imagined is not None:
                return other.sizes
        return None

    def compare(self, signature: str, record: Record | None) -> None:
        """`record`: the pass with the numbers of this signature, and the sizes that `to_compare` gave."""
        kind = kind_of(signature)
        sizes = None if record is None else kind_of(record.signature).sizes
        self._idle[kind.structure] = record is not None and any(
            same(record, known.imagined)
            for name, known in self._known.items()
            if known.imagined is not None
            and kind_of(name).structure == kind.structure
            and kind_of(name).sizes == sizes
        )

    # -- by other shapes ------------------------------------------------------------------------------

    def cover(self, signature: str, whatever: bool = False) -> KnownInput | None:
        """What is known of a shape from one that encloses it. `whatever`: also where its numbers are others. Where
        activations leave, each shape has a plan of its own: a smaller one saves tensors of other sizes."""
        if self.offload != OFF:
            return None
        kind = kind_of(signature)
        above = [
            (other, known)
            for name, known in self._known.items()
            if (other := kind_of(name)).covers(kind)
            and not (known.stale or known.watched)
            and (whatever or self._same_numbers(kind, other))
        ]
        if not above:
            return None
        high, known = min(above, key=lambda one: (one[0].elements, one[1].record.peak))
        if high.elements > NEAR * kind.elements:
            return None
        self._known.move_to_end(known.record.signature)
        return self._derive(high, known)

    def _same_numbers(self, kind: Kind, other: Kind) -> bool:
        return kind.numbers == other.numbers or self._idle.get(kind.structure, False)

    def _derive(self, kind: Kind, known: KnownInput) -> KnownInput:
        """Its plan, for smaller ones. What was only imagined lacks what passes of the kind took beside."""
        record = known.record
        if record.source == "symbolic":
            record = raised(record, self._unimagined(kind))
        key = record.signature
        found = self._derived.get(key)
        if (
            found is None
            or replace(found.record, source="") != replace(record, source="")
            or found.beyond < known.beyond
        ):
            found = self._derived[key] = KnownInput(
                replace(record, source=DERIVED), packed=known.packed, beyond=known.beyond
            )
        self._derived.move_to_end(key)
        while len(self._derived) > REMEMBERED:
            self._derived.popitem(last=False)
        return found

    def _unimagined(self, kind: Kind) -> int:
        """As far as smaller passes have shown, as it grows with the sizes."""
        found = 0
        for name, known in self._known.items():
            other = kind_of(name)
            if other.structure == kind.structure and known.record.source == "live" and known.imagined:
                times = max(1.0, kind.elements / max(1, other.elements))
                found = max(found, math.ceil(times * beyond(known.record, known.imagined)))
        return found

    def outgrown(self, signature: str) -> tuple[tuple[int, ...], ...] | None:
        """Sizes to imagine in place of those of a batch that is larger than what is known of its kind; None where
        nothing is known, or nothing is larger."""
        if self.offload != OFF:
            return None
        kind = kind_of(signature)
        known = {
            other: one.record.peak
            for name, one in self._known.items()
            if (other := kind_of(name)).structure == kind.structure
        }
        if not known or kind.structure in self._one_size or any(other.covers(kind) for other in known):
            return None
        largest = max(known, key=lambda one: one.elements)
        # What grows with the square of a size may come to that.
        most = self.settings.device - 2 * self.shape.largest
        return grown(kind, largest, math.sqrt(max(1.0, most / max(1, known[largest]))))

    def cannot_grow(self, signature: str) -> None:
        """A larger one could not be imagined: a table of positions ends, say."""
        self._one_size.add(kind_of(signature).structure)

    def records(self) -> list[Record]:
        """Those of real iterations, the least recently used first."""
        return [known.record for known in self._known.values() if known.record.source == "live"]

    def recall(self, record: Record) -> None:
        """One of an earlier run, of the same model. One of an earlier version has another signature."""
        if not record.signature.endswith(SWITCHES):
            return
        if self.offload == OFF or record.saved:
            self.learn(record).recalled = True
            self.count -= 1

    def forget(self, signature: str) -> None:
        self._known.pop(signature, None)

    def plan(self, known: KnownInput, bare: bool = False) -> Plan:
        """`bare`: where there is none with room for what varies, one without."""
        room = self.settings.device, self.settings.host
        found = known.plans.get(room)
        if found is None:
            found = self._make(known.record if bare else known.roomier, self.settings)
        known.keep(room, found)
        return found

    def fits(self, known: KnownInput, device: int) -> bool:
        """Whether there is a plan with so much of the device."""
        room = device, self.settings.host
        if room in known.plans:
            return known.plans[room] is not None
        try:
            found = self._make(known.record, replace(self.settings, device=device))
        except BudgetError:
            known.keep(room, None)
            return False
        if not known.beyond:  # else the one to go by is with room for what varies
            known.keep(room, found)
        return True

    def _make(self, record: Record, settings: Settings) -> Plan:
        return plan_afloat(self.shape, record, settings, self.offload, self.cost)

    def highest(self) -> int | None:
        """The highest tide of the shapes that there were; None before the first."""
        every = (*self._known.values(), *self._derived.values())
        return max((known.peak for known in every if known.peak is not None), default=None)

    def least_traffic(self, record: Record) -> int:
        """What no plan for this record could do without. Whoever asks after each step asks for the same one."""
        if self._least is None or self._least[0] is not record:
            self._least = (record, least_traffic(self.shape, record, self.settings))
        return self._least[1]

    def settle(self, device: int, host: int | None = None) -> None:
        """The chunks have more or less of the device, or of the host, from now on."""
        host = self.settings.host if host is None else host
        self.settings, self._least = replace(self.settings, device=device, host=host), None

    def replan(self, shape: ModelShape, device: int) -> None:
        """The model's chunks have changed: every plan is made again."""
        self.shape = shape
        self.settle(device)
        self._derived.clear()
        for signature, known in list(self._known.items()):
            known.plans.clear()
            known.followed, known.imagined = False, None
            if known.record.source != "live":
                self.forget(signature)
