"""A plan carried out in thought: what the executor would do at each moment, as tasks that wait for each other.

The walk keeps the executor's books (what is on the device, what is on its way, what is out of date) and, like the
executor, brings on demand what the plan did not bring in time. Iterations are walked one after the other, because
what one leaves behind is what the next begins with.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.forecasting.simulation.books import Books
from ebbtide.forecasting.simulation.pace import pace
from ebbtide.forecasting.simulation.rates import COMPUTE, HOST, READ, TO_DEVICE, TO_HOST, WIRE, WRITE, StepJob
from ebbtide.forecasting.simulation.simulator import Task, simulate
from ebbtide.planner.activation_trips import SSD, Trip
from ebbtide.planner.retention import FREE, KEEP, SPILL, STALE, Use
from ebbtide.planner.shape import PARAM, WHOLE, WHOLE_GRAD
from ebbtide.planner.sizes import SLOTS
from ebbtide.planner.uses import host_direct_bytes, last_arrivals

ITERATIONS = 3
"""Walked: a cold one, one that follows it, and the steady one that counts."""


@dataclass
class Walked:
    tasks: list[Task]
    last: list[int]
    """By iteration, the computing task that ends it."""
    first: list[int]
    peak_tags: dict[str, int]
    """Bytes on the device in its fullest moment."""

    @property
    def steady(self) -> range:
        """The places of the steady iteration's tasks."""
        return range(self.first[-1], len(self.tasks))

    def moved(self) -> dict[str, int]:
        """Bytes by lane, in the steady iteration."""
        found = dict.fromkeys((TO_DEVICE, TO_HOST, READ, WRITE, WIRE), 0)
        for place in self.steady:
            task = self.tasks[place]
            if task.lane in found:
                found[task.lane] += task.nbytes
        return found


def step_seconds(job: StepJob) -> float:
    """Of the steady iteration."""
    walked = walk(job)
    run = simulate(walked.tasks)
    return pace(job, run.ends[walked.last[-1]] - run.ends[walked.last[-2]], walked.moved()).step


def least_seconds(job: StepJob) -> float:
    """What the steady iteration takes at least, without walking: updates on the host begin when backward has ended, one
    after the other, and the next backward begins when forward has used what they made. 0.0 where that does not hold."""
    settings, record, shape = job.settings, job.plan.record, job.shape
    if settings.in_backward or job.lock_free or record.forward < 0:
        return 0.0
    used = {
        chunk
        for access in record.accesses
        if access.first <= record.forward
        for chunk in shape.run_chunks[access.run]
    }
    came = last_arrivals(record, shape.parameter_chunk)
    updated = [i for i in came if shape.state_bytes[i] and job.plan.homes[i] == "host"]
    if not used.issuperset(updated):
        return 0.0
    backward = sum(job.rates.compute(moment) for moment in record.moments[record.forward + 1 :])
    return backward + sum(job.rates.update_on_host(job.update_bytes[i]) for i in updated)


def walk(job: StepJob, iterations: int = ITERATIONS) -> Walked:
    return _Walk(job).run(iterations)


