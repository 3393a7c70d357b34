"""Ctrl-C at a chosen point, for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """At the nth point where Python looks for one, in files of ours: where a call begins, or one of C ends."""

    def __init__(self, at: int, within: Callable[[str], bool]) -> None:
        """`within`: whether a file, by its path, counts. Below one it never comes, and points are counted."""
        self.at, self.seen, self.place = at, 0, ""
        self._within = within

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, what: str, _: Any) -> None:
        code = frame.f_code
        if (
            what in ("call", "c_return")
            and "/ebbtide/" in code.co_filename
            and self._within(code.co_filename)
        ):
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                self.place = f"{what} in {code.co_qualname}, {code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
