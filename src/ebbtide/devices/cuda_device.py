"""A CUDA device: chunks from torch's caching allocator, copies on streams of their own, a registered host arena.

Note [stream order]: device memory is allocated and freed in the order of the compute stream, so it needs no
`record_stream`. A copy waits for everything the compute stream was given before it; the computation that
follows waits for the copy's event. A chunk that leaves is freed only after the compute stream has been told
to wait for the copy, so whoever gets the memory next comes after it. The host's memory is protected by
events that the host itself synchronises with before it reads, writes or reuses it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ebbtide.devices.arena import Arena
from ebbtide.devices.device import Event
from ebbtide.devices.job_memory import job_memory
from ebbtide.devices.pool import keep_from_children, map_memory, users
from ebbtide.errors import BudgetError
from ebbtide.units import format_size

PAGES_AT_LEAST = 256 << 20
"""Beside the budget the allocator may map this much, or a twentieth of the budget: pages that are used in part."""


class StreamEvent:
    __slots__ = ("_begun", "_clock", "_event")

    def __init__(
        self, event: torch.cuda.Event, begun: torch.cuda.Event | None = None, clock: Clock | None = None
    ) -> None:
        """`begun` and `clock`: where it is timed."""
        self._event, self._begun, self._clock = event, begun, clock

    def wait(self) -> None:
        torch.cuda.current_stream(self._event.device).wait_event(self._event)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What the stream is given from now on waits."""
        stream.wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.query()

    @property
    def timing(self) -> StreamEvent:
        return self

    def span(self) -> tuple[float, float] | None:
        if self._begun is None or self._clock is None or not self.done():
            return None
        return self._clock.at(self._begun), self._clock.at(self._event)


class Clock:
    """The device's time as the host has it."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._began = time.perf_counter()

    def at(self, event: torch.cuda.Event) -> float:
        """Of an event that is over."""
        return self._began + self._zero.elapsed_time(event) / 1e3


def _register(count: int) -> torch.Tensor:
    segment = map_memory(count)
    keep_from_children(segment)  # a fork (a loader's worker) would copy all that is registered
    code = torch.cuda.cudart().cudaHostRegister(segment.data_ptr(), count, 0)
    if int(code) != 0:
        _forget_last_error()
        raise BudgetError(
            f"host: the driver could not register {format_size(count)} of memory (CUDA error {int(code)})",
            tier="host",
            short=count,
            advice="lower host.memory, or raise the limit on locked memory (ulimit -l)",
        )
    return segment


def _forget_last_error() -> None:
    """The runtime keeps it, and raises it once: here, not for who allocates next."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # a kernel, which is when torch asks for it


def _unregister(segment: torch.Tensor) -> bool:
    """What the driver keeps must stay mapped."""
    return int(torch.cuda.cudart().cudaHostUnregister(segment.data_ptr())) == 0


REGISTERED = Arena(_register, _unregister)
"""Of all back ends of the process: registering takes time, and what one engine leaves serves the next."""


class CudaBackend:
    kind = "cuda"
    one_memory = False

    def __init__(self, poison: bool = False) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._poison = poison
        self._streams = {
            link: torch.cuda.Stream(self.device) for link in ("host_to_device", "device_to_host")
        }
        self._apart = torch.cuda.Stream(self.device)
        self._held = {"device": 0, "host": 0}
        self._meter: Any = None
        self._storages: set[int] = set()
        self._clock: Clock | None = None
        _expandable_segments()
        _open_products(self.device)

    def limit(self, count: int) -> None:
        """Lets the allocator refuse what passes the budget, beside what the process holds already. It counts the pages
        that it maps, not the bytes that are used of them, as budgets do."""
        _, total = torch.cuda.mem_get_info(self.device)
        pages = max(PAGES_AT_LEAST, count // 20)
        share = (count + torch.cuda.memory_reserved(self.device) + pages) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def allocate(self, tier: str, count: int) -> torch.Tensor:
        if tier == "host":
            memory = REGISTERED.take(count)
            self._held[tier] += count
            return memory
        self._changes()
        # What is made in inference mode could never be trained.
        with torch.inference_mode(False):
            memory = torch.empty(count, dtype=torch.uint8, device=self.device)
        self._held[tier] += count
        self._changed()
        self._storages.add(memory.untyped_storage()._cdata)
        return memory

    def free(self, tier: str, memory: torch.Tensor) -> None:
        if self._poison:
            memory.fill_(0xFF)
        if tier == "host":
            self._held[tier] -= memory.numel()
            REGISTERED.put(memory)
            return
        self._changes()
        self._held[tier] -= memory.numel()
        self._storages.discard(memory.untyped_storage()._cdata)
        # Freed here and not when the caller's reference goes, so that the meter starts again after it.
        memory.untyped_storage().resize_(0)
        self._changed()

    def _changes(self) -> None:
        if self._meter is not None:
            self._meter.split()

    def _changed(self) -> None:
        if self._meter is not None:
            self._meter.restart()

    def trim(self, most: int) -> None:
        """The caching allocator serves chunks and activations alike, and registered host memory stays."""

    def mark(self) -> StreamEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return StreamEvent(event)

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, link: str, after: Event | None = None
    ) -> StreamEvent:
        stream = self._streams[link]
        if isinstance(after, StreamEvent):
            after.hold(stream)
        else:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        clock = self._clock
        # Who waits for a copy leaves the core to updates.
        event = torch.cuda.Event(blocking=True, enable_timing=clock is not None)
        begun = torch.cuda.Event(enable_timing=True) if clock is not None else None
        with torch.cuda.stream(stream):
            if begun is not None:
                begun.record(stream)
            destination.copy_(source, non_blocking=True)
            event.record(stream)
        return StreamEvent(event, begun, clock)

    def time_copies(self, wanted: bool) -> None:
        self._clock = Clock(self.device) if wanted else None

    @contextmanager
    def apart(self, after: Event) -> Iterator[None]:
        assert isinstance(after, StreamEvent)
        after.hold(self._apart)
        with torch.cuda.device(self.device), torch.cuda.stream(self._apart):
            yield

    aliases = staticmethod(users)

    def owns(self, storage: int) -> bool:
        return storage in self._storages

    def watch(self, meter: Any) -> None:
        self._meter = meter

    def available(self) -> dict[str, int]:
        free, _ = torch.cuda.mem_get_info(self.device)
        return {"device": free, "host": job_memory().available + REGISTERED.free_bytes()}

    def capacity(self) -> dict[str, int]:
        _, total = torch.cuda.mem_get_info(self.device)
        return {"device": total, "host": job_memory().total}

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def held(self) -> dict[str, int]:
        return dict(self._held)

    def close(self) -> None:
        self.synchronize()
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)


def _expandable_segments() -> None:
    """Activations and chunks then share physical memory, whatever their sizes. What the user has set stays."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if settings is not None and "expandable_segments" not in given:
        settings(",".join(filter(None, (given, "expandable_segments:True"))))


def _open_products(device: torch.device) -> None:
    """Each thread that multiplies, autograd's too, takes a workspace with its first product and keeps it: before the
    budget begins, else the first pass would have it beside what was foreseen."""
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(8, 8, device=device, requires_grad=True)
        (one @ one).sum().backward()
