"""The books of a walk through a plan: what is on the device, what is on its way, what is out of date; and the tasks that
each move makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ebbtide.forecasting.simulation.rates import CORES, HOST, READ, TO_DEVICE, TO_HOST, WIRE, WRITE, StepJob
from ebbtide.forecasting.simulation.simulator import Shares, Task
from ebbtide.planner.shape import GRAD, PARAM, WHOLE, WHOLE_GRAD

MOVES = (TO_DEVICE, TO_HOST)


@dataclass(slots=True)
class OnDevice:
    task: int
    """The task that brings or makes it."""
    dirty: bool
    stale: bool = False


class Books:
    def __init__(self, job: StepJob) -> None:
        self.job, self.plan, self.shape, self.rates = job, job.plan, job.shape, job.rates
        self.sizes, self.items, self.sources = self.shape.sizes, self.shape.items, self.shape.sources
        self.tasks: list[Task] = []
        self.held: dict[int, OnDevice] = {}
        self.occupied = 0
        self.leaving: deque[tuple[int, int]] = deque()
        """(task, bytes): still on the device until the task ends."""
        self.leaving_bytes = 0
        self.compute = -1
        """The last task that computed."""
        self.main = -1
        """What the issuing thread waited for last."""
        self.fresh: dict[int, int] = {}
        """By chunk, the task that made the newest value of its parameters."""
        self.down: dict[int, int] = {}
        """By chunk, the task that brings its gradient to the host or reduces it."""
        self.settled: dict[int, int] = {}
        """By item, the task that brought its newest value to the host or the SSD."""
        self.beside = job.settings.ssd_beside_device
        """There is no host: what leaves the device goes to SSD."""
        self.tags: dict[str, int] = dict.fromkeys((PARAM, GRAD, WHOLE, WHOLE_GRAD), 0)

    # -- tasks ----------------------------------------------------------------------------------------

    def task(
        self, lane: str, seconds: float, after: Iterable[int], moment: int, nbytes: int = 0, cause: str = ""
    ) -> int:
        """`after`: tasks, or -1 for none."""
        known = tuple(sorted({task for task in after if task >= 0}))
        shares = self._shares(lane, seconds, nbytes) if lane in MOVES else self.rates.shares(lane)
        first = lane == HOST and not self.rates.on_cpu
        self.tasks.append(Task(lane, seconds, known, shares, cause or lane, moment, nbytes, first))
        return len(self.tasks) - 1

    def _shares(self, lane: str, seconds: float, nbytes: int) -> Shares:
        """What a move takes of what is shared; of memory what its bytes ask for over its seconds, for nothing flows
        while it only begins."""
        found = self.rates.shares(lane)
        if not seconds:
            return found
        flowing = nbytes / self.rates.machine.links.host_device / seconds
        return tuple((name, share if name == CORES else share * flowing) for name, share in found)

    # -- what is where --------------------------------------------------------------------------------

    def take(self, item: int, task: int, dirty: bool) -> None:
        self.held[item] = OnDevice(task, dirty)
        self.occupied += self.sizes[item]
        self.tags[self.items[item][0]] += self.sizes[item]

    def give(self, item: int, task: int) -> None:
        """The item's bytes are free again when `task` has ended."""
        del self.held[item]
        self.occupied -= self.sizes[item]
        self.tags[self.items[item][0]] -= self.sizes[item]
        self.leaving.append((task, self.sizes[item]))
        self.leaving_bytes += self.sizes[item]

    def room_for(self, count: int, moment: int) -> list[int]:
        """The tasks that must end before `count` more bytes fit in a moment."""
        if not self.leaving:
            return []
        budget = self.job.settings.device - self.plan.static_bytes - self.plan.levels[moment]
        over = self.occupied + self.leaving_bytes + count - budget
        waits: list[int] = []
        while over > 0 and self.leaving:
            task, size = self.leaving.popleft()
            self.leaving_bytes -= size
            over -= size
            waits.append(task)
        return waits

    # -- moves ----------------------------------------------------------------------------------------

    def fetch(self, item: int, moment: int) -> None:
        """Starts bringing an item, after everything that was computed so far."""
        chunk = self.items[item][1]
        count = self.sizes[item]
        waits = [self.compute, self.main, *self.room_for(count, moment)]
        if item in self.sources:
            source = self.sources[item]
            if source not in self.held or self.held[source].stale:
                self.drop(source)
                self.fetch(source, moment)
            waits.append(self.held[source].task)
            seconds = self.rates.gather(count, self.rates.ranks)
            task = self.task(WIRE, seconds, [*waits, self.fresh.get(chunk, -1)], moment, count)
            self.take(item, task, dirty=False)
            return
        waits += [self.fresh.get(chunk, -1), self.settled.get(item, -1)]
        if self.beside:
            self.take(item, self.task(READ, self.rates.disk(count, True), waits, moment, count), dirty=False)
            return
        if chunk in self.plan.host.ssd_parameters:
            waits.append(self.task(READ, self.rates.disk(count, True), waits, moment, count))
        task = self.task(TO_DEVICE, self.rates.move(count), waits, moment, count)
        self.take(item, task, dirty=False)

    def evict(self, item: int, moment: int) -> None:
        held = self.held.get(item)
        if held is None:
            return
        if not held.dirty or held.stale or item in self.sources:
            self.give(item, self.compute)
            return
        chunk = self.items[item][1]
        count = self.sizes[item]
        waits = [held.task, self.compute, self.main, self.down.get(chunk, -1)]
        if self.beside:
            task = self.task(WRITE, self.rates.disk(count, False), waits, moment, count)
        else:
            task = self.task(TO_HOST, self.rates.move(count), waits, moment, count)
        if item >= self.shape.chunks:
            self.down[chunk] = task
        self.settled[item] = task
        self.give(item, task)

    def drop(self, item: int) -> None:
        if item in self.held:
            self.give(item, self.compute)

    def spill(self, item: int, chunk: int, place: int) -> None:
        count = self.sizes[item]
        waits = [self.compute, self.main, self.down.get(chunk, -1)]
        task = self.task(TO_HOST, self.rates.move(count), waits, place, count)
        self.down[chunk] = task
        self.give(item, task)
