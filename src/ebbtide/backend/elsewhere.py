"""Work that waits for threads of ours, on whatever thread it comes up."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

OURS = "ebbtide-"
"""What the names of our threads begin with."""


def when_gone(owner: object, work: Callable[[], None]) -> None:
    """Does the work when the owner is collected, or the process ends; not in a forked child, which has the memory, and
    none of the threads."""
    weakref.finalize(owner, _not_on_ours, os.getpid(), work)


def _not_on_ours(process: int, work: Callable[[], None]) -> None:
    """Does it here, or beside where this is a thread of ours: the collector may run a finalizer on any of them, and one
    that waits for what its own thread is to do would wait for ever."""
    if os.getpid() != process:
        return
    if threading.current_thread().name.startswith(OURS):
        threading.Thread(target=work, name="collecting for ebbtide", daemon=True).start()
    else:
        work()
