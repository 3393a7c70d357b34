"""Writes a record from the events of an iteration, as they happen.

Note [what compiled code takes]: on the CPU no operator of it is seen. What a block gives and saves is known when its
forward is over. While it runs, forward or backward, it is taken to need what it does as it is written; where no such
pass was imagined, as much again as it leaves. All gradients of a block are there at once, when its backward is over.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ebbtide.planner.record import Access, Arrival, Moment, Record, Saved
from ebbtide.tracing.meter import Meter


class Recorder:
    def __init__(
        self,
        signature: str,
        meter: Meter,
        fixed: int,
        inputs: int,
        source: str = "live",
    ) -> None:
        self._signature = signature
        self._meter = meter
        self._fixed = fixed
        self._inputs = inputs
        self._source = source
        self._moments: list[Moment] = []
        self._event = -1
        self._start = 0.0
        self._accesses: list[Access] = []
        self._arrivals: list[Arrival] = []
        self._open: dict[int, tuple[int, int]] = {}
        self._saved: list[Saved] = []
        self._away = 0
        self._seen = 0
        self._turns: list[int] = []
        self._forward = self._at_backward = -1
        self._block: dict[int, int] = {}
        """By run of a compiled block: bytes that were there when it began, then those that it has left."""
        self._added = 0
        """Bytes that the moment that runs now is taken to need besides what is seen."""
        self._unseen: dict[int, int] = {}
        """By moment, those."""
        meter.take_peak()
        meter.take_work()

    @property
    def index(self) -> int:
        """The moment that runs now; -1 before the first."""
        return len(self._moments) - (self._event < 0)

    def moment(self, what: int) -> None:
        """A new moment starts."""
        self._close()
        self._event, self._start = what, time.perf_counter()

    def _close(self) -> None:
        """The moment that runs now is over. What is computed before the first one, from the input, is among its own."""
        if self._event < 0:
            return
        seconds = time.perf_counter() - self._start
        peak, work = self._take_peak() + self._fixed, self._meter.take_work()
        if self._added:
            self._unseen[len(self._moments)] = self._added
        self._moments.append(Moment(self._event, peak, seconds, work, self.alive()))
        self._event, self._added = -1, 0

    def alive(self) -> int:
        """Bytes of non-model data that are there now."""
        return self._meter.alive() + self._away + self._fixed

    def _take_peak(self) -> int:
        peak, self._seen = max(self._seen, self._meter.take_peak() + self._away), 0
        return peak

    def shift(self, count: int) -> None:
        """So many bytes of activations have just left the device, or (negative) are about to come back. The record
        says what there is without that, for a plan may choose otherwise."""
        self._seen = self._take_peak()
        self._away += count

    def note(self, tensor: torch.Tensor) -> None:
        """Autograd has saved it; compiled code may have made it."""
        self._meter.note(tensor)

    def block(self, run: int) -> None:
        """A compiled block begins (Note [what compiled code takes])."""
        self._block[run] = self._meter.alive()

    def block_over(self, run: int) -> None:
        """The block's forward is over."""
        self._block[run] = max(0, self._meter.alive() - self._block[run])
        self._add(self._block[run])

    def block_reversed(self, run: int, gradients: int) -> None:
        """Its backward begins, which gives so many bytes of gradients at once."""
        self._add(gradients + self._block.get(run, 0))

    def _add(self, count: int) -> None:
        if not self._meter.sees_blocks:
            self._added += count

    def save(self, count: int, checkpoint: bool) -> int:
        """A storage is saved for backward; its number."""
        self._saved.append(Saved(count, max(0, self.index), -1, -1, checkpoint))
        return len(self._saved) - 1

    def alone(self, number: int) -> None:
        """From the moment that begins now, nothing but backward wants a saved storage."""
        self._saved[number] = replace(self._saved[number], alone=max(0, self.index))

    def wanted(self, number: int) -> None:
        """Backward wants a saved storage."""
        if self._saved[number].back < 0:
            self._saved[number] = replace(self._saved[number], back=max(0, self.index))

    def begin(self, run: int, phase: int) -> None:
        self._open[run] = (self.index, phase)

    def end(self, run: int) -> None:
        """The run is no longer in use; the moment that runs now was the last."""
        opened = self._open.pop(run, None)
        if opened is not None:
            first, phase = opened
            self._accesses.append(Access(run, first, max(first, self.index), phase))

    def arrival(self, parameter: int) -> None:
        self._arrivals.append(Arrival(parameter, self.index))

    def reverse(self) -> None:
        """Backward starts, for the first time in the pass."""
        if self._forward < 0:
            self._forward = self.index
            self._at_backward = self.alive()

    def turn(self) -> None:
        """A backward is over, and the pass is not."""
        self._turns.append(self.index + 1)

    def _add_unseen(self, imagined: Record | None) -> None:
        events = [moment.event for moment in self._moments]
        foreseen = imagined.moments if imagined is not None else ()
        known = events == [moment.event for moment in foreseen]
        for j, added in self._unseen.items():
            moment = self._moments[j]
            peak = moment.peak + added
            if known and j:
                peak = self._moments[j - 1].alive + foreseen[j].peak - foreseen[j - 1].alive
            self._moments[j] = replace(moment, peak=max(moment.peak, peak))

    def finish(self, imagined: Record | None = None) -> Record:
        """`imagined`: the same pass, as it was foreseen."""
        self._close()
        self._add_unseen(imagined)
        for run in list(self._open):
            self.end(run)
        accesses = tuple(sorted(self._accesses, key=lambda a: (a.first, a.run)))
        between = self.alive() + self._inputs
        return Record(
            self._signature,
            tuple(self._moments),
            accesses,
            tuple(self._arrivals),
            self._fixed,
            self._source,
            between,
            tuple(self._saved),
            tuple(self._turns),
            self._forward,
            self._at_backward,
        )
