"""What an iteration uses when: the record in terms of chunks, with gradients and updates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ebbtide.planner.record import Record
from ebbtide.planner.retention import FREE, KEEP, SPILL, STALE, Use
from ebbtide.planner.shape import ModelShape, Settings

SCALARS = 4096
"""Bytes that every moment is given for what loops keep from iteration to iteration: losses, norms."""

LEFT_FOR_FORWARD = 3
"""Of updates in backward, each so manieth: backward takes twice as long as forward."""


def levels_of(shape: ModelShape, record: Record, settings: Settings) -> tuple[int, ...]:
    """Non-model bytes by moment: the record's, once a micro-batch, then those of the updates."""
    once = [moment.peak for moment in record.moments]
    if once:
        once[-1] = max(once[-1], record.between)  # its level stays until the next pass begins
    updates = 1 if settings.in_backward else shape.chunks
    return tuple(level + SCALARS for level in (*once * settings.accumulate, *[record.between] * updates))


def last_arrivals(record: Record, parameter_chunk: Sequence[int]) -> dict[int, int]:
    """By chunk, the moment at which the last of its gradients arrives."""
    found: dict[int, int] = {}
    for arrival in record.arrivals:
        chunk = parameter_chunk[arrival.parameter]
        found[chunk] = max(found.get(chunk, 0), arrival.moment)
    return found


