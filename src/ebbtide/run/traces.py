"""Which iteration is traced, which plan it runs under, and when it is traced again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from ebbtide.errors import BudgetError
from ebbtide.plan.activations import OFF
from ebbtide.plan.afloat import plan_afloat
from ebbtide.plan.bound import least_traffic
from ebbtide.plan.draft import Plan
from ebbtide.plan.search import Cost
from ebbtide.plan.shape import ModelShape, Settings
from ebbtide.record import Record

REMEMBERED = 16
WATCHED = 4
"""So many passes are traced after one that was not as planned: the next need not be like it."""


@dataclass
class Known:
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

    def watch(self, passes: int) -> None:
        """A pass was another than planned, and nobody saw what it took: the next is traced, and where the largest of
        several is wanted so many are."""
        self.stale, self.watched, self.largest = True, passes, None

    def after(self, record: Record) -> Known:
        """What is known when a pass has been traced. The plan is for the largest of several that differ."""
        if not self.watched:
            return Known(record)
        left = self.watched - 1
        largest = max((one for one in (self.largest, record) if one is not None), key=lambda one: one.peak)
        if record.peak > self.record.peak or (not left and largest is not self.record):
            return Known(largest, stale=left > 0, watched=left, largest=largest)
        self.stale, self.watched, self.largest = left > 0, left, largest
        return self


class Traces:
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
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._least: tuple[Record, int] | None = None

    def find(self, signature: str) -> Known | None:
        known = self._known.get(signature)
        if known is not None:
            self._known.move_to_end(signature)
        return known

    def learn(self, record: Record) -> Known:
        self.count += 1
        before = self._known.get(record.signature)
        known = Known(record) if before is None else before.after(record)
        self._known[record.signature] = known
        self._known.move_to_end(record.signature)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known

    def records(self) -> list[Record]:
        """Those of real iterations, the least recently used first."""
        return [known.record for known in self._known.values() if known.record.source == "live"]

    def recall(self, record: Record) -> None:
        """One of an earlier run, of the same model."""
        if self.offload == OFF or record.saved:
            self.learn(record)
            self.count -= 1

    def plan(self, known: Known) -> Plan:
        room = self.settings.device, self.settings.host
        found = known.plans.get(room)
        if found is None:
            found = known.plans[room] = self._make(known.record, self.settings)
        return found

    def fits(self, known: Known, device: int) -> bool:
        """Whether there is a plan with so much of the device."""
        room = device, self.settings.host
        if room not in known.plans:
            try:
                known.plans[room] = self._make(known.record, replace(self.settings, device=device))
            except BudgetError:
                known.plans[room] = None
        return known.plans[room] is not None

    def _make(self, record: Record, settings: Settings) -> Plan:
        return plan_afloat(self.shape, record, settings, self.offload, self.cost)

    def highest(self) -> int:
        """The highest tide that any known kind of input has."""
        return max((known.record.peak for known in self._known.values()), default=-1)

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
        for known in self._known.values():
            known.plans.clear()
            known.followed = False
