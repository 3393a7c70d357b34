"""Folders of the SSD tier: who owns one, and the data file in it.

Note [who owns a folder]: a lock (flock) on `ebbtide.lock`, which the kernel gives up with the process, however it
ends. Who holds it may remove every data file in the folder, for nobody alive can own one. The owner removes the
lock file while it still holds the lock, so whoever gets the lock looks whether the file is still the one in the
folder. A forked child shares the lock and must not outlive its parent with it: it closes what it inherited.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ebbtide.errors import BudgetError, ConfigError, DiskError, EbbtideError
from ebbtide.memory.disk.extents import BLOCK
from ebbtide.units import format_size

LOCK = "ebbtide.lock"
RANK_FOLDERS = "rank-*"
DATA = re.compile(r"ebbtide-\d+-[0-9a-f]{12}\.data")
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)
"""Of a file system that cannot give a file its blocks ahead of writing, as NFS before 4.2."""


def _libc_fallocate() -> Any:
    """fallocate(2), which Python has not; None where the system has not, either."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found


_FALLOCATE = _libc_fallocate()


class SystemIO:
    """The system calls on files; tests put faults in their place."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def fallocate(self, file: int, size: int) -> None:
        """Raises one of NO_FALLOCATE where the file system cannot. Not libc's posix_fallocate: it writes a byte of each
        block then, and cannot where the file is open for direct transfers."""
        if _FALLOCATE is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _FALLOCATE(file, 0, 0, size):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def fill(self, file: int, size: int) -> None:
        """What `fallocate` does, by writing; not on a file that is open for direct transfers."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)

    def free(self, folder: str) -> int:
        """Bytes that this user may still write."""
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def preadv(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(file, buffers, offset)

    def pwritev(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return os.pwritev(file, buffers, offset)

    def close(self, file: int) -> None:
        os.close(file)


class DataFile:
    """A file of `size` bytes, preallocated: no space is found now and not in the middle of a run."""

    def __init__(self, folder: Folder, size: int, io: SystemIO, probe: Sequence[Any]) -> None:
        """`probe`: a zeroed, aligned block of memory, to try direct transfers with."""
        self.path = str(folder.path / f"ebbtide-{os.getpid()}-{secrets.token_hex(6)}.data")
        self.size = size
        self.direct = False
        self.number = -1
        self._io = io
        try:
            self._preallocate(folder)
            self._open(folder, probe)
        except BaseException:
            self.remove()
            raise

    def _preallocate(self, folder: Folder) -> None:
        with folder.refusals(self.path):
            # Not opened for direct access, see `SystemIO.fill`.
            number = self._io.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            try:
                self._io.fallocate(number, self.size)
            except OSError as error:
                if error.errno not in NO_FALLOCATE:
                    raise
                self._io.fill(number, self.size)
        except BaseException as error:
            _unlink(self.path)
            self._io.close(number)  # gives back what was got, so that what is free can be told
            if isinstance(error, OSError):
                raise self._refusal(folder, error) from error
            raise
        self._io.close(number)

    def _refusal(self, folder: Folder, error: OSError) -> EbbtideError:
        reason = error.strerror or str(error)
        asked = f"{self.path}: expected room for {format_size(self.size)} ({self.size} bytes)"
        if error.errno not in _FULL:
            return DiskError(
                f"{asked}, found: {reason}; name a folder on another file system with ssd.folder",
                file=self.path,
                expected=self.size,
            )
        free = self._io.free(str(folder.path))
        quota = error.errno == errno.EDQUOT
        short = self.size - free if free < self.size else self.size if quota else BLOCK
        return BudgetError(
            f"ssd: {asked}, found: {reason}, {format_size(free)} ({free} bytes) free"
            + (", less by the quota" if quota else f"; short by {format_size(short)}"),
            tier="ssd",
            short=short,
            advice="lower ssd.memory, free some space, or name another folder with ssd.folder",
        )

    def _open(self, folder: Folder, probe: Sequence[Any]) -> None:
        with folder.refusals(self.path):
            if _DIRECT:
                try:
                    self.number = self._io.open(self.path, os.O_RDWR | _DIRECT)
                    # Some file systems take the flag and refuse the transfers.
                    self._io.pwritev(self.number, probe, 0)
                    self._io.preadv(self.number, probe, 0)
                    self.direct = True
                    return
                except OSError as error:
                    if error.errno not in _NO_DIRECT:
                        raise
                    self.close()
            self.number = self._io.open(self.path, os.O_RDWR)

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            self._io.close(number)

    def remove(self) -> None:
        _unlink(self.path)
        self.close()


class Folder:
    """A folder that is ours alone until `close`."""

    def __init__(self, folder: str | Path, io: SystemIO) -> None:
        self.path = Path(folder).absolute()
        self._io = io
        self._lock = -1
        self.data: DataFile | None = None
        if not self.path.is_dir():
            found = "a file" if self.path.exists() else "nothing"
            raise ConfigError(
                f"ssd.folder: expected a folder, found {found} at '{self.path}'; create it or name another one"
            )
        facts = os.stat(self.path)
        self.identity = (facts.st_dev, facts.st_ino)
        self._acquire()
        _inherited.add(self)
        try:
            self.removed = self._clean()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def refusals(self, path: str) -> Iterator[None]:
        """What the system says of a file here, in words."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in _NO_ACCESS:
                raise ConfigError(
                    f"ssd.folder: expected a folder that can be written to, found '{self.path}' ({path}: {reason}); "
                    "change its permissions or name another one"
                ) from error
            if error.errno in _FULL:
                raise BudgetError(
                    f"ssd: {path} cannot be made: {reason}",
                    tier="ssd",
                    short=BLOCK,
                    advice="free some space, or name another folder with ssd.folder",
                ) from error
            raise DiskError(
                f"{path}: cannot be opened and tried: {reason}; name another folder with ssd.folder",
                file=path,
            ) from error

    def _acquire(self) -> None:
        path = str(self.path / LOCK)
        while self._lock < 0:
            with self.refusals(path):
                number = self._io.open(path, os.O_RDWR | os.O_CREAT)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_at(path, number):
                        text = f"process {os.getpid()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
                        os.ftruncate(number, 0)
                        os.pwrite(number, text.encode(), 0)
                        self._lock = number
                except BlockingIOError:
                    owner = os.pread(number, 200, 0).decode(errors="replace").strip()
                    raise ConfigError(
                        f"ssd.folder: '{self.path}' is in use by {owner or 'another process'}; "
                        "wait for it to end, or name another folder"
                    ) from None
                finally:
                    if self._lock != number:
                        self._io.close(number)

    def _clean(self) -> int:
        """Removes what dead owners left, see Note [who owns a folder]. How many files there were."""
        with self.refusals(str(self.path)):
            with os.scandir(self.path) as entries:
                left = [one.path for one in entries if DATA.fullmatch(one.name) and _is_plain(one)]
            for path in left:
                os.unlink(path)
        return len(left)

    def create(self, size: int, probe: Sequence[Any]) -> DataFile:
        self.data = DataFile(self, size, self._io, probe)
        return self.data

    def close(self) -> None:
        if self.data is not None:
            self.data.remove()
        number, self._lock = self._lock, -1
        if number >= 0:
            with suppress(OSError):
                if _is_at(str(self.path / LOCK), number):  # else somebody removed it, and another made one
                    _unlink(str(self.path / LOCK))
            fcntl.flock(number, fcntl.LOCK_UN)  # for children, too, that were forked off and share it
            self._io.close(number)

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's files without touching them."""
        number, self._lock = self._lock, -1
        if number >= 0:
            os.close(number)
        if self.data is not None and self.data.number >= 0:
            os.close(self.data.number)
            self.data.number = -1


def remove_left(folder: str) -> int:
    """Removes what a killed run left there, or in the folders of its ranks, of whatever number: before the room is
    measured. How many files. What somebody alive has stays, and a folder that cannot be used is refused by who opens
    it."""
    count = 0
    for place in (Path(folder), *Path(folder).glob(RANK_FOLDERS)):
        with suppress(EbbtideError, OSError):
            if any(DATA.fullmatch(name) for name in os.listdir(place)):
                owned = Folder(place, SystemIO())
                count += owned.removed
                owned.close()
                if place != Path(folder):
                    place.rmdir()
    return count


def rank_folder(folder: str, place: int) -> Path:
    """A folder serves one process at a time: each rank of a machine has its own in it."""
    return Path(folder) / f"rank-{place}"


def _unlink(path: str) -> None:
    """What cannot be removed now is removed by the folder's next owner."""
    with suppress(OSError):
        os.unlink(path)


def _is_at(path: str, number: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(number))
    except FileNotFoundError:
        return False


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


_inherited: weakref.WeakSet[Folder] = weakref.WeakSet()


def _abandon_all() -> None:
    for folder in list(_inherited):
        folder.abandon()


os.register_at_fork(after_in_child=_abandon_all)