class _Walk(Books):
    def __init__(self, job: StepJob) -> None:
        super().__init__(job)
        device = frozenset(i for i, home in enumerate(self.plan.homes) if home == "device")
        self.pinned = job.settings.placement == "static"
        length = len(self.plan.levels)
        self.starts: list[list[Use]] = [[] for _ in range(length)]
        self.ends: list[list[Use]] = [[] for _ in range(length)]
        for use in self.plan.uses:
            self.starts[use.first].append(use)
            self.ends[use.last].append(use)
        for ending in self.ends:
            ending.sort(key=lambda use: -use.item)  # what is gathered goes before its slices
        record = self.plan.record
        self.seconds = [self.rates.compute(moment) for moment in record.moments]
        self.arriving: dict[int, list[int]] = {}
        for arrival in record.arrivals:
            self.arriving.setdefault(arrival.moment, []).append(arrival.parameter)
        self.finishing: dict[int, list[int]] = {}
        """By moment, the chunks whose last gradient arrives."""
        for chunk, place in self._last_arrivals().items():
            self.finishing.setdefault(place, []).append(chunk)
        self.direct_bytes = host_direct_bytes(self.shape, record, job.settings, device)
        """By chunk, bytes that are on the host when the last gradient has been taken."""
        self.updated = sorted(chunk for chunks in self.finishing.values() for chunk in chunks)
        self.barrier = -1
        """The end of backward."""
        self.returned: list[int] = []
        """What the next pass waits for."""
        self.trips = self._trips()
        """Empty where none leave."""
        self.gone: dict[int, int] = {}
        """By number, activations that have left: the task that ends it."""
        self.back: dict[int, int] = {}
        """By number, those that have come back."""
        self.reduced: list[int] = []
        """The reductions of this iteration."""
        self.written: dict[int, list[int]] = {}
        """By chunk, the tasks that wrote the pieces of its state back to the SSD."""
        self.staged: list[int] = []
        self.peak, self.peak_tags = 0, dict[str, int]()

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
        return Walked(self.tasks, last, first, self.peak_tags)

    # -- moments --------------------------------------------------------------------------------------

    def _trigger(self, place: int) -> None:
        for trigger in self.plan.triggers[place]:
            if not trigger.fetch:
                self.evict(trigger.item, place)
            elif trigger.item not in self.held or self.held[trigger.item].stale:
                self.drop(trigger.item)
                self.fetch(trigger.item, place)

    def _moment(self, place: int, once: int) -> None:
        if self.trips:
            self._activations_gone(once)
        self._trigger(place)
        waits = self._bring(place)
        room = self.room_for(0, place)
        waits += room
        if self.trips:
            waits += self._activations_back(place, once, room)
        exchanged = self.job.exchanges.get(once, 0)
        if exchanged:
            seconds = self.rates.exchange(exchanged, self.rates.ranks)
            waits.append(self.task(WIRE, seconds, [self.compute], place, exchanged))
        if place == 0:
            waits += self.returned
            self.returned = []
        self.compute = self.task(COMPUTE, self.seconds[once], [*waits, self.main], place)
        if self.trips:
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
                self.drop(use.item)
                held = None
            if held is None and use.creates:
                waits += self.room_for(self.sizes[use.item], place)
                self.take(use.item, self.compute, dirty=True)
            elif held is None:
                self.fetch(use.item, place)
            now = self.held[use.item]
            now.dirty = now.dirty or use.writes
            now.stale = False
            waits.append(now.task)
        return waits

    def _trips(self) -> dict[str, dict[int, list[Trip]]]:
        """Activations that leave, by the moment of a pass: forward saves them, the level counts them no more, it counts
        them again, backward wants them."""
        away, saved = self.plan.away, self.plan.record.saved
        if away is None or not away.trips:
            return {}
        found: dict[str, dict[int, list[Trip]]] = {"saved": {}, "gone": {}, "come": {}, "wanted": {}}
        for trip in away.trips.values():
            facts = saved[trip.number]
            when = {"saved": facts.first, "gone": trip.gone, "come": trip.come, "wanted": facts.back}
            for what, moment in when.items():
                found[what].setdefault(moment, []).append(trip)
        return found

    def _activations_gone(self, once: int) -> None:
        for trip in self.trips["gone"].get(once, ()):
            self.leaving.append((self.gone[trip.number], trip.bytes))
            self.leaving_bytes += trip.bytes

    def _activations_away(self, place: int, once: int) -> None:
        for trip in self.trips["saved"].get(once, ()):
            self.gone[trip.number] = self._carry(trip, [self.compute], place, (TO_HOST, WRITE))

    def _activations_back(self, place: int, once: int, room: list[int]) -> list[int]:
        """They start on their way when the level counts them again and has `room`; what wants them waits."""
        for trip in self.trips["come"].get(once, ()):
            since = [self.gone[trip.number], self.compute, *room]
            self.back[trip.number] = self._carry(trip, since, place, (READ, TO_DEVICE))
        return [self.back[trip.number] for trip in self.trips["wanted"].get(once, ())]

    def _carry(self, trip: Trip, after: list[int], place: int, lanes: tuple[str, str]) -> int:
        """To SSD they pass the host, where there is one."""
        last = -1
        for lane in lanes:
            if lane in (READ, WRITE):
                if trip.tier != SSD:
                    continue
                seconds = self.rates.disk(trip.bytes, lane == READ)
            elif self.beside:
                continue
            else:
                seconds = self.rates.move(trip.bytes)
            last = self.task(lane, seconds, after, place, trip.bytes, "activations")
            after = [last]
        return last

    def _capture(self, place: int, once: int) -> None:
        arrived = self.arriving.get(once)
        if not arrived or not self.job.captured:
            return
        count = sum(self.job.captured[parameter] for parameter in arrived)
        self.compute = self.task(COMPUTE, self.rates.capture(count), [], place)

    def _measure(self, place: int) -> None:
        total = self.occupied + self.plan.static_bytes + self.plan.levels[place]
        if total > self.peak:
            self.peak = total
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
        for use in self.ends[place]:
            held = self.held.get(use.item)
            kind, chunk = self.items[use.item]
            if held is None or use.after == KEEP:
                continue
            if kind in (WHOLE, WHOLE_GRAD) and self._holds_gradient(kind, chunk):
                count = self.sizes[use.item]
                seconds = self.rates.gather(count, self.rates.ranks, self.job.rounds)
                task = self.task(WIRE, seconds, [self.compute], place, count)
                self.down[chunk] = task
                self.reduced.append(task)
                self.give(use.item, task)
            elif kind == WHOLE or use.after == FREE:
                self.give(use.item, self.compute)
            elif use.after == SPILL:
                self.spill(use.item, chunk, place)
            elif use.after == STALE:
                held.stale = True
            if use.after == STALE and kind == WHOLE and chunk in self.held:
                self.held[chunk].stale = True
        for chunk in self.finishing.get(place, ()):
            self._complete(chunk, place)

    def _holds_gradient(self, kind: str, chunk: int) -> bool:
        return kind == WHOLE_GRAD or (self.plan.in_parameter_space and self.shape.gradient_bytes[chunk] > 0)

    # -- updates --------------------------------------------------------------------------------------

    def _complete(self, chunk: int, place: int) -> None:
        """A chunk's last gradient is there: it is summed over ranks where each has everything, and in backward the
        chunk is updated."""
        if self.job.all_reduce:
            count = 2 * self.shape.gradient_bytes[chunk]
            seconds = self.rates.gather(count, self.rates.ranks)
            self.down[chunk] = self.task(WIRE, seconds, [self.compute], place, count)
            self.reduced.append(self.down[chunk])
        if chunk in self.direct_bytes:
            self.down[chunk] = self.task(TO_HOST, 0.0, [self.compute], place, self.direct_bytes[chunk])
        if self.job.settings.in_backward:
            self._update(chunk, place)

    def _last_arrivals(self) -> dict[int, int]:
        base = len(self.plan.record.moments) * (self.plan.accumulate - 1)
        lasts = last_arrivals(self.plan.record, self.shape.parameter_chunk)
        return {chunk: base + moment for chunk, moment in lasts.items() if self.shape.state_bytes[chunk]}

    def _updates(self, base: int) -> None:
        if self.job.settings.in_backward:
            return
        if self.job.clip and self.reduced:
            self.barrier = self.main = self.task(HOST, 0.0, [self.barrier, *self.reduced], base, 0, "norm")
        self.reduced = []
        for chunk in self.updated:
            place = base + chunk
            self._trigger(place)
            if not self.job.lock_free or self.plan.homes[chunk] == "device":
                self._update(chunk, place)
            self._measure(place)
            for use in self.ends[place]:
                if use.after == FREE and use.item in self.held:
                    self.give(use.item, self.fresh.get(chunk, self.compute) if self.beside else self.compute)

    def _update(self, chunk: int, place: int) -> None:
        count = self.job.update_bytes[chunk]
        home = self.plan.homes[chunk]
        ready = [self.down.get(chunk, -1)]
        in_backward = self.job.settings.in_backward
        if home == "device":
            waits = [*self._bring(place), *ready] if not in_backward else ready
            self.compute = self.task(
                COMPUTE, self.rates.update_on_device(count), [*waits, self.main], place, 0, "device update"
            )
            self.fresh[chunk] = self.compute
            return
        if self.beside and not in_backward:
            ready += self._bring(place)
        ready += [self.main, self.compute if in_backward else self.barrier]
        task = self._stream(chunk, place, ready) if home == "ssd" else -1
        if home == "host":
            task = self.task(HOST, self.rates.update_on_host(count), ready, place, 0, "update")
        if chunk in self.plan.host.ssd_parameters:
            count = self.shape.parameter_bytes[chunk]
            self.settled[chunk] = self.task(WRITE, self.rates.disk(count, False), [task], place, count)
        if self.job.blocking:
            self.main = task
        self.fresh[chunk] = task
        if self.beside and chunk in self.held:
            self.held[chunk].task = task
        if self.pinned:
            self._bring_back(chunk, task, place)

    def _stream(self, chunk: int, place: int, ready: list[int]) -> int:
        """State on SSD is updated in pieces: each is read as soon as there is a buffer, and written when it is done. The
        first may stay in RAM."""
        state, streamed = self.shape.state_bytes[chunk], self.plan.host.streamed(self.shape, chunk)
        update = self.rates.update_on_host(self.job.update_bytes[chunk])
        pieces = -(-state // self.shape.piece) - self.plan.host.kept.get(chunk, 0)
        last = -1
        if streamed < state:
            last = self.task(HOST, update * (1 - streamed / state), ready, place, 0, "update")
        for number in range(pieces):
            each = streamed * (number + 1) // pieces - streamed * number // pieces
            after = [self.staged[-SLOTS] if len(self.staged) >= SLOTS else -1]
            if len(self.written.get(chunk, ())) > number:
                after.append(self.written[chunk][number])
            if not self.job.settings.prefetch:
                after += [*ready, *self.staged[-1:]]
            read = self.task(READ, self.rates.disk(each, True), after, place, each)
            seconds = update * streamed / state / pieces
            last = self.task(HOST, seconds, [*ready, read, last], place, 0, "update")
            write = self.task(WRITE, self.rates.disk(each, False), [last], place, each)
            self.written.setdefault(chunk, []).append(write)
            self.staged.append(write)
        self.written[chunk] = self.written[chunk][-pieces:]
        return last

    def _bring_back(self, chunk: int, task: int, place: int) -> None:
        """Parameters that stay on the device get their new values after the update on the host."""
        count = self.shape.parameter_bytes[chunk]
        came = self.task(TO_DEVICE, self.rates.move(count), [task], place, count)
        if chunk in self.shape.shared:
            whole = self.shape.whole_bytes[chunk]
            came = self.task(WIRE, self.rates.gather(whole, self.rates.ranks), [came], place, whole)
        self.returned.append(came)
