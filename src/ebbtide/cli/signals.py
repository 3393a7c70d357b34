"""Ctrl-C and SIGTERM in a step: they wait for its end.

What a signal's handler raises in the middle of a step may be lost where Python cleans up, and the run goes on; or leave
something taken that closing waits for. Asked for a second time, it is raised at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def waiting() -> Iterator[None]:
    """What arrives within is handled afterwards, by whoever handled it before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: found for number in ENDING if callable(found := signal.getsignal(number))}
    told: list[int] = []
    handled = 0

    def handle(frame: FrameType | None) -> None:
        """Each once, in the order in which they came: for some handlers only a second one is for now."""
        nonlocal handled
        while handled < len(told):
            number = told[handled]
            handled += 1
            handlers[signal.Signals(number)](number, frame)

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if len(told) > 1:
            handle(frame)
        elif number == signal.SIGINT:
            os.write(2, b"\nebbtide: ends after this step; once more: at once\n")

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    handle(None)
