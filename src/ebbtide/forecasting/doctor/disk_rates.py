"""What a disk gives, past the page cache where the file system allows it: reads, writes, and both at once."""

from __future__ import annotations

import errno
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ebbtide.devices.pool import map_memory
from ebbtide.errors import ConfigError
from ebbtide.forecasting.doctor.system import file_system
from ebbtide.memory.disk.vectors import view
from ebbtide.units import format_size

BUFFER = 16 << 20
MEMORY_BACKED = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Disk:
    folder: str
    file_system: str
    direct: bool
    """Whether the file system has O_DIRECT; else the page cache is in between."""
    free: int
    read: float
    write: float
    mixed: float
    """Both at once, together."""
    cpu: float
    """Seconds of one core for each byte that is read or written: what the system has to do for it."""


def measure(folder: Path, size: int, rounds: int, limit: float) -> Disk:
    """Writes and reads a file of `size` bytes that has no name; `limit`: seconds of each pass at most."""
    free = _free(folder, size)
    with _filled(folder, size, limit) as (area, first, second):
        found: dict[str, list[float]] = {"read": [], "write": [], "mixed": []}
        for _ in range(rounds):
            found["write"].append(area.rate([(area.write, first), (area.write, second)], limit))
            found["read"].append(area.rate([(area.read, first), (area.read, second)], limit))
            found["mixed"].append(area.rate([(area.read, first), (area.write, second)], limit))
    rates = {name: statistics.median(values) for name, values in found.items()}
    return Disk(
        str(folder),
        file_system(folder),
        area.direct,
        free,
        rates["read"],
        rates["write"],
        rates["mixed"],
        area.cpu_seconds / area.moved,
    )


@contextmanager
def mixed_rates(folder: Path, size: int, limit: float) -> Iterator[Callable[[], float]]:
    """What the disk gives to reads and writes at once, whenever that is asked; `limit`: seconds each time."""
    _free(folder, size)
    with _filled(folder, size, limit) as (area, first, second):
        yield lambda: area.rate([(area.read, first), (area.write, second)], limit)


@contextmanager
def _filled(folder: Path, size: int, limit: float) -> Iterator[tuple[_Area, range, range]]:
    """A file of `size` bytes, and two halves of its blocks."""
    file, direct = _open(folder)
    try:
        area = _Area(file, direct, size // (2 * BUFFER) * 2)
        # Only what was written can be read; a slow disk has written less than the whole file.
        written = area.run(area.write, range(area.blocks), 2 * limit) // 2 * 2
        if written < 2:
            area.write(1, area.buffers[0])
            written = 2
        yield area, range(written // 2), range(written // 2, written)
    finally:
        os.close(file)


def _free(folder: Path, size: int) -> int:
    if not folder.is_dir():
        raise ConfigError(
            f"--folder: expected a folder, found {str(folder)!r}; create it or name another one"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--folder: {str(folder)!r} cannot be written to; name another one")
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    if free < size * 5 // 4:
        raise ConfigError(
            f"--folder: {str(folder)!r} has {format_size(free)} free, and measuring takes {format_size(size * 5 // 4)}; "
            "free some space, name another folder, or add --quick"
        )
    return free


def _open(folder: Path) -> tuple[int, bool]:
    """A file without a name: it is gone when the process is, however it ends."""
    path = folder / f".ebbtide-doctor-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    direct = getattr(os, "O_DIRECT", 0)
    path.unlink(missing_ok=True)
    try:
        file = os.open(path, flags | direct, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not direct:
            raise
        direct = 0
        path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o600)
    path.unlink()
    return file, bool(direct)


Move = Callable[[int, memoryview], None]


class _Area:
    """A file of blocks, and an aligned buffer for each of two threads."""

    def __init__(self, file: int, direct: bool, blocks: int) -> None:
        self.blocks = blocks
        self.cpu_seconds, self.moved = 0.0, 0
        """Of all that was timed."""
        self._file = file
        self.direct = direct
        # As the SSD tier has them, in huge pages: with small ones a fast disk gives half of its rate.
        self._memory = [map_memory(BUFFER) for _ in range(2)]
        self.buffers = [view(memory.data_ptr(), BUFFER) for memory in self._memory]
        for buffer in self.buffers:
            buffer[:] = os.urandom(1 << 16) * (BUFFER >> 16)

    def write(self, block: int, buffer: memoryview) -> None:
        _require_all(os.pwritev(self._file, [buffer], block * BUFFER))

    def read(self, block: int, buffer: memoryview) -> None:
        _require_all(os.preadv(self._file, [buffer], block * BUFFER))

    def run(self, move: Move, blocks: range, limit: float, place: int = 0) -> int:
        """Moves block after block until the time is over; how many there were."""
        end = time.perf_counter() + limit
        done = 0
        for block in blocks:
            if done and time.perf_counter() > end:
                break
            move(block, self.buffers[place])
            done += 1
        return done

    def rate(self, jobs: list[tuple[Move, range]], limit: float) -> float:
        """Bytes a second of jobs that run at once, each on a thread. What a page cache holds is written out."""
        moved: list[int] = []
        errors: list[BaseException] = []
        self._forget()

        def job(place: int, move: Move, blocks: range) -> None:
            try:
                moved.append(self.run(move, blocks, limit, place) * BUFFER)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=job, args=(place, *one)) for place, one in enumerate(jobs)]
        begin, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if not self.direct:
            os.fsync(self._file)
        self.cpu_seconds += time.process_time() - cpu
        self.moved += sum(moved)
        return sum(moved) / (time.perf_counter() - begin)

    def _forget(self) -> None:
        if not self.direct:
            os.fsync(self._file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def _require_all(count: int) -> None:
    if count != BUFFER:
        raise OSError(errno.EIO, f"{count} of {BUFFER} bytes were moved; is the disk full?")
