"""Passes of which nobody need be told, for nothing moves.

Where the device is as large as the machine's memory allows, and either the only tier or has room for all, a pass that
went as planned before is let alone: hooks return at once, and gradients are taken in when backward is over. What the
tier held meanwhile is what the plan says. Whether the pass was the planned one, its gradients tell, and how many modules
ran; if not, the next is followed, and traced again.

Note [graphs that rest]: what such a pass saves for backward is the weights themselves, not where they will be. So where
there is a tier to go to, they are held as long as a graph that was made so may be run backward: what leads to a
parameter's gradient is there just as long as some graph leads there, and carries a mark. When parameters leave after
all, nothing rests any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ebbtide.planner.plans import Plan
from ebbtide.planner.record import FORWARD
from ebbtide.runtime.gradients.autograd_sums import AutogradSums
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.parameters.parameter_classes import plainly
from ebbtide.runtime.planning.plan_cache import KnownInput
from ebbtide.runtime.updates.updates import Updates
from ebbtide.tracing.hooks import Interceptor

_KEY = "ebbtide: weights saved as they are"


class _GraphMark:
    """Of graphs that have saved weights as they are: it is there as long as one of them is."""

    __slots__ = ("__weakref__",)


class FastPath:
    def __init__(self, interceptor: Interceptor, updates: Updates, room: Room, possible: bool) -> None:
        self._interceptor, self._updates = interceptor, updates
        self._room, self._ledger = room, room.ledger
        self._untold = AutogradSums(updates.sink, updates.capture)
        self._possible = possible
        self._known: KnownInput | None = None
        self._plan: Plan | None = None
        """That of the pass, where it rests."""
        self._offset = 0
        self._before: int | None = None
        """Bytes that were reserved when the pass's first backward began."""
        self._had_none: set[int] = set()
        self._arrived: set[int] = set()
        self._captured = 0
        self._graphs = updates.data.store.graphs
        self._making: _GraphMark | None = None
        """Of a graph that is being made."""
        self._leaves: list[torch.Tensor] = []
        """What it may lead to: parameters that required gradients when it began."""
        self._alone = False
        """Whether there were no graphs when the pass began."""
        updates.data.unbinds_after(self)

    @property
    def now(self) -> bool:
        """Whether this pass does."""
        return self._plan is not None

    @property
    def run(self) -> int:
        """Moments of the plan's iteration by now, while forward runs in a pass that rests."""
        return self._offset + self._interceptor.unnoticed

    @property
    def _can_move(self) -> bool:
        """Whether there is a tier to go to, or gradients are copied into chunks all the same."""
        return not self._updates.sink.in_place.always

    def rule_out(self) -> None:
        """Not all gradients of a pass come in one backward, at its end: only who follows it knows what comes when."""
        self._possible = False

    def begin(self, known: KnownInput | None, plan: Plan | None, offset: int) -> None:
        """A pass begins, at `offset` moments into the plan's iteration."""
        with plainly():
            self._begin(known, plan, offset)

    def _begin(self, known: KnownInput | None, plan: Plan | None, offset: int) -> None:
        ready = known is not None and known.followed and not known.stale
        rests = self._possible and ready and plan is not None and not plan.in_parameter_space
        # Where nothing is trained the graph leads to nothing that could be marked.
        rests = rests and any(self._updates.data.trained)
        rests = rests and not self._updates.sink.sparse and not self._interceptor.others_listen
        rests = rests and (not self._can_move or self.has_room(plan))
        self._known, self._plan = (known, plan) if rests else (None, None)
        self._offset, self._before = offset, None
        self._captured = self._updates.sink.captured
        self._arrived.clear()
        self._interceptor.unnoticed, self._interceptor.deaf = 0, False
        self._interceptor.rest(rests)
        self._alone = not self._graphs
        self.forward()

    def has_room(self, plan: Plan | None) -> bool:
        """Whether all parameters are on the device and the plan has none leave. Gradients may lie beside those that are
        held already, and until they are taken in beside their chunks: that needs room for all, and for one chunk."""
        data, room = self._updates.data, self._room
        if plan is None or plan.traffic or len(room.peers) != 1 or not all(data.bound):
            return False
        chunks = [data.computed(index) for index in range(len(data.bound))]
        planned = set(plan.items)
        unused = sum(chunk.nbytes for chunk in chunks if (chunk.kind, chunk.index) not in planned)
        gradients = sum(
            self._updates.sink.gradient_bytes(m) for m, p in enumerate(data.parameters) if p.requires_grad
        )
        spare = room.budget("device") - room.claims.outputs - plan.highest - unused - gradients
        return not any(c.worked_on or c.move is not None or c.nbytes > spare for c in chunks)

    def forward(self) -> None:
        """A graph is about to be made, in a pass that may rest (Note [graphs that rest])."""
        if self._plan is None or not self._can_move:
            return
        self._making = _GraphMark()
        self._leaves = [p for p in self._updates.data.parameters if p.requires_grad]
        self._graphs.add(self._making)

    def built(self) -> None:
        """As much of it as will be has been made, and holds what it leads to. Not before: a GPU waits for the first
        operators, and is busy now."""
        if self._making is None:
            return
        for parameter in self._leaves:
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # what leads to it is there, but is not told otherwise
            node: Any = get_gradient_edge(parameter).node
            node.metadata[_KEY] = self._making
            if frozen:
                parameter.requires_grad_(False)
        self._making, self._leaves = None, []

    def stop(self) -> None:
        """Parameters leave: from now on whoever wants one has to say so."""
        if self._can_move:
            self._interceptor.rest(False)
            self._known = self._plan = None

    def end(self) -> None:
        """The pass is over, or given up."""
        self.built()
        if self._can_move:
            self._interceptor.rest(False)

    @contextmanager
    def reversing(self) -> Iterator[None]:
        """Around autograd's backward."""
        plan = self._plan
        if plan is None:
            yield
            return
        self._look_around()
        try:
            self._interceptor.deaf = True
            self._untold.hand_out()
            yield
        finally:
            self._interceptor.deaf = False
            self._take_in(plan)

    def _look_around(self) -> None:
        """What is there before backward."""
        if self._captured != self._updates.sink.captured:
            self.rule_out()  # another backward reaches these parameters within the pass
        if self._before is None:
            self._before = self._ledger.reserved["device"]
            self._had_none = {m for m, count in enumerate(self._updates.sink.arrived) if not count}

    def _take_in(self, plan: Plan) -> None:
        assert self._before is not None
        room = self._room
        room.claims.set_level(plan.levels[self._offset + len(plan.record.moments) - 1])
        self._arrived |= self._untold.take_in()
        self._captured = self._updates.sink.captured
        beside = self._arrived if self._can_move else self._arrived & self._had_none
        self._ledger.look_back("device", self._before + self._highest(plan, beside))

    def _highest(self, plan: Plan, new: set[int]) -> int:
        """Non-model data, and the gradients that were there by then. `new`: those not added to what there was."""
        coming = Counter[int]()
        for arrival in plan.record.arrivals:
            if arrival.parameter in new:
                coming[arrival.moment] += self._updates.sink.gradient_bytes(arrival.parameter)
        highest = gradients = 0
        for moment in range(len(plan.record.moments)):
            gradients += coming[moment]
            highest = max(highest, plan.levels[self._offset + moment] + gradients)
        return highest

    def finish(self, forwards: int) -> None:
        """The pass is over, and had so many forward passes."""
        self.end()
        if forwards == 1 and self._alone:
            self._graphs.clear()  # whoever holds the loss still holds the graph, but it has been run backward
        known = self._known
        assert known is not None
        units = sum(moment.phase == FORWARD for moment in known.record.moments)
        arriving = {arrival.parameter for arrival in known.record.arrivals}
        taken = {member for member in arriving if self._updates.param_groups.group_of[member] >= 0}
        if self._arrived != taken or self._interceptor.unnoticed != units or not self._possible:
            known.stale, known.followed = True, False
