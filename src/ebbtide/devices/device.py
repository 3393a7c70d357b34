"""What the runtime asks of a compute device.

Memory is handed out as flat uint8 tensors. A copy starts at once and runs beside the computation, after everything that
the compute stream was given before it. `Event.wait` orders the computation after the copy (on a GPU the host goes on at
once); `Event.synchronize` blocks the host, for the host's own reads and writes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def done(self) -> bool: ...

    @property
    def timing(self) -> Any:
        """What knows when it began and ended (`span`, in `time.perf_counter`'s seconds; None where it is not over, or
        nothing was timed), and keeps nothing else alive."""


def wait_for_all(events: Iterable[Event], host: bool = False) -> BaseException | None:
    """Waits until every event is over, and returns the first error. Memory and extents that a copy still uses must not
    change hands, so an interrupt (Ctrl-C) has to wait, too: it is what is returned then. `host`: it is the host that
    waits, for memory which it reads, writes or hands on itself."""
    failed: BaseException | None = None
    for event in events:
        over = False
        while not over:
            try:
                event.synchronize() if host else event.wait()
                over = True
            except Exception as error:
                failed = failed or error
                over = True
            except BaseException as interrupt:
                failed = interrupt
    return failed


class Backend(Protocol):
    kind: str
    device: torch.device
    one_memory: bool
    """Whether device and host are the same memory, with no link between them: a copy is the processor's."""

    def limit(self, count: int) -> None:
        """Has the device's own allocator refuse more than `count` bytes, where it can."""

    def allocate(self, tier: str, count: int) -> torch.Tensor:
        """`count` bytes on `tier`, contents undefined."""

    def free(self, tier: str, memory: torch.Tensor) -> None:
        """Takes memory back; work that the compute stream has been given may still use it."""

    def trim(self, most: int) -> None:
        """Other memory is about to be taken: keeps at most `most` free bytes for reuse, where that takes RAM."""

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, link: str, after: Event | None = None
    ) -> Event:
        """Starts a copy over `link` (host_to_device or device_to_host). With `after` (a mark) it waits for what came
        before that, and not for what the compute stream was given since: some start late, on other threads."""

    def time_copies(self, wanted: bool) -> None:
        """Whether the events of copies are to know when these began and ended."""

    def mark(self) -> Event:
        """The end of everything that the compute stream was given so far."""

    def apart(self, after: Event) -> AbstractContextManager[None]:
        """What another thread starts within comes after a mark, and not after what the compute stream has since."""

    def aliases(self, memory: torch.Tensor) -> int:
        """How many tensors share the memory's storage: more than we made means that somebody still uses it."""

    def available(self) -> dict[str, int]:
        """Bytes that can be used on `device` and `host`, as found now."""

    def capacity(self) -> dict[str, int]:
        """Bytes that the machine has for `device` and `host`, used or not."""

    def owns(self, storage: int) -> bool:
        """Whether a storage (by the address of its object) is memory that was handed out here."""

    def watch(self, meter: Any) -> None:
        """Tells `meter` before and after device memory for chunks changes hands; None ends it."""

    def synchronize(self) -> None:
        """Waits for everything that was started."""

    def held(self) -> dict[str, int]:
        """Bytes of memory handed out per tier, counted here and not by the ledger."""

    def close(self) -> None: ...


OURS = "ebbtide-"
"""What the names of our threads begin with."""


def when_gone(owner: object, work: Callable[[], None]) -> Callable[[], object]:
    """Does the work when the owner is collected, or the process ends; not in a forked child, which has the memory, and
    none of the threads. What it gives does it at once, and then no more."""
    return weakref.finalize(owner, _not_on_ours, os.getpid(), work)


def _not_on_ours(process: int, work: Callable[[], None]) -> None:
    """Does it here, or beside where this is a thread of ours: the collector may run a finalizer on any of them, and one
    that waits for what its own thread is to do would wait for ever."""
    if os.getpid() != process:
        return
    if threading.current_thread().name.startswith(OURS):
        threading.Thread(target=work, name="collecting for ebbtide", daemon=True).start()
    else:
        work()
