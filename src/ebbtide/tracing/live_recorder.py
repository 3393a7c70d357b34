"""Writes a record from the events of an iteration, as they happen."""

from __future__ import annotations

import time
from dataclasses import replace

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
        self._moments.append(Moment(self._event, peak, seconds, work, self.alive()))
        self._event = -1

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

    def finish(self) -> Record:
        self._close()
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
