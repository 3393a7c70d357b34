"""Everything ebbtide raises on purpose. A message says what was expected, what was found and what to do."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__)) + os.sep
"""The folder of the project's own lines."""
_COMPILER = os.path.join("torch", "_dynamo", "")
_CALLS = os.path.join("torch", "nn", "modules", "module.py")


class EbbtideError(Exception):
    """Base of all errors below: the command turns them into one line and exit status 2."""


class EbbtideWarning(UserWarning):
    """What is as it was asked for, and most likely not as it was meant."""


class ConfigError(EbbtideError):
    """A setting that is unknown, of the wrong type, out of range, or at odds with another one."""


class BudgetError(EbbtideError, RuntimeError):
    """A tier is too small; says by how many bytes, and which settings would fit. Loops that look for a batch that fits
    know it by its kind and its words: a RuntimeError with " out of memory." in its one argument."""

    def __init__(self, message: str, *, tier: str, short: int, advice: str) -> None:
        super().__init__(f"The budget is out of memory. {message}; {advice}")
        self.message = message
        self.tier = tier
        self.short = short
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        """An exception of a worker process reaches its parent as it was."""
        return partial(BudgetError, tier=self.tier, short=self.short, advice=self.advice), (self.message,)


class LayoutError(EbbtideError):
    """A tensor that cannot be placed in chunks, or a cut that cannot be made."""


class StateError(EbbtideError):
    """An illegal transition; carries the object's history, because the mistake was made earlier."""

    def __init__(self, message: str, history: Sequence[str] = ()) -> None:
        lines = "".join(f"\n  {line}" for line in history)
        super().__init__(f"{message}; its history, oldest first:{lines}" if lines else message)
        self.history = tuple(history)


class IntegrityError(EbbtideError):
    """The books do not add up, or bytes came back other than they were written."""


class DiskError(EbbtideError):
    """A file of the SSD tier that could not be made, read or written; says which, where, and by how much."""

    def __init__(
        self, message: str, *, file: str = "", offset: int = 0, expected: int = 0, found: int = 0
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.expected = expected
        self.found = found


class RanksError(EbbtideError):
    """Another process of the run is gone, or does not answer."""


class NonFiniteError(EbbtideError):
    """A loss or a gradient that is not finite, where the config says to stop."""


class UnsupportedError(EbbtideError):
    """A feature that is refused by name, rather than computed wrongly."""


def warn_user(text: str) -> None:
    """A warning at the user's own line, however deep in the project it is found."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _leads_here(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, EbbtideWarning, stacklevel=level)


def _leads_here(file: str) -> bool:
    """Lines of ours, and those of Python's and torch's between the user's and ours."""
    return file.startswith((HERE, contextlib.__file__)) or _COMPILER in file or file.endswith(_CALLS)


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: "; did you mean 'x'?", or nothing."""
    known = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {known[close[0]]!r}?" if close else ""


def imagined_kept(what: str) -> StateError:
    return StateError(
        f"{what} hangs on a tensor of a pass that was only imagined: forward, or a hook, keeps what it computes where "
        "neither its module's attributes nor its own closure and globals lead. Keep it there"
    )


def second_gradient(name: str) -> UnsupportedError:
    """Where a chunk is updated as soon as its gradients are there."""
    return UnsupportedError(
        f"{name} received a second gradient in one backward pass (a weight shared by reentrant checkpoints?), which "
        'updates = "in-backward" cannot take back; use updates = "exact"'
    )
