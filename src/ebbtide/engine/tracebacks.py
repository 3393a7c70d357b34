"""Where an error of ours is shown: at the user's own line.

What led through the engine to a refusal helps those who work on the engine. Whoever trains wants to see which of their
lines was refused. `EBBTIDE_TRACEBACK=full` in the environment shows all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ebbtide.errors import HERE, EbbtideError

_BETWEEN = (str(Path(torch.__file__).resolve().parent) + os.sep, contextlib.__file__)
"""Where the frames are from that lead from the user's lines to ours."""


def is_full() -> bool:
    return os.environ.get("EBBTIDE_TRACEBACK", "") == "full"


def trim(error: BaseException) -> BaseException:
    """The same error, without the frames of ours that it came through, and of those that led to them."""
    if isinstance(error, EbbtideError) and not is_full():
        error.__traceback__ = _users(error.__traceback__)
    return error


def _users(trace: TracebackType | None) -> TracebackType | None:
    """None where there is no frame of the user's."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for one in reversed(frames):
        name = one.tb_frame.f_code.co_filename
        if name.startswith(HERE) or (name.startswith(_BETWEEN) and kept is None):
            continue
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def show_users_lines() -> None:
    """From here on an error of ours that ends the program is shown so, by whatever shows errors."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if isinstance(error, EbbtideError) and not is_full():
            shown = _users(trace)
            trace = trace if shown is None else shown
            error.__traceback__ = trace
        return before(kind, error, trace)

    sys.excepthook = show
