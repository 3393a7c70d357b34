"""The CPU as a device: a RAM budget that chunks are really copied into and out of.

Note [one pool of slabs]: device and host tier are both RAM here, so what one tier frees serves the other. An evicted
chunk's memory is what the next chunk lands in, and RSS stays at what is reserved.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ebbtide.devices import heap
from ebbtide.devices.device import Event
from ebbtide.devices.job_memory import job_memory
from ebbtide.devices.pool import Slabs, in_pool, trim, users
from ebbtide.kernels import cpu_kernels

_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}

_X86_BF16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def multiplies(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype on the processor as fast as it should. Where it does not, the
    gradient of a linear layer's input takes up to a hundred times as long as in fp32. A torch that cannot say so is
    trusted."""
    name = _ASKED.get(dtype)
    if name is None or not torch.backends.mkldnn.is_available():
        return True
    asked = getattr(torch.ops.mkldnn, name, None)
    return asked is None or bool(asked())


def fast_dtype() -> torch.dtype:
    """What the processor should compute in: bf16 where it has instructions for it. Without them a step takes three times
    as long as in fp32 where there is AVX-512, and longer yet where there is not."""
    return torch.bfloat16 if multiplies(torch.bfloat16) and _has_bf16() else torch.float32


def _has_bf16() -> bool:
    """Other processors than x86, and a torch that cannot say so, are trusted."""
    asked = [getattr(torch.cpu, name, None) for name in _X86_BF16]
    known = [one() for one in asked if one is not None]
    return platform.machine() not in ("x86_64", "AMD64") or not known or any(known)


class CopyEvent:
    """The end of a copy on a background thread."""

    __slots__ = ("_begun", "_ended", "_error", "_flag", "_job")

    def __init__(self, job: Callable[[], None] | None = None) -> None:
        self._flag = threading.Event()
        self._begun = self._ended = time.perf_counter()
        self._error: BaseException | None = None
        # Taken out of a list at once, without a lock: the collector may cancel on any thread, in any line.
        self._job = [] if job is None else [job]

    def take(self) -> Callable[[], None] | None:
        """The job, for whoever comes first."""
        try:
            return self._job.pop()
        except IndexError:
            return None

    def cancel(self) -> None:
        """Nobody wants it any more: where it has not begun it never will, and keeps no memory."""
        if self.take() is not None:
            self._flag.set()

    def wait(self) -> None:
        self._flag.wait()
        if self._error is not None:
            raise self._error

    synchronize = wait

    def outlast(self) -> BaseException | None:
        """Waits until it is over, and raises nothing: memory that it uses must not change hands before. An interrupt
        (Ctrl-C) is what is returned."""
        interrupt: BaseException | None = None
        while not self._flag.is_set():
            try:
                self._flag.wait()
            except BaseException as caught:
                interrupt = caught
        return interrupt

    @property
    def error(self) -> BaseException | None:
        """Of what is over."""
        return self._error

    def done(self) -> bool:
        return self._flag.is_set()

    @property
    def timing(self) -> CopyEvent:
        return self

    def span(self) -> tuple[float, float] | None:
        return (self._begun, self._ended) if self._flag.is_set() else None

    def begin(self) -> None:
        """Its job does."""
        self._begun = time.perf_counter()

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._ended = time.perf_counter()
        self._flag.set()


OVER = CopyEvent()
"""What the CPU was given to compute is over when it returns."""
OVER.set(None)


class Stream:
    """A thread that does one job after the other.

    Unlike a thread pool it lets go of a job's tensors before it reports the end: their storages' use counts
    decide whether a chunk may be evicted.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[CopyEvent | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> CopyEvent:
        if self._closed:
            raise RuntimeError(
                f"{self._thread.name} was closed before this job; wait for events before close"
            )
        event = CopyEvent(job)
        self._jobs.put(event)
        return event

    def _run(self) -> None:
        while (event := self._jobs.get()) is not None:
            job = event.take()
            if job is not None:
                error: BaseException | None = None
                event.begin()
                try:
                    job()
                except BaseException as caught:
                    error = caught
                del job
                event.set(error)
            del event

    def close(self) -> None:
        """Ends the thread after the jobs that it has; it can be called again."""
        self._closed = True
        self._jobs.put(None)
        # The collector may run on the thread itself, with an engine that nobody holds.
        if threading.current_thread() is not self._thread:
            self._thread.join()


class CpuBackend:
    kind = "cpu"

    def __init__(self, poison: bool = False, rates: dict[str, float] | None = None) -> None:
        """`rates` (bytes a second by link) imitate a slow bus; `poison` fills freed memory with NaN."""
        self.device = torch.device("cpu")
        self._poison = poison
        self._rates = rates or {}
        self.one_memory = not self._rates
        self._kernels = cpu_kernels()
        self._slabs = Slabs()
        self._lock = threading.Lock()
        self._held: dict[str, int] = {"device": 0, "host": 0}
        self._freed: deque[tuple[str, int]] = deque()
        self._streams = {link: Stream(f"ebbtide-{link}") for link in ("host_to_device", "device_to_host")}

    def limit(self, count: int) -> None:
        """Nothing backs a budget here but the ledger."""

    def allocate(self, tier: str, count: int) -> torch.Tensor:
        slab = self._slabs.take(count)
        with self._lock:
            self._take_back()
            self._held[tier] += count
        return slab

    def free(self, tier: str, memory: torch.Tensor) -> None:
        if self._poison:
            # All bits set is a NaN in every floating dtype. No operator: a trace would take it for the model's.
            ctypes.memset(memory.data_ptr(), 0xFF, memory.numel())
        # Whoever allocates next counts it: the collector may free what an engine left, where a thread has the lock.
        self._freed.append((tier, memory.numel()))

    def _take_back(self) -> None:
        while self._freed:
            tier, count = self._freed.popleft()
            self._held[tier] -= count

    def trim(self, most: int) -> None:
        if not heap.keeps_freed_memory:
            trim(most)

    def mark(self) -> CopyEvent:
        return OVER

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, link: str, after: Event | None = None
    ) -> CopyEvent:
        return self._streams[link].submit(partial(self._copy, destination, source, link))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, link: str) -> None:
        start = time.perf_counter()
        self._kernels.copy(destination, source)
        rate = self._rates.get(link)
        if rate:
            time.sleep(max(0.0, source.numel() / rate - (time.perf_counter() - start)))

    def time_copies(self, wanted: bool) -> None:
        """The threads that copy look at the clock all the time."""

    def apart(self, after: Event) -> AbstractContextManager[None]:
        return nullcontext()

    aliases = staticmethod(users)

    def owns(self, storage: int) -> bool:
        return self._slabs.owns(storage)

    def watch(self, meter: Any) -> None:
        """A storage meter tells chunks from other storages by itself."""

    def available(self) -> dict[str, int]:
        free = job_memory().available + in_pool().kept
        return {"device": free, "host": free}

    def capacity(self) -> dict[str, int]:
        total = job_memory().total
        return {"device": total, "host": total}

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.submit(lambda: None).wait()

    def held(self) -> dict[str, int]:
        with self._lock:
            self._take_back()
            return dict(self._held)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        trim(0)
