"""What a benchmark says while it runs: how far it is, and how long the rest takes if it goes on so."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY = 10.0
"""Seconds between lines about steps that are alike."""

Report = Callable[[str], None]


def silent(text: str) -> None:
    """For those who call a benchmark from Python."""


class BenchProgress:
    def __init__(self, total: int, report: Report) -> None:
        """`total`: pieces of work that take about as long as each other."""
        self._total, self._report = total, report
        self._done = 0
        self._begin = self._said = time.monotonic()

    def done(self, what: str = "", count: int = 1) -> None:
        """So many pieces more; `what` there is to say of them, at once."""
        self._done += count
        now = time.monotonic()
        if not what and now - self._said < EVERY and self._done < self._total:
            return
        self._said = now
        left = (now - self._begin) / self._done * max(0, self._total - self._done)
        self._report(f"{what or 'done'}: {self._done} of {self._total}, {round(left)} s left")
