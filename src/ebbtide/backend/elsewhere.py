"""Work that waits for threads of ours, on whatever thread it comes up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

OURS = "ebbtide-"
"""What the names of our threads begin with."""


def not_on_ours(work: Callable[[], None]) -> None:
    """Does it here, or beside where this is a thread of ours: the collector may run a finalizer on any of them, and one
    that waits for what its own thread is to do would wait for ever."""
    if threading.current_thread().name.startswith(OURS):
        threading.Thread(target=work, name="collecting for ebbtide", daemon=True).start()
    else:
        work()


def in_process(process: int, work: Callable[[], None]) -> None:
    """The same, unless this is a forked child of the process that the work belongs to: it has the memory, and none of
    the threads."""
    if os.getpid() == process:
        not_on_ours(work)
