"""What a CUDA device and its link give. Not to be imported without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def links(device: torch.device, count: int, rounds: int) -> dict[str, float]:
    """Bytes a second: each direction alone, both at once (each), pageable memory, and inside the device."""
    begin = time.perf_counter()
    down, up = (torch.ones(count, dtype=torch.uint8).pin_memory() for _ in range(2))
    pinning = time.perf_counter() - begin
    pageable = torch.ones(count, dtype=torch.uint8)
    there = [torch.ones(count, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def to_device() -> None:
        there[0].copy_(down, non_blocking=True)

    def to_host() -> None:
        up.copy_(there[1], non_blocking=True)

    def both() -> None:
        for stream, job in zip(streams, (to_device, to_host), strict=True):
            with torch.cuda.stream(stream):
                job()

    found = {
        "host_to_device": count / _seconds(to_device, rounds),
        "device_to_host": count / _seconds(to_host, rounds),
        "both_each": count / _seconds(both, rounds),
        "pageable": count / _seconds(lambda: there[0].copy_(pageable), rounds),
        "inside": 2 * count / _seconds(lambda: there[0].copy_(there[1]), rounds),
        "pinning": 2 * count / pinning,
    }
    small = down[:64]
    found["latency"] = _seconds(lambda: there[0][:64].copy_(small, non_blocking=True), rounds)
    if torch.cuda.device_count() > 1:
        other = torch.device("cuda", (device.index or 0) ^ 1)
        beside = torch.ones(count, dtype=torch.uint8, device=other)
        found["device_device"] = count / _seconds(lambda: beside.copy_(there[0], non_blocking=True), rounds)
    return found


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of the device, and those that are taken before any tensor is: the context, and other processes."""
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    return {"total": total, "taken": total - free - torch.cuda.memory_reserved(device)}


def _seconds(job: Callable[[], Any], rounds: int) -> float:
    found = []
    for number in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        job()
        torch.cuda.synchronize()
        if number:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)
