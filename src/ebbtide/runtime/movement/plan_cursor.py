"""Where a pass is in its plan, and what the plan says of chunks from there."""

from __future__ import annotations

from collections import Counter

from ebbtide.memory.chunk import Chunk
from ebbtide.planner.eviction_choice import NEVER
from ebbtide.planner.plans import Plan
from ebbtide.planner.retention import next_use
from ebbtide.planner.shape import PARAM, WHOLE

IDLE, RUNNING, REVERSING, UPDATING = "idle", "forward", "backward", "update"


class PlanCursor:
    def __init__(self, chunks: int) -> None:
        self.plan: Plan | None = None
        self.phase = IDLE
        self.position = -1
        """The moment, in the plan's iteration."""
        self.on_track = False
        """Whether execution is what the plan was made for, so far."""
        self.diverged = ""
        """Why it is not."""
        self.uses: Counter[int] = Counter()
        """By run: how often forward has asked for it."""
        self._clock = 0
        self._last = [-1] * chunks
        """By chunk: when its parameters were last wanted."""

    def begin(self, plan: Plan | None, offset: int) -> None:
        """A training pass starts, at `offset` moments into the plan's iteration."""
        self.plan = plan
        self.phase = RUNNING
        self.position = offset - 1
        self.on_track = plan is not None
        self.diverged = ""
        self.uses.clear()

    def advance(self) -> None:
        self._clock += 1

    def touch(self, chunk: Chunk) -> None:
        self._last[chunk.index] = self._clock

    def last(self, chunk: Chunk) -> int:
        return self._last[chunk.index]

    def distance(self, chunk: Chunk) -> int:
        """Moments until the chunk's next use; without a plan, those since its last one."""
        if self.plan is None:
            return self._clock - self._last[chunk.index] if chunk.kind in (PARAM, WHOLE) else NEVER
        firsts = self.plan.firsts[chunk.kind, chunk.index]
        return next_use(firsts, max(self.position, 0), len(self.plan.levels))

    def used_now(self, chunk: Chunk) -> bool:
        """Whether the moment is planned to use a chunk: where it is only entered, that is still to come."""
        return (
            self.on_track
            and self.plan is not None
            and self.position in self.plan.firsts[chunk.kind, chunk.index]
        )

    def stays(self, kind: str, index: int) -> bool:
        """Whether the plan that is followed never evicts a chunk."""
        return self.on_track and self.plan is not None and (kind, index) not in self.plan.evicted

    def done_with(self, chunk: Chunk) -> bool:
        """Whether, as far as is planned, this pass has no more use for a chunk that is not in use now."""
        if self.plan is None or not self.on_track:
            return False
        length = self._length
        end = (max(self.position, 0) // length + 1) * length
        firsts = self.plan.firsts[chunk.kind, chunk.index]
        return next_use(firsts, self.position, NEVER) + self.position >= end

    def off_track(self) -> bool:
        """At the end of a pass: whether it was another than planned."""
        return not self.on_track or (self.position + 1) % self._length != 0

    @property
    def _length(self) -> int:
        """Moments of a pass; of one in which nothing of the model runs there are none."""
        assert self.plan is not None
        return max(1, len(self.plan.record.moments))

    def __str__(self) -> str:
        return f" at moment {self.position} of the {self.phase} pass" if self.phase != IDLE else ""
