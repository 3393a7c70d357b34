"""What takes longer than two seconds says what it is: a spinner where a person is looking, else a line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.cli.output import console, is_watched, say

LONG = 2.0
"""Seconds after which something says what it does."""


@contextmanager
def doing(what: str, silent: bool = False) -> Iterator[None]:
    """Around something that may take long. `silent`: where another rank speaks, or nobody is to be told."""
    if silent:
        yield
    elif is_watched():
        with console().status(f"ebbtide: {what}"):
            yield
    else:
        clock = threading.Timer(LONG, say, [f"{what} ..."])
        clock.daemon = True
        clock.start()
        try:
            yield
        finally:
            clock.cancel()