def gradients_waiting(
    shape: ModelShape, record: Record, settings: Settings, streaming: Set[int]
) -> list[int]:
    """By moment, bytes of gradients of earlier ones that wait for the disk, where updates are in backward and one that
    falls behind should find as much left to do as forward takes: else it rests there. `streaming`: the chunks whose
    state it has."""
    length = len(record.moments) * settings.accumulate + (1 if settings.in_backward else shape.chunks)
    arrived = [0] * length
    if settings.in_backward and settings.ssd_beside_device:
        last = last_arrivals(record, shape.parameter_chunk)
        for chunk in streaming & last.keys():
            arrived[last[chunk] + 1] += shape.gradient_bytes[chunk]
    return [count // LEFT_FOR_FORWARD for count in accumulate(arrived)]


def gradient_passes(record: Record, parameter_chunk: Sequence[int]) -> dict[int, list[list[int]]]:
    """By chunk, the moments at which its gradients arrive in a micro-batch, a list for each backward."""
    once: dict[int, list[int]] = {}
    for arrival in record.arrivals:
        once.setdefault(parameter_chunk[arrival.parameter], []).append(arrival.moment)
    return {chunk: _by_turn(record, moments) for chunk, moments in once.items()}


def _by_turn(record: Record, moments: list[int]) -> list[list[int]]:
    """In order, those of each backward that has some."""
    found: dict[int, list[int]] = {}
    for moment in sorted(moments):
        found.setdefault(bisect_right(record.turns, moment), []).append(moment)
    return list(found.values())


def _by_pass(backwards: list[list[int]], length: int) -> list[list[int]]:
    """Those of each pass together."""
    found: dict[int, list[int]] = {}
    for moments in backwards:
        found.setdefault(moments[0] // length, []).extend(moments)
    return list(found.values())


def host_direct_bytes(
    shape: ModelShape, record: Record, settings: Settings, device: Set[int]
) -> dict[int, int]:
    """By chunk that the host updates: bytes of gradients that go there as they arrive, in an iteration. Each backward
    adds its own to what is there."""
    found: dict[int, int] = {}
    for arrival in record.arrivals if settings.host_direct else ():
        chunk = shape.parameter_chunk[arrival.parameter]
        if chunk not in device and shape.gradient_bytes[chunk]:
            found[chunk] = found.get(chunk, 0) + settings.accumulate * shape.expected[arrival.parameter]
    return found


def unfinished(shape: ModelShape, record: Record) -> set[int]:
    """Chunks of which some gradient that is expected does not come: their update waits for the end of backward."""
    arrived = {arrival.parameter for arrival in record.arrivals}
    missing = (p for p, count in enumerate(shape.expected) if count and p not in arrived)
    return {shape.parameter_chunk[p] for p in missing}


def least_room(levels: Sequence[int], sizes: Sequence[int], uses: Sequence[Use]) -> int:
    """The smallest budget in which every moment has what it uses."""
    change = [0] * (len(levels) + 1)
    ends: dict[int, int] = {}
    for use in sorted(uses, key=lambda use: use.first):
        first = max(use.first, ends.get(use.item, -1) + 1)
        if first <= use.last:  # what overlapping uses of one item share counts once
            change[first] += sizes[use.item]
            change[use.last + 1] -= sizes[use.item]
            ends[use.item] = use.last
    held = list(accumulate(change[:-1]))
    return max((level + count for level, count in zip(levels, held, strict=True)), default=0)


def uses_of(shape: ModelShape, record: Record, settings: Settings, device: frozenset[int]) -> list[Use]:
    """`device`: the chunks whose optimizer state lives there."""
    updated = frozenset(range(shape.chunks)) if settings.ssd_beside_device else device
    return _Builder(shape, record, settings, device, updated).build()


@dataclass
class _Builder:
    """The uses of one iteration, in the order of moments."""

    shape: ModelShape
    record: Record
    settings: Settings
    device: frozenset[int]
    updated: frozenset[int]
    """Chunks that are updated on the device, wherever their state lives."""
    raw: list[Use] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    """By item."""

    def build(self) -> list[Use]:
        self.length = len(self.record.moments)
        self.total = self.length * self.settings.accumulate
        self.waiting = unfinished(self.shape, self.record)
        for micro in range(self.settings.accumulate):
            base = micro * self.length
            for access in self.record.accesses:
                for chunk in self.shape.run_chunks[access.run]:
                    self._use(Use(self.shape.used(chunk), base + access.first, base + access.last))
        arrivals = self._arrivals()
        for chunk, passes in arrivals.items():
            if self.shape.gradient_bytes[chunk]:
                self._gradient_uses(chunk, passes)
        self._mark_stale(arrivals)
        if not self.settings.in_backward:
            self._updates(arrivals)
        return self.raw

    def _use(self, use: Use) -> None:
        self.raw.append(use)
        self.last_use[use.item] = max(self.last_use.get(use.item, -1), use.last)

    def _arrivals(self) -> dict[int, list[list[int]]]:
        """By chunk, the moments at which gradients arrive, a list for each backward."""
        bases = [micro * self.length for micro in range(self.settings.accumulate)]
        once = gradient_passes(self.record, self.shape.parameter_chunk)
        return {
            chunk: [[base + moment for moment in moments] for base in bases for moments in found]
            for chunk, found in once.items()
        }

    def _gradient_uses(self, chunk: int, passes: list[list[int]]) -> None:
        """Gradients of a chunk that is shared arrive whole and are reduced to the rank's slice when the last has: at the
        end of a pass where one that is expected does not come."""
        if chunk not in self.shape.shared:
            self._slice_uses(chunk, [moment for moments in passes for moment in moments])
            return
        ends = [moments[-1] for moments in passes]
        if chunk in self.waiting:
            passes = _by_pass(passes, self.length)
            ends = [moments[-1] // self.length * self.length + self.length - 1 for moments in passes]
        whole = (2 if self.settings.in_parameter_space else 3) * self.shape.chunks + chunk
        for moments, end in zip(passes, ends, strict=True):
            for place, j in enumerate(moments):
                creates = not self.settings.in_parameter_space and place == 0
                last = j == moments[-1]
                after = FREE if not self.settings.in_parameter_space and last else KEEP
                self._use(Use(whole, j, end if last else j, creates=creates, writes=True, after=after))
        self._slice_uses(chunk, ends, created=True)

    def _slice_uses(self, chunk: int, moments: list[int], created: bool = False) -> None:
        at_home = chunk in self.updated
        own_space = not self.settings.in_parameter_space
        if self.settings.host_direct and not at_home:
            return
        if self.settings.in_backward and chunk in self.device:
            for j in moments:
                self._use(Use(chunk, j, j, writes=True))
            return
        if self.settings.in_backward and at_home:
            for place, j in enumerate(moments):
                end = FREE if place == len(moments) - 1 else KEEP
                target = chunk + self.shape.chunks
                self._use(Use(target, j, j, creates=place == 0, writes=True, after=end))
            self._use(Use(chunk, moments[-1], moments[-1], writes=True))
            return
        target = chunk + self.shape.chunks if own_space else chunk
        for place, j in enumerate(moments):
            last = place == len(moments) - 1
            after = SPILL if last and not at_home else KEEP
            fresh = self._fresh(chunk, j) if after == SPILL else 0
            creates = (own_space or created) and place == 0
            self._use(Use(target, j, j, creates=creates, writes=True, after=after, fresh=fresh))

    def _fresh(self, chunk: int, moment: int) -> int:
        """The moment from which an update's result can be used."""
        return moment + 1 if self.settings.in_backward else self.total + chunk + 1

    def _mark_stale(self, arrivals: dict[int, list[list[int]]]) -> None:
        """After its last use a copy of parameters that are updated elsewhere is worth nothing: on the device where
        the host updates, gathered where slices are updated."""
        for place, use in enumerate(self.raw):
            chunk = use.item % self.shape.chunks
            gathered = use.item >= 2 * self.shape.chunks
            if (
                use.item == self.shape.used(chunk)
                and chunk in arrivals
                and (gathered or chunk not in self.updated)
                and use.last == self.last_use[use.item]
                and use.after == KEEP
            ):
                fresh = self._fresh(chunk, max(use.last, arrivals[chunk][-1][-1]))
                after = FREE if chunk in self.updated else STALE
                self.raw[place] = replace(use, after=after, fresh=fresh)

    def _updates(self, arrivals: dict[int, list[list[int]]]) -> None:
        chunks = self.shape.chunks
        for chunk in sorted(arrivals):
            if chunk not in self.updated:
                continue
            j = self.total + chunk
            self.raw.append(Use(chunk, j, j, writes=True))
            if not self.settings.in_parameter_space:
                self.raw.append(Use(chunk + chunks, j, j, after=FREE))
