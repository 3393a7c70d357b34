"""What takes longer than two seconds says what it is: a spinner where a person is looking, else a line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ebbtide.cli.output import console, is_watched, panels, say

LONG = 2.0
"""Seconds after which something says what it does."""


@contextmanager
def doing(what: str, silent: bool = False) -> Iterator[None]:
    """Around something that may take long. `silent`: where another rank speaks, or nobody is to be told. Below a
    panel it says nothing: what was reached is in the panel, and what has been done is said at its end."""
    if silent or panels:
        yield
    elif is_watched():
        with console().status(f"ebbtide: {what}"):
            yield
    else:
        with one_after_another() as tell:
            tell(what)
            yield


@contextmanager
def one_after_another() -> Iterator[Callable[[str], None]]:
    """The same for several things in a row: what it gives is told of each as it begins."""
    if is_watched():
        with console().status("") as status:
            yield lambda what: status.update(f"ebbtide: {what}")
        return
    clocks: list[threading.Timer] = []

    def tell(what: str) -> None:
        for before in clocks:
            before.cancel()
        clocks[:] = [threading.Timer(LONG, say, [f"{what} ..."])]
        clocks[0].daemon = True
        clocks[0].start()

    try:
        yield tell
    finally:
        for last in clocks:
            last.cancel()
