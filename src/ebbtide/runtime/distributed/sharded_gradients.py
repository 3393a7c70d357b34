"""Gradients of chunks that ranks share: captured whole, reduced to slices, and summed up for the norm.

Experts' gradients are complete where they arrive, for their tokens came from all ranks. A rank whose experts got none
does not notice by itself that others have gradients; all say at the end of a pass which experts have.

The norm is that of the whole tensors: each rank takes the sums of its slices' blocks, all ranks get all of them, and
add up each tensor's in the one order that there is. So it does not depend on where slices are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ebbtide.errors import NonFiniteError, second_gradient
from ebbtide.kernels.base import BLOCK
from ebbtide.layout import Slicing
from ebbtide.memory.chunk import Chunk
from ebbtide.planner.eviction_choice import NEVER
from ebbtide.planner.shape import GRAD, WHOLE_GRAD
from ebbtide.runtime.distributed.gather import ChunkSharing
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.updates.updates import Updates


class ShardedGradients:
    def __init__(
        self, updates: Updates, places: FetchOnDemand, cursor: PlanCursor, sharing: ChunkSharing
    ) -> None:
        self._updates, self._data, self._store = updates, updates.data, updates.store
        self._room, self._cursor, self._sharing = places.room, cursor, sharing
        self._kernels = updates.kernels["device"]
        self._passed: dict[int, int] = {}
        """By parameter: gradients that came in this pass and were not reduced yet."""
        self._blocks: dict[int, torch.Tensor] = {}
        """By parameter: the sums of the blocks that this rank has of its gradient."""
        self._experts = [
            m for m, place in enumerate(self._data.places) if not self._data.gathered(place.chunk)
        ]
        self.everywhere: set[int] = set()
        """Of experts' parameters, those that have a gradient on some rank; of those that this rank has a part of, where
        nothing is reduced."""
        self._sums: dict[int, float] | None = None
        self._wanted: dict[int, int] = {}
        """By parameter: how often a gradient comes in a pass, where that is more than once."""
        self._plan: object = None
        self._backwards = 1
        sharing.reductions.reduce_for(self)
        self._given: set[int] = set()
        """Chunks whose gradients this rank has given to be reduced in this pass."""

    def capture(self, member: int, gradient: torch.Tensor) -> None:
        place = self._data.places[member]
        if not self._data.gathered(place.chunk):
            self._hold(member, gradient)
            return
        if place.chunk in self._given:
            self._one_more(member)
        chunk = self._store.get(WHOLE_GRAD, place.chunk)
        if chunk.free:
            self._room.make_for(chunk, "device")
            self._store.allocate(chunk, "device")
        seen = self._data.views[member]
        assert seen is not None
        view = chunk.view().as_strided(seen.shape, seen.stride, seen.offset)
        self._kernels.capture(view, gradient, member in self._passed)
        self._passed[member] = self._passed.get(member, 0) + 1
        if all(self._passed.get(m, 0) >= self._times(m) for m in self._updates.sink.expected(place.chunk)):
            self._given.add(place.chunk)
            self._sharing.complete(place.chunk)

    def here(self, index: int) -> list[bool]:
        """By member of a chunk, whether it has a gradient here in this pass."""
        return [member in self._passed for member in self._data.members[index]]

    def claimed(self, index: int) -> list[bool]:
        """Experts that other ranks have are as complete as this rank's: where one is not, its marks are others."""
        expected = self._updates.sink.expected_anywhere(index)
        views, members = self._data.views, self._data.members[index]
        return [m in self._passed if views[m] is not None else m in expected for m in members]

    def _one_more(self, member: int) -> None:
        """A gradient of a chunk that had all that were expected; decided by what all ranks know alike."""
        if self._updates.in_backward:
            raise second_gradient(self._data.names[member])
        if self._sharing.reductions.awaits(self._data.places[member].chunk):
            self._sharing.reductions.finish()

    def _times(self, member: int) -> int:
        """How often a gradient comes in a backward. Where nobody knows, a weight that forward used again may have one
        for each use (checkpointed regions): they are added up here first, wherever chunks are, so that the mean of
        their sum is what the ranks get, and not the sum of their means."""
        cursor = self._cursor
        plan = cursor.plan
        if plan is None and not self._updates.in_backward and cursor.uses[self._data.run_of[member]] > 1:
            return NEVER
        if plan is not self._plan:
            self._plan, self._wanted = plan, {}
            for arrival in plan.record.arrivals if plan is not None else ():
                self._wanted[arrival.parameter] = self._wanted.get(arrival.parameter, 0) + 1
            self._backwards = 1 if plan is None else 1 + len(plan.record.turns)
        return max(1, self._wanted.get(member, 1) // self._backwards)

    def _hold(self, member: int, gradient: torch.Tensor) -> None:
        """Of an expert that this rank has: nobody else has a part of it."""
        self._updates.sink.hold(member, gradient)
        self._measure(member, self._store.get(GRAD, self._data.places[member].chunk))
        self._sums = None

    def finish(self) -> None:
        """The pass is over."""
        self._sharing.end(lambda: {self._data.places[member].chunk for member in self._passed})
        self._given.clear()
        if self._experts:
            self._hear_of_experts()

    def _hear_of_experts(self) -> None:
        """A tensor that has several ranks' experts gets zeros where those of one had no tokens."""
        updates, data = self._updates, self._data
        rows = self._sharing.ranks.numbers([min(1, updates.sink.arrived[member]) for member in self._experts])
        self.everywhere.update(
            member
            for member, arrived in zip(self._experts, zip(*rows, strict=True), strict=True)
            if any(arrived)
        )
        for member in sorted(self.everywhere):
            view = data.views[member]
            if view is not None and not updates.sink.arrived[member]:
                like = data.parameters[member]
                zeros = torch.empty_strided(view.shape, view.stride, dtype=like.dtype, device=like.device)
                self._hold(member, zeros.zero_())

    def updated(self, index: int) -> bool:
        """Whether some rank updates experts of the chunk: all go through the same moments."""
        return any(member in self.everywhere for member in self._data.members[index])

    def count_others(self) -> None:
        """Updates of experts on other ranks count here, too: what is saved is the same on all of them."""
        for member in self.everywhere:
            if self._data.views[member] is None:
                self._updates.param_groups.counts[member] += 1

    def discard(self) -> None:
        reductions = self._sharing.reductions
        reductions.drop()
        for index in {self._data.places[member].chunk for member in self._passed}:
            if not reductions.awaits(index):
                self._store.free(self._store.get(WHOLE_GRAD, index))
        self._given.clear()
        self._passed.clear()
        self._blocks.clear()
        self.everywhere.clear()
        self._sums = None

    # -- reduced --------------------------------------------------------------------------------------

    def summed(self, index: int, arrived: Sequence[bool], grad: Chunk) -> None:
        """The slice has the mean over the ranks."""
        updates, members = self._updates, self._data.members[index]
        for member, has in zip(members, arrived, strict=True):
            self._passed.pop(member, None)
            if not has:
                continue
            if self._data.views[member] is None:
                self.everywhere.add(member)
                continue
            updates.sink.arrived[member] += 1
            self._measure(member, grad)
        self._sums = None
        if updates.in_backward:
            self._refuse_nonfinite(members)
            updates.apply_chunk(index)
            for member in members:
                self._blocks.pop(member, None)

    def _measure(self, member: int, grad: Chunk) -> None:
        """What this rank has of a gradient, which is on the device."""
        share = self._data.shares[member]
        part = grad.view()[share.offset : share.offset + share.numel]
        if self._updates.sink.norm_wanted:
            self._blocks[member] = self._kernels.block_sums(part).cpu()
        elif share.numel:
            value = float(self._kernels.look([part], norm=False)[0])
            self._blocks[member] = torch.full((1,), value, dtype=torch.float64, device="cpu")

    def _refuse_nonfinite(self, members: Sequence[int]) -> None:
        """On all ranks alike."""
        from ebbtide.runtime.updates.updates import refused

        if not self._updates.stop_nonfinite:
            return
        bad = [m for m in members if m in self._blocks and not bool(self._blocks[m].isfinite().all())]
        first = min(
            (min(row) for row in self._sharing.ranks.numbers([bad[0] if bad else -1]) if min(row) >= 0),
            default=-1,
        )
        if first >= 0:
            raise NonFiniteError(refused(self._data.names[first]))

    # -- the norm -------------------------------------------------------------------------------------

    def sums(self) -> dict[int, float]:
        """The sum of squares of each gradient that arrived, of the whole tensor; NaN where it is not finite."""
        if self._sums is None:
            here = (m for m, count in enumerate(self._updates.sink.arrived) if count)
            members = sorted({*here, *self.everywhere})
            self._sums = self._gathered(members) if self._updates.sink.norm_wanted else self._flagged(members)
        return self._sums

    def _gathered(self, members: Sequence[int]) -> dict[int, float]:
        counts = [self._blocks_of(rank) for rank in range(self._sharing.ranks.size)]
        most = max(sum(count(m) for m in members) for count in counts)
        mine = torch.zeros(most, dtype=torch.float64, device="cpu")
        at = 0
        for member in members:
            sums = self._blocks.get(member, mine[:0])
            mine[at : at + sums.numel()] = sums
            at += sums.numel()
        rows = self._sharing.ranks.sums(mine)
        starts = [0] * len(counts)
        found = {}
        for member in members:
            parts = []
            for rank, count in enumerate(counts):
                parts.append(rows[rank, starts[rank] : starts[rank] + count(member)])
                starts[rank] += count(member)
            found[member] = float(self._updates.kernels["host"].pairwise(torch.cat(parts)))
        return found

    def _blocks_of(self, rank: int) -> Callable[[int], int]:
        """How many blocks of a parameter a rank has."""
        slicing, places, chunks = (
            Slicing(self._sharing.ranks.size, rank),
            self._data.places,
            self._data.layout.chunks,
        )

        def count(member: int) -> int:
            place = places[member]
            return -(-slicing.share(place.offset, place.numel, chunks[place.chunk].size).numel // BLOCK)

        return count

    def _flagged(self, members: Sequence[int]) -> dict[int, float]:
        bad = [m for m in members if m in self._blocks and not bool(self._blocks[m].isfinite().all())]
        if not any(row[0] for row in self._sharing.ranks.numbers([len(bad)])):
            return dict.fromkeys(members, 0.0)
        everywhere = set().union(*self._sharing.ranks.objects(bad))
        return {member: math.nan if member in everywhere else 0.0 for member in members}
