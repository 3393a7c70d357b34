"""RAM that this process may use: the machine's, or less where it runs in a job or a container with a limit.

A limit belongs to a control group, and those around it count, too: a batch system limits the job, and the process is in
a group below. The kernel kills a process that takes more than the least of them, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
CACHE = ("inactive_file", "active_file")
"""Of what a group holds, what the kernel takes back when it is wanted: files that were read or written."""


@dataclass(frozen=True)
class Ram:
    total: int
    available: int


@dataclass(frozen=True)
class _Kind:
    """A version of control groups: where they are, and what their files are called."""

    folder: str
    limit: str
    held: str
    prefix: str
    """Of a number over the groups below, too."""


_SECOND = _Kind("", "memory.max", "memory.current", "")
_FIRST = _Kind("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def job_memory(groups: Path = GROUPS, own: Path = OWN) -> Ram:
    """What is free of it is never more than what the machine has free."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, held in _limits(groups, own):
        total, available = min(total, limit), min(available, max(0, limit - held))
    return Ram(total, available)


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is held and does not come back), of each group that this process is in."""
    for kind, name in _memberships(own):
        path = PurePosixPath(name)
        # In a container the name may be the machine's, and the container's own group is all that is there.
        for place in (path, *path.parents):
            folder = groups / kind.folder / str(place).lstrip("/")
            limit, held = _number(folder / kind.limit), _number(folder / kind.held)
            if limit is not None and held is not None:
                yield limit, held - _cache(folder, kind)


def _memberships(own: Path) -> Iterator[tuple[_Kind, str]]:
    for line in _text(own).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            yield _SECOND, name
        elif "memory" in controllers.split(","):
            yield _FIRST, name


def _cache(folder: Path, kind: _Kind) -> int:
    found = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return sum(int(found.get(kind.prefix + name, 0)) for name in CACHE)


def _number(path: Path) -> int | None:
    """None for `max`, and where there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
