"""What is slow or misconfigured, in words. Each sentence has the figure it rests on, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ebbtide.forecasting.doctor.disk_rates import MEMORY_BACKED
from ebbtide.forecasting.doctor.system import System
from ebbtide.units import format_size


def advise(system: System, raw: Mapping[str, Any]) -> list[str]:
    """`raw` as `examine` collects it."""
    return [
        *_spinning(system, raw),
        *_cores(system, raw),
        *_memory(system, raw),
        *_products(raw),
        *_links(raw),
        *_disk(raw),
    ]


def _spinning(system: System, raw: Mapping[str, Any]) -> Iterator[str]:
    seconds = raw.get("spinning")
    if not seconds:
        return
    cost = seconds["default_beside"] / seconds["passive_beside"]
    if cost > 1.1:
        now = (
            f"OMP_WAIT_POLICY is {system.wait_policy!r}"
            if system.wait_policy
            else "OMP_WAIT_POLICY is not set"
        )
        here = "; this command sets it itself" if system.wait_policy.lower() == "passive" else f"; here {now}"
        yield (
            f"OpenMP's threads spin by default: a pass beside one copying thread takes {cost:.1f} times as long as with "
            f"OMP_WAIT_POLICY=passive. Set it before torch is imported in programs of your own{here}."
        )


def _cores(system: System, raw: Mapping[str, Any]) -> Iterator[str]:
    if system.cores < system.cores_online:
        yield (
            f"This process may use {system.cores} of the processor's {system.cores_online} cores (affinity or a control "
            "group's limit). Raise the limit, or count on what is written here."
        )
    drift = raw["operators"]["drift"]
    if drift > 1.3:
        yield (
            f"One and the same product took up to {drift:.1f} times as long as at other times: the cores are shared "
            f"with other work (the load before was {system.load:.1f} on {system.cores} cores). Measure again when it "
            "is quiet."
        )
    if system.numa_nodes > 1:
        yield (
            f"The memory has {system.numa_nodes} NUMA nodes. A process whose threads and memory are on different "
            "ones is slower: bind each (numactl --cpunodebind=N --membind=N) to the node of its device."
        )


def _memory(system: System, raw: Mapping[str, Any]) -> Iterator[str]:
    if system.memory < 0.95 * system.memory_installed:
        yield (
            f"A control group allows {format_size(system.memory)} of {format_size(system.memory_installed)} RAM. Raise "
            "it if training should have more."
        )
    if system.available < 0.5 * system.memory:
        yield (
            f"Only {format_size(system.available)} of {format_size(system.memory)} RAM are free: "
            f"{format_size(system.memory - system.available)} are in use by others. Close what can be closed."
        )
    if system.swap_used > 64 << 20:
        yield (
            f"{format_size(system.swap_used)} are swapped out. A budget must not reach into swap: lower host.memory, "
            "or switch swap off (swapoff -a)."
        )
    if system.huge_pages == "never":
        touch, refill = raw["streams"]["first_touch"], raw["streams"]["refill"]
        yield (
            f"Transparent huge pages are off; first touch reaches {touch / 1e9:.1f} GB/s, a refill {refill / 1e9:.1f}. "
            "Allow them where asked for: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled."
        )


def _products(raw: Mapping[str, Any]) -> Iterator[str]:
    rates = raw["products"]
    if raw["precision"] == "fp32":
        yield (
            "The processor has no instructions for products in bf16 (AVX-512, AMX), and torch takes up to a hundred "
            'times as long for them: what is measured here is fp32. Train with precision = "fp32".'
        )
    low = next((name for name in ("bf16", "fp16") if name in rates), None)
    if low and rates[low] < rates["fp32"]:
        yield (
            f"Products in {low} are slower than in fp32: {rates[low] / 1e9:,.0f} against {rates['fp32'] / 1e9:,.0f} "
            f'GFLOP/s. The processor has no instructions for {low} (AMX, AVX512-BF16): precision = "fp32" is faster, '
            "and takes more memory."
        )


def _links(raw: Mapping[str, Any]) -> Iterator[str]:
    found = raw.get("cuda")
    if not found:
        return
    one, both = found["host_to_device"], found["both_each"]
    if both < 0.75 * min(one, found["device_to_host"]):
        yield (
            f"The link gives {one / 1e9:.1f} GB/s in one direction and {both / 1e9:.1f} in each when both are busy: "
            "fetches and write-backs slow each other."
        )
    if one < 10e9:
        yield (
            f"The link gives {one / 1e9:.1f} GB/s from pinned memory; PCIe 3.0 x16 gives 12. Check that the card sits "
            "in a slot of 16 lanes (nvidia-smi -q: Link Width)."
        )


def _disk(raw: Mapping[str, Any]) -> Iterator[str]:
    disk = raw["disk"]
    if disk["file_system"] in MEMORY_BACKED:
        yield (
            f"{disk['folder']} is {disk['file_system']}, which is RAM and no disk; it is written down as no SSD. Name a "
            "folder on a disk with --folder."
        )
        return
    if not disk["direct"]:
        yield (
            f"{disk['folder']} ({disk['file_system'] or 'unknown file system'}) has no O_DIRECT: its rates went through "
            "the page cache and are not the disk's. Name a folder on ext4 or xfs with --folder."
        )
    if disk["mixed"] < 0.8 * min(disk["read"], disk["write"]):
        yield (
            f"The disk moves {disk['mixed'] / 1e9:.2f} GB/s when it reads and writes at once, {disk['read'] / 1e9:.2f} "
            f"reading and {disk['write'] / 1e9:.2f} writing alone. Optimizer state on it is read and written in turn."
        )
    slowest = min(disk["read"], disk["write"])
    if slowest < 0.5e9:
        yield (
            f"The disk gives {slowest / 1e9:.2f} GB/s. 12 bytes a parameter, out and back, take "
            f"{24 / slowest * 1e9:,.0f} seconds for each billion parameters: prefer RAM, or an NVMe disk."
        )
