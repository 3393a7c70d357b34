"""What ended a process, from what it printed."""

from __future__ import annotations

import re

_ERROR = re.compile(r"(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception|Exit)\b.*)")
"""The line in which Python says what ended it; torch puts the rank before it."""
_LAUNCHER = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
"""torchrun's own, after those of its ranks."""


def error_in(stderr: str) -> str:
    said = [found[1] for line in stderr.splitlines() if (found := _ERROR.match(line))]
    own = [line for line in said if not line.startswith(_LAUNCHER)]
    return own[-1] if own else "it said nothing"
