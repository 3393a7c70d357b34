"""How fast steps follow each other where lock-free updates go on beside them.

The updating thread goes round and round, and a step waits for it only where it would fall too far behind. What it takes
of cores, memory and disk is not there for the step. On a CPU both want all cores, and each gets half of them while both
run; so a round takes twice what the updates take, or what the disk takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.forecasting.simulation.bound import updated
from ebbtide.forecasting.simulation.rates import READ, TO_DEVICE, TO_HOST, WRITE, StepJob
from ebbtide.planner.shape import PARAM


@dataclass(frozen=True)
class Pace:
    step: float
    rounds: float = 1.0
    """Over all chunks that are updated lock-free, in each step."""
    read: int = 0
    written: int = 0
    """Bytes on SSD in each step, for these rounds."""

    @property
    def staleness(self) -> int:
        return max(1, math.ceil(1 / self.rounds - 1e-9))


def pace(job: StepJob, step: float, moved: Mapping[str, int]) -> Pace:
    """`step` and `moved` (bytes by lane): without the updates."""
    if not job.lock_free:
        return Pace(step)
    facts = _Round(job, moved)
    seconds = facts.step(step)
    rounds = min(1.0, max(1 / job.max_staleness, seconds / facts.seconds)) if facts.seconds else 1.0
    read, written = facts.streamed * rounds, (facts.streamed + facts.away) * rounds
    return Pace(seconds, rounds, round(read), round(written))


class _Round:
    def __init__(self, job: StepJob, moved: Mapping[str, int]) -> None:
        plan, shape, rates = job.plan, job.shape, job.rates
        self.job, self.rates, self.moved = job, rates, moved
        chunks = [i for i in updated(shape, plan.record) if plan.homes[i] != "device"]
        self.bytes = sum(job.update_bytes[i] for i in chunks)
        self.update = rates.update_on_host(self.bytes)
        self.streamed = sum(plan.host.streamed(shape, i) for i in chunks if i in plan.host.ssd)
        """Optimizer state on SSD: read and written."""
        self.away = self._parameters_away(chunks)
        self.seconds = max(rates.disk_both(self.streamed), self.update * (2 if rates.on_cpu else 1))
        """That a round takes while steps go on."""

    def _parameters_away(self, chunks: list[int]) -> int:
        """Bytes of parameters that leave RAM in a step, and are written where an update has changed them."""
        plan, shape = self.job.plan, self.job.shape
        if not self.job.settings.ssd_beside_device:
            return 0
        leaving = {plan.items[item] for item in plan.residency.evicted}
        return sum(shape.parameter_bytes[i] for i in chunks if (PARAM, i) in leaving)

    def step(self, alone: float) -> float:
        """Seconds of a step that takes `alone` without updates."""
        rates, least = self.rates, 1 / self.job.max_staleness
        read = self.moved[READ] + self.streamed * least
        written = self.moved[WRITE] + (self.streamed + self.away) * least
        found = [alone, self.update * least, rates.disk_mixed(read, written)]
        if not rates.on_cpu:
            crossing = self.moved[TO_DEVICE] + self.moved[TO_HOST]
            found.append((crossing + (self.bytes + 2 * self.streamed) * least) / rates.dram)
        elif self.seconds:
            beside = alone / (1 - self.update / self.seconds)  # the thread is at it all the time
            found.append(alone + self.update * least)
            found.append(min(alone + self.update, beside))
        return max(found)
