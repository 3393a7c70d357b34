"""Discrete events over physical resources: tasks wait for their lane and for each other, and share what they share.

A lane is a stream: its tasks run one after the other, in the order of the list. A task that has started takes its
seconds, and longer where the tasks that run beside it ask for more of a resource than there is: then all of them go
slower alike. Nothing is random, so the same tasks always give the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv
from typing import NamedTuple

LEAST = 0.05
"""Share of a resource that is always left to tasks that are not first."""


Shares = tuple[tuple[str, float], ...]
"""How much of a resource something takes while it runs by itself, as a share of all of it."""


class Task(NamedTuple):
    lane: str
    seconds: float
    """What it takes by itself."""
    after: tuple[int, ...] = ()
    """Earlier tasks that must have ended, by their place in the list."""
    shares: Shares = ()
    cause: str = ""
    moment: int = -1
    nbytes: int = 0
    first: bool = False
    """It takes of what is shared what it asks for, and others what it leaves (but for a little)."""


@dataclass(frozen=True)
class SimulatedRun:
    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    waited_for: tuple[int, ...]
    """The task whose end let a task start, or -1."""

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)

    def path(self, last: int) -> list[int]:
        """The chain of tasks that decided when task `last` ended, first to last: the critical path."""
        chain = []
        place = last
        while place >= 0:
            chain.append(place)
            place = self.waited_for[place]
        return chain[::-1]


def simulate(tasks: Sequence[Task]) -> SimulatedRun:
    return _Simulation(tasks).run()


class _Simulation:
    """Thousands of these are run in the search for one plan."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        count = len(tasks)
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.waited = [-1] * count
        self.missing = [0] * count
        self.dependents: list[list[int]] = [[] for _ in tasks]
        self.queues: dict[str, deque[int]] = {}
        self.kinds: list[int] = []
        """By task, a number for what it asks for: tasks that ask for the same have the same."""
        numbers: dict[tuple[Shares, bool], int] = {}
        for place, task in enumerate(tasks):
            lane, after = task.lane, task.after
            if lane not in self.queues:
                self.queues[lane] = deque()
            self.queues[lane].append(place)
            self.kinds.append(numbers.setdefault((task.shares, task.first), len(numbers)))
            for other in set(after) if len(after) > 1 else after:
                if not 0 <= other < place:
                    raise ValueError(
                        f"task {place} ({task.cause}) waits for task {other}, which is not before it"
                    )
                self.missing[place] += 1
                self.dependents[other].append(place)
        self.busy: set[str] = set()
        self.running: list[int] = []
        self.left: list[float] = []
        """By task that runs, what it still takes."""
        self.now = 0.0
        self.known: dict[tuple[int, ...], tuple[float, ...]] = {}
        """How fast tasks of these kinds are beside each other."""

    def run(self) -> SimulatedRun:
        fresh = list(self.queues)
        while True:
            while fresh:
                fresh = self._start(fresh)
            if not self.running:
                break
            fresh = self._advance()
        starts, ends, waited = tuple(self.starts), tuple(self.ends), tuple(self.waited)
        return SimulatedRun(tuple(self.tasks), starts, ends, waited)

    def _start(self, lanes: list[str]) -> list[str]:
        """Starts what can start on these lanes; gives the lanes on which more may be possible."""
        again: list[str] = []
        for lane in lanes:
            if lane in self.busy:
                continue
            queue = self.queues[lane]
            if not queue or self.missing[queue[0]]:
                continue
            place = queue.popleft()
            self.starts[place] = self.now
            seconds = self.tasks[place].seconds
            if seconds <= 0:
                again += self._end(place)
            else:
                self.busy.add(lane)
                self.running.append(place)
                self.left.append(seconds)
        return again

    def _advance(self) -> list[str]:
        """To the next end of a task."""
        running, left, kind_of = self.running, self.left, self.kinds
        kinds = tuple([kind_of[place] for place in running])
        rates = self.known.get(kinds)
        if rates is None:
            rates = self.known[kinds] = self._rates()
        step = min(map(truediv, left, rates))
        self.now += step
        self.running, self.left = still, rests = [], []
        lanes: list[str] = []
        for place, before, rate in zip(running, left, rates, strict=True):
            rest = before - step * rate
            task = self.tasks[place]
            if rest <= 1e-12 * task.seconds:
                self.busy.remove(task.lane)
                lanes += self._end(place)
            else:
                still.append(place)
                rests.append(rest)
        return lanes

    def _rates(self) -> tuple[float, ...]:
        running = [self.tasks[place] for place in self.running]
        asked: dict[str, float] = {}
        taken: dict[str, float] = {}
        for task in running:
            sums = taken if task.first else asked
            for resource, share in task.shares:
                sums[resource] = sums.get(resource, 0.0) + share
        slower = {name: max(1.0, total) for name, total in taken.items()}
        others = {
            name: max(1.0, total / max(1 - taken.get(name, 0.0), LEAST)) for name, total in asked.items()
        }
        return tuple(
            1.0 / max(((slower if task.first else others)[name] for name, _ in task.shares), default=1.0)
            for task in running
        )

    def _end(self, place: int) -> list[str]:
        task = self.tasks[place]
        self.ends[place] = self.now
        lanes = [task.lane]
        queue = self.queues[task.lane]
        if queue:
            self.waited[queue[0]] = place
        for other in self.dependents[place]:
            self.missing[other] -= 1
            self.waited[other] = place
            lanes.append(self.tasks[other].lane)
        return lanes
