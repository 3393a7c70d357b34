"""A plan carried out in thought: what the executor would do at each moment, as tasks that wait for each other.

The walk keeps the executor's books (what is on the device, what is on its way, what is out of date) and, like the
executor, brings on demand what the plan did not bring in time. Iterations are walked one after the other, because
what one leaves behind is what the next begins with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ebbtide.plan.draft import Plan
from ebbtide.plan.hostside import STAGES
from ebbtide.plan.offload import NEAR
from ebbtide.plan.rates import (
    COMPUTE,
    CORES,
    HOST,
    READ,
    TO_DEVICE,
    TO_HOST,
    WIRE,
    WRITE,
    Rates,
    Shares,
)
from ebbtide.plan.residency import FREE, KEEP, SPILL, STALE, Use
from ebbtide.plan.shape import GRAD, PARAM, WHOLE, WHOLE_GRAD, ModelShape, Settings
from ebbtide.plan.simulate import Task, simulate
from ebbtide.plan.uses import uses_of

MOVES = (TO_DEVICE, TO_HOST)
AHEAD = 2
"""Moments before the one that needs them at which activations start on their way back."""
ITERATIONS = 3
"""Walked: a cold one, one that follows it, and the steady one that counts."""


@dataclass(frozen=True)
class Job:
    """All that decides how an iteration runs."""

    shape: ModelShape
    plan: Plan
    settings: Settings
    rates: Rates
    update_bytes: tuple[int, ...]
    """By chunk: what an update of this rank's slice reads and writes."""
    captured: tuple[int, ...] = ()
    """By parameter: bytes of its gradient that are copied when it arrives; left out, gradients wait where autograd
    made them."""
    blocking: bool = True
    """The thread that issues the computation waits for each update on the host."""
    all_reduce: bool = False
    """Every rank has all of the model: gradients are summed over ranks."""
    lock_free: bool = False
    """Updates go on beside the passes, which wait for none."""
    exchanges: Mapping[int, int] = field(default_factory=dict)
    """By moment of the record: bytes that a rank sends to the others (experts' tokens)."""
    offloaded: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By moment of the record, the activations that leave after it: bytes, and the moment that needs them again."""
    clip: bool = False
    """The norm is a barrier: with several ranks it waits for all reductions."""
    max_staleness: int = 1


@dataclass
class Walked:
    tasks: list[Task]
    last: list[int]
    """By iteration, the computing task that ends it."""
    first: list[int]
    peak: int
    """Bytes on the device, the most in any moment."""
    peak_moment: int
    peak_tags: dict[str, int]


def step_seconds(job: Job) -> float:
    """Of the steady iteration."""
    walked = walk(job)
    run = simulate(walked.tasks)
    return paced(job, run.ends[walked.last[-1]] - run.ends[walked.last[-2]])


def paced(job: Job, step: float) -> float:
    """A step that waits for lock-free updates only where they would fall too far behind."""
    return max(step, streamed_update(job) / job.max_staleness) if job.lock_free else step


def streamed_update(job: Job) -> float:
    """One pass of the updating thread over all chunks that are not updated on the device: read, update and write
    overlap."""
    homes = job.plan.homes
    count = sum(job.update_bytes[i] for i, home in enumerate(homes) if home != "device")
    return max(job.rates.disk_both(streamed_bytes(job)), job.rates.update_on_host(count))


def streamed_bytes(job: Job) -> int:
    """Optimizer state on SSD: read and written in each pass over it."""
    return sum(job.shape.state_bytes[i] for i, home in enumerate(job.plan.homes) if home == "ssd")


def walk(job: Job, iterations: int = ITERATIONS) -> Walked:
    return _Walk(job).run(iterations)


@dataclass(slots=True)
class _Held:
    task: int
    """The task that brings or makes it."""
    dirty: bool
    stale: bool = False


class _Walk:
    def __init__(self, job: Job) -> None:
        self.job, self.plan, self.shape, self.rates = job, job.plan, job.shape, job.rates
        self.sizes, self.items, self.sources = self.shape.sizes, self.shape.items, self.shape.sources
        device = frozenset(i for i, home in enumerate(self.plan.homes) if home == "device")
        uses = uses_of(self.shape, self.plan.record, job.settings, device)
        self.pinned = job.settings.placement == "static"
        if self.pinned:
            uses = [use for use in uses if self.items[use.item][0] in (GRAD, WHOLE_GRAD)]
        length = len(self.plan.levels)
        self.starts: list[list[Use]] = [[] for _ in range(length)]
        self.ends: list[list[Use]] = [[] for _ in range(length)]
        for use in uses:
            self.starts[use.first].append(use)
            self.ends[use.last].append(use)
        record = self.plan.record
        self.seconds = [self.rates.compute(moment) for moment in record.moments]
        self.arriving: dict[int, list[int]] = {}
        for arrival in record.arrivals:
            self.arriving.setdefault(arrival.moment, []).append(arrival.parameter)
        self.finishing: dict[int, list[int]] = {}
        """By moment, the chunks whose last gradient arrives."""
        for chunk, place in self._last_arrivals().items():
            self.finishing.setdefault(place, []).append(chunk)
        self.updated = sorted(chunk for chunks in self.finishing.values() for chunk in chunks)
        self.tasks: list[Task] = []
        self.held: dict[int, _Held] = {}
        self.occupied = 0
        self.leaving: deque[tuple[int, int]] = deque()
        """(task, bytes): still on the device until the task ends."""
        self.leaving_bytes = 0
        self.compute = -1
        self.main: int = -1
        """What the issuing thread waited for last."""
        self.fresh: dict[int, int] = {}
        """By chunk, the task that made the newest value of its parameters."""
        self.down: dict[int, int] = {}
        """By chunk, the task that brings its gradient to the host or reduces it."""
        self.barrier = -1
        """The end of backward."""
        self.returned: list[int] = []
        """What the next pass waits for."""
        self.away: dict[int, list[tuple[int, int]]] = {}
        """By moment that needs them, activations that have left: (task, bytes)."""
        self.lowering: dict[int, list[tuple[int, int]]] = {}
        """By moment from which the level counts them no more, activations that are on their way."""
        self.asked: deque[int] = deque([-1] * AHEAD, maxlen=AHEAD)
        """The computing task at each of the last moments that needed activations back."""
        self.reduced: list[int] = []
        self.settled: dict[int, int] = {}
        """By item, the task that brought its newest value to the host or the SSD."""
        self.written: dict[int, int] = {}
        """By chunk, the task that wrote its state back to the SSD."""
        self.staged: list[int] = []
        self.peak, self.peak_moment, self.peak_tags = 0, -1, dict[str, int]()
        self.tags: dict[str, int] = dict.fromkeys((PARAM, GRAD, WHOLE, WHOLE_GRAD), 0)

    def run(self, iterations: int) -> Walked:
        first, last = [], []
        length = len(self.plan.record.moments)
        for _ in range(iterations):
            first.append(len(self.tasks))
            for place in range(length * self.plan.accumulate):
                self._moment(place, place % length)
            self.barrier = self.compute
            self._updates(length * self.plan.accumulate)
            last.append(max(self.compute, self.main, *self.returned[-1:]))
        return Walked(self.tasks, last, first, self.peak, self.peak_moment, self.peak_tags)

    # -- tasks ----------------------------------------------------------------------------------------

    def _task(
        self, lane: str, seconds: float, after: Iterable[int], moment: int, nbytes: int = 0, cause: str = ""
    ) -> int:
        first = lane == HOST and not self.rates.on_cpu
        known = tuple(sorted({place for place in after if place >= 0}))
        self.tasks.append(
            Task(
                lane,
                seconds,
                known,
                self._shares(lane, seconds, nbytes),
                cause or lane,
                moment,
                nbytes,
                first,
            )
        )
        return len(self.tasks) - 1

    def _shares(self, lane: str, seconds: float, nbytes: int) -> Shares:
        """What a task takes of what is shared; of memory what its bytes ask for over its seconds, for nothing flows
        while a move only begins."""
        found = self.rates.shares(lane)
        if lane not in MOVES or not seconds:
            return found
        flowing = nbytes / self.rates.machine.links.host_device / seconds
        return tuple((name, share if name == CORES else share * flowing) for name, share in found)

    # -- what is where --------------------------------------------------------------------------------

    def _take(self, item: int, task: int, dirty: bool) -> None:
        self.held[item] = _Held(task, dirty)
        self.occupied += self.sizes[item]
        self.tags[self.items[item][0]] += self.sizes[item]

    def _give(self, item: int, task: int) -> None:
        """The item's bytes are free again when `task` has ended."""
        del self.held[item]
        self.occupied -= self.sizes[item]
        self.tags[self.items[item][0]] -= self.sizes[item]
        self.leaving.append((task, self.sizes[item]))
        self.leaving_bytes += self.sizes[item]

    def _room_for(self, count: int, moment: int) -> list[int]:
        """The tasks that must end before `count` more bytes fit in a moment."""
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

    def _fetch(self, item: int, moment: int) -> None:
        """Starts bringing an item, after everything that was computed so far."""
        chunk = self.items[item][1]
        count = self.sizes[item]
        waits = [self.compute, self.main, *self._room_for(count, moment)]
        if item in self.sources:
            source = self.sources[item]
            if source not in self.held or self.held[source].stale:
                self._drop(source)
                self._fetch(source, moment)
            waits.append(self.held[source].task)
            seconds = self.rates.gather(count, self.rates.ranks)
            task = self._task(WIRE, seconds, [*waits, self.fresh.get(chunk, -1)], moment, count)
            self._take(item, task, dirty=False)
            return
        waits += [self.fresh.get(chunk, -1), self.settled.get(item, -1)]
        if chunk in self.plan.host.ssd_parameters:
            waits.append(self._task(READ, self.rates.disk(count, True), waits, moment, count))
        task = self._task(TO_DEVICE, self.rates.move(count), waits, moment, count)
        self._take(item, task, dirty=not self.plan.host.keep)

    def _evict(self, item: int, moment: int) -> None:
        held = self.held.get(item)
        if held is None:
            return
        if not held.dirty or held.stale or item in self.sources:
            self._give(item, self.compute)
            return
        chunk = self.items[item][1]
        count = self.sizes[item]
        waits = [held.task, self.compute, self.main, self.down.get(chunk, -1)]
        task = self._task(TO_HOST, self.rates.move(count), waits, moment, count)
        if item >= self.shape.chunks:
            self.down[chunk] = task
        self.settled[item] = task
        self._give(item, task)

    def _drop(self, item: int) -> None:
        if item in self.held:
            self._give(item, self.compute)

    # -- moments --------------------------------------------------------------------------------------

    def _trigger(self, place: int) -> None:
        for trigger in self.plan.triggers[place]:
            if not trigger.fetch:
                self._evict(trigger.item, place)
            elif trigger.item not in self.held or self.held[trigger.item].stale:
                self._drop(trigger.item)
                self._fetch(trigger.item, place)

    def _moment(self, place: int, once: int) -> None:
        for task, count in self.lowering.pop(place, []):
            self.leaving.append((task, count))
            self.leaving_bytes += count
        self._trigger(place)
        waits = self._bring(place)
        waits += self._room_for(0, place)
        waits += self._activations_back(place)
        exchanged = self.job.exchanges.get(once, 0)
        if exchanged:
            seconds = self.rates.exchange(exchanged, self.rates.ranks)
            waits.append(self._task(WIRE, seconds, [self.compute], place, exchanged))
        if place == 0:
            waits += self.returned
            self.returned = []
        self.compute = self._task(COMPUTE, self.seconds[once], [*waits, self.main], place)
        self._activations_away(place, once)
        self._capture(place, once)
        self._measure(place)
        self._finish(place)

    def _bring(self, place: int) -> list[int]:
        """What the moment uses is on the device, or on its way: the tasks that it waits for."""
        waits: list[int] = []
        for use in self.starts[place]:
            held = self.held.get(use.item)
            if held is not None and held.stale and not use.creates:
                self._drop(use.item)
                held = None
            if held is None and use.creates:
                waits += self._room_for(self.sizes[use.item], place)
                self._take(use.item, self.compute, dirty=True)
            elif held is None:
                self._fetch(use.item, place)
            now = self.held[use.item]
            now.dirty = now.dirty or use.writes
            now.stale = False
            waits.append(now.task)
        return waits

    def _activations_away(self, place: int, once: int) -> None:
        base = place - once
        for count, needed in self.job.offloaded.get(once, ()):
            task = self._task(TO_HOST, self.rates.move(count), [self.compute], place, count, "activations")
            self.away.setdefault(base + needed, []).append((task, count))
            self.lowering.setdefault(place + 1 + NEAR, []).append((task, count))

    def _activations_back(self, place: int) -> list[int]:
        """They start on their way a little before they are needed: for more there may be no room."""
        found = self.away.pop(place, [])
        if not found:
            return []
        since = self.asked[0]
        self.asked.append(self.compute)
        return [
            self._task(TO_DEVICE, self.rates.move(count), [task, since], place, count, "activations")
            for task, count in found
        ]

    def _capture(self, place: int, once: int) -> None:
        arrived = self.arriving.get(once)
        if not arrived or not self.job.captured:
            return
        count = sum(self.job.captured[parameter] for parameter in arrived)
        self.compute = self._task(COMPUTE, self.rates.capture(count), [], place)

    def _measure(self, place: int) -> None:
        total = self.occupied + self.plan.static_bytes + self.plan.levels[place]
        if total > self.peak:
            self.peak, self.peak_moment = total, place
            pinned = (
                sum(self.sizes[self.shape.used(i)] for i in range(self.shape.chunks)) if self.pinned else 0
            )
            self.peak_tags = {
                **self.tags,
                "param": self.tags[PARAM] + pinned,
                "state": self.plan.static_bytes - pinned,
                "non-model": self.plan.levels[place],
            }

    def _finish(self, place: int) -> None:
        for use in sorted(
            self.ends[place], key=lambda use: -use.item
        ):  # what is gathered goes before its slices
            held = self.held.get(use.item)
            kind, chunk = self.items[use.item]
            if held is None or use.after == KEEP:
                continue
            if kind in (WHOLE, WHOLE_GRAD) and self._holds_gradient(kind, chunk):
                count = self.sizes[use.item]
                task = self._task(
                    WIRE, self.rates.gather(count, self.rates.ranks), [self.compute], place, count
                )
                self.down[chunk] = task
                self.reduced.append(task)
                self._give(use.item, task)
            elif kind == WHOLE or use.after == FREE:
                self._give(use.item, self.compute)
            elif use.after == SPILL:
                self._spill(use.item, chunk, place)
            elif use.after == STALE:
                held.stale = True
            if use.after == STALE and kind == WHOLE and chunk in self.held:
                self.held[chunk].stale = True
        for chunk in self.finishing.get(place, ()):
            self._complete(chunk, place)

    def _holds_gradient(self, kind: str, chunk: int) -> bool:
        return kind == WHOLE_GRAD or (self.job.settings.take_over and self.shape.gradient_bytes[chunk] > 0)

    def _spill(self, item: int, chunk: int, place: int) -> None:
        count = self.sizes[item]
        waits = [self.compute, self.main, self.down.get(chunk, -1)]
        task = self._task(TO_HOST, self.rates.move(count), waits, place, count)
        self.down[chunk] = task
        self._give(item, task)

    # -- updates --------------------------------------------------------------------------------------

    def _complete(self, chunk: int, place: int) -> None:
        """A chunk's last gradient is there: it is summed over ranks where each has everything, and in backward the
        chunk is updated."""
        if self.job.all_reduce:
            count = 2 * self.shape.gradient_bytes[chunk]
            seconds = self.rates.gather(count, self.rates.ranks)
            self.down[chunk] = self._task(WIRE, seconds, [self.compute], place, count)
            self.reduced.append(self.down[chunk])
        if self.job.settings.in_backward:
            self._update(chunk, place)

    def _last_arrivals(self) -> dict[int, int]:
        base = len(self.plan.record.moments) * (self.plan.accumulate - 1)
        lasts: dict[int, int] = {}
        for arrival in self.plan.record.arrivals:
            chunk = self.shape.parameter_chunk[arrival.parameter]
            if self.shape.state_bytes[chunk]:
                lasts[chunk] = max(lasts.get(chunk, 0), base + arrival.moment)
        return lasts

    def _updates(self, base: int) -> None:
        if self.job.settings.in_backward:
            return
        if self.job.clip and self.reduced:
            self.barrier = self.main = self._task(HOST, 0.0, [self.barrier, *self.reduced], base, 0, "norm")
        self.reduced = []
        for chunk in self.updated:
            place = base + chunk
            self._trigger(place)
            if not self.job.lock_free or self.plan.homes[chunk] == "device":
                self._update(chunk, place)
            self._measure(place)
            for use in self.ends[place]:
                if use.after == FREE and use.item in self.held:
                    self._give(use.item, self.compute)

    def _update(self, chunk: int, place: int) -> None:
        count = self.job.update_bytes[chunk]
        home = self.plan.homes[chunk]
        ready = [self.down.get(chunk, -1)]
        if home == "device":
            waits = [*self._bring(place), *ready] if not self.job.settings.in_backward else ready
            self.compute = self._task(
                COMPUTE, self.rates.update_on_device(count), [*waits, self.main], place, 0, "device update"
            )
            self.fresh[chunk] = self.compute
            return
        state = self.shape.state_bytes[chunk]
        if home == "ssd":
            after = [self.staged[-STAGES]] if len(self.staged) >= STAGES else [self.barrier]
            after.append(self.written.get(chunk, -1))
            ready.append(self._task(READ, self.rates.disk(state, True), after, place, state))
        waits = [*ready, self.main, self.compute if self.job.settings.in_backward else self.barrier]
        task = self._task(HOST, self.rates.update_on_host(count), waits, place, 0, "update")
        if home == "ssd":
            self.written[chunk] = self._task(WRITE, self.rates.disk(state, False), [task], place, state)
            self.staged.append(self.written[chunk])
        if chunk in self.plan.host.ssd_parameters:
            count = self.shape.parameter_bytes[chunk]
            self.settled[chunk] = self._task(WRITE, self.rates.disk(count, False), [task], place, count)
        if self.job.blocking:
            self.main = task
        self.fresh[chunk] = task
        if self.pinned:
            self._bring_back(chunk, task, place)

    def _bring_back(self, chunk: int, task: int, place: int) -> None:
        """Parameters that stay on the device get their new values after the update on the host."""
        count = self.shape.parameter_bytes[chunk]
        came = self._task(TO_DEVICE, self.rates.move(count), [task], place, count)
        if chunk in self.shape.shared:
            whole = self.shape.whole_bytes[chunk]
            came = self._task(WIRE, self.rates.gather(whole, self.rates.ranks), [came], place, whole)
        self.returned.append(came)
