"""Discrete events over physical resources: tasks wait for their lane and for each other, and share what they share.

A lane is a stream: its tasks run one after the other, in the order of the list. A task that has started takes its
seconds, and longer where the tasks that run beside it ask for more of a resource than there is: then all of them go
slower alike. Nothing is random, so the same tasks always give the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.05
"""Share of a resource that is always left to tasks that are not first."""


@dataclass(frozen=True, slots=True)
class Task:
    lane: str
    seconds: float
    """What it takes by itself."""
    after: tuple[int, ...] = ()
    """Earlier tasks that must have ended, by their place in the list."""
    shares: tuple[tuple[str, float], ...] = ()
    """How much of a resource it takes while it runs by itself, as a share of all of it."""
    cause: str = ""
    moment: int = -1
    nbytes: int = 0
    first: bool = False
    """It takes of what is shared what it asks for, and others what it leaves (but for a little)."""


@dataclass(frozen=True)
class Run:
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


def simulate(tasks: Sequence[Task]) -> Run:
    return _Simulation(tasks).run()


class _Simulation:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        count = len(tasks)
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.waited = [-1] * count
        self.missing = [0] * count
        self.dependents: list[list[int]] = [[] for _ in tasks]
        self.queues: dict[str, deque[int]] = {}
        for place, task in enumerate(tasks):
            self.queues.setdefault(task.lane, deque()).append(place)
            for other in set(task.after):
                if not 0 <= other < place:
                    raise ValueError(
                        f"task {place} ({task.cause}) waits for task {other}, which is not before it"
                    )
                self.missing[place] += 1
                self.dependents[other].append(place)
        self.busy: dict[str, int] = {}
        self.left: dict[int, float] = {}
        self.now = 0.0

    def run(self) -> Run:
        fresh = list(self.queues)
        while True:
            while fresh:
                fresh = self._start(fresh)
            if not self.left:
                break
            fresh = self._advance()
        starts, ends, waited = tuple(self.starts), tuple(self.ends), tuple(self.waited)
        return Run(tuple(self.tasks), starts, ends, waited)

    def _start(self, lanes: list[str]) -> list[str]:
        """Starts what can start on these lanes; gives the lanes on which more may be possible."""
        again: list[str] = []
        for lane in lanes:
            queue = self.queues[lane]
            if lane in self.busy or not queue or self.missing[queue[0]]:
                continue
            place = queue.popleft()
            self.starts[place] = self.now
            if self.tasks[place].seconds <= 0:
                again += self._end(place)
            else:
                self.busy[lane] = place
                self.left[place] = self.tasks[place].seconds
        return again

    def _advance(self) -> list[str]:
        """To the next end of a task."""
        rates = self._rates()
        step = min(self.left[place] / rate for place, rate in rates.items())
        self.now += step
        done = [p for p, rate in rates.items() if self.left[p] - step * rate <= 1e-12 * self.tasks[p].seconds]
        for place, rate in rates.items():
            self.left[place] -= step * rate
        lanes: list[str] = []
        for place in done:
            del self.left[place]
            del self.busy[self.tasks[place].lane]
            lanes += self._end(place)
        return lanes

    def _rates(self) -> dict[int, float]:
        asked: dict[str, float] = {}
        taken: dict[str, float] = {}
        for place in self.left:
            sums = taken if self.tasks[place].first else asked
            for resource, share in self.tasks[place].shares:
                sums[resource] = sums.get(resource, 0.0) + share
        slower = {name: max(1.0, total) for name, total in taken.items()}
        others = {
            name: max(1.0, total / max(1 - taken.get(name, 0.0), LEAST)) for name, total in asked.items()
        }
        return {
            place: 1.0
            / max(((slower if task.first else others)[name] for name, _ in task.shares), default=1.0)
            for place, task in ((place, self.tasks[place]) for place in self.left)
        }

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
