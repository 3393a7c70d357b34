"""The facts of the machine that are read and not measured."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from ebbtide.devices.job_memory import job_memory

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class System:
    cpu: str
    flags: tuple[str, ...]
    """Those of the processor's abilities that matter for products."""
    cores: int
    """That this process may use."""
    cores_online: int
    memory: int
    """RAM that this process may use."""
    memory_installed: int
    available: int
    swap_used: int
    numa_nodes: int
    huge_pages: str
    """always, madvise or never; empty where the kernel does not say."""
    wait_policy: str
    """OMP_WAIT_POLICY; empty where it is not set."""
    load: float
    """Threads that ran or wanted to, on average over a minute before."""


def read_system() -> System:
    memory = psutil.virtual_memory()
    ours = job_memory()
    online = os.cpu_count() or 1
    return System(
        cpu=_cpu_name(),
        flags=_cpu_flags(),
        cores=_cores(online),
        cores_online=online,
        memory=ours.total,
        memory_installed=memory.total,
        available=ours.available,
        swap_used=psutil.swap_memory().used,
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        huge_pages=_chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    )


def _cores(online: int) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    quota = _cgroup_cores()
    return max(1, min(online, allowed, int(quota) if quota else online))


def _cgroup_cores() -> float | None:
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if not period:  # the first version of control groups
        quota = _text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _text("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpu_flags() -> tuple[str, ...]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    found = set(match[1].split()) if match else set()
    return tuple(flag for flag in _FLAGS if flag in found)


def _chosen(path: str) -> str:
    match = re.search(r"\[(\w+)\]", _text(path))
    return match[1] if match else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def file_system(folder: Path) -> str:
    """The type of the file system below a folder, such as ext4 or tmpfs."""
    where = str(folder.resolve())
    best, kind = "", ""
    for part in psutil.disk_partitions(all=True):
        mount = part.mountpoint
        inside = where == mount or where.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, part.fstype
    return kind
