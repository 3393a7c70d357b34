"""Checkpoints of a run, in one folder: each is complete, or it is not there.

Note [complete or not there]: a checkpoint is written in a folder of another name, its files are synced, then it gets
its name, and that is synced. `latest` is replaced after that, in the same way. Whoever is killed at any time leaves a
folder with that other name, which is locked while its owner lives, and is removed by the next one who saves. Such a
lock is a machine's: on storage that several share, what another one writes is left alone until nothing has changed in it
for a day. So a job that was started again elsewhere, while the first one lives, takes nothing from it.

Note [a spare]: blocks that are new to a file are written at half the speed of old ones (measured on ext4), and freeing
them takes its time. Of the checkpoints that are not kept one is a spare until the next is written into its files. It
takes room that writing the next one needs anyway, and goes when the engine is closed or the process ends.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ebbtide.errors import ConfigError, DiskError, warn_user

LATEST = "latest"
INDEX = "index.json"
SPARE = ".spare"
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
PART = re.compile(r"part-\d+-of-(\d+)")
SHARD = re.compile(r"rank-\d{5,}\.bin")
PARTIAL = re.compile(r"\.partial-[0-9a-f]{12}")
SILENCE = 10.0
"""Seconds that a save waits for a folder that is locked before it says so."""
ABANDONED = 86_400.0
"""Seconds after which a save removes the checkpoint that another machine began and did not end."""
LOOK = 0.05
"""Seconds between two looks."""


class RunFolder:
    """The folder that holds a run's checkpoints."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def complete(self) -> list[Path]:
        """In the order in which they were written: a run may have gone back to one, and on from there."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in self.path.iterdir():
                name = NAME.fullmatch(entry.name)
                with suppress(FileNotFoundError):  # another process removes it
                    if name:
                        written = (entry / INDEX).stat().st_mtime_ns
                        found.append((written, int(name[1]), int(name[2] or 0), entry))
        return [entry for *_, entry in sorted(found)]

    def latest(self) -> Path | None:
        """What `latest` names; where that is gone, the newest one that is there."""
        with suppress(OSError, UnicodeDecodeError):
            named = self.path / (self.path / LATEST).read_text().strip()
            if NAME.fullmatch(named.name) and (named / INDEX).is_file():
                return named
        found = self.complete()
        return found[-1] if found else None

    @contextmanager
    def writing(self, step: int) -> Iterator[tuple[Path, Path]]:
        """(where to write, the name that it will have); named and made the latest at the end, gone if that fails."""
        make_folder(self.path, "save")
        try:
            partial, lock = self._begin()
        except OSError as error:
            raise not_written(error, self.path, step) from error
        try:
            yield partial, (target := self._free_name(step))
            sync(partial)
            os.rename(partial, target)
            sync(self.path)
            self._point_to(target)
        except OSError as error:
            raise not_written(error, partial, step) from error
        finally:
            _unlock(lock)
            shutil.rmtree(partial, ignore_errors=True)

    def _begin(self) -> tuple[Path, int]:
        """A folder that is ours while we live: nobody else looks before it is locked."""
        wait_for_removals()
        everybody = os.open(self.path, os.O_RDONLY)
        try:
            self._wait_for_others(everybody)
            self._clean()
            taken = self._take_spare()
            if taken is None:
                partial = self.path / partial_name()
                partial.mkdir()
                taken = partial, _lock(partial)
            return taken
        finally:
            _unlock(everybody)

    def _wait_for_others(self, number: int) -> None:
        """Who begins a checkpoint has the lock for moments. Another program may hold it for longer: it is said then."""
        begun, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            if not told and time.monotonic() > begun + SILENCE:
                told = True
                warn_user(f"save: another process has locked {self.path}; waiting until it gives it back")
            time.sleep(LOOK)

    def _take_spare(self) -> tuple[Path, int] | None:
        """The spare, under another name and locked; not where somebody has locked it."""
        partial = self.path / partial_name()
        try:
            lock = _lock(self.path / SPARE)
        except OSError:
            return None
        try:
            os.rename(self.path / SPARE, partial)
            (partial / INDEX).unlink(missing_ok=True)
            if not os.path.samestat(os.stat(partial), os.fstat(lock)):
                raise BlockingIOError  # another took its place before it was renamed
        except BaseException as error:
            _unlock(lock)
            if isinstance(error, OSError):
                return None
            raise
        return partial, lock

    def _free_name(self, step: int) -> Path:
        target, number = self.path / f"step-{step:08d}", 0
        while target.exists():
            number += 1
            target = self.path / f"step-{step:08d}-{number}"
        return target

    def _point_to(self, target: Path) -> None:
        aside = self.path / f".{LATEST}-{secrets.token_hex(6)}"
        try:
            write_synced(aside, f"{target.name}\n".encode())
            os.replace(aside, self.path / LATEST)
        finally:
            aside.unlink(missing_ok=True)
        sync(self.path)

    def _clean(self) -> None:
        """Removes what those left who were killed, see Note [complete or not there]."""
        for entry in self.path.iterdir():
            if not PARTIAL.fullmatch(entry.name) or _is_locked(entry):
                continue
            if entry.name.startswith(_OURS) or _untouched(entry) > ABANDONED:
                shutil.rmtree(entry, ignore_errors=True)

    def keep(self, count: int) -> None:
        """Removes all but the newest `count`; never the latest, nor what others that have the rest of a model can still
        go on from. One of them is a spare, see Note [a spare]."""
        latest = self.latest()
        for old in self._whole()[:-count]:
            if old == latest:
                continue
            # First it loses its name: half of a checkpoint is never taken for a whole one.
            spare = self.path / SPARE
            gone = self.path / partial_name() if spare.exists() else spare
            with suppress(OSError):
                os.rename(old, gone)
                if gone == spare:
                    _spares.add(spare)
                else:
                    _remove_beside(gone)

    def _whole(self) -> list[Path]:
        """The complete ones up to the newest whose step all parts of a model have, of those that are seen from here."""
        found, part = self.complete(), PART.fullmatch(self.path.name)
        if part is None:
            return found
        others = [self.path.parent / f"part-{place}-of-{part[1]}" for place in range(int(part[1]))]
        steps = [set(map(step_of, RunFolder(other).complete())) for other in others if other.is_dir()]
        common = [place for place, entry in enumerate(found) if all(step_of(entry) in one for one in steps)]
        return found[: common[-1] + 1] if common else []

    def remove_spare(self) -> None:
        _spares.discard(self.path / SPARE)
        _remove_spare(self.path / SPARE)


_OURS = f".partial-{hashlib.blake2b(socket.gethostname().encode(), digest_size=3).hexdigest()}"
"""How the names of this machine's begin."""


def partial_name() -> str:
    return f"{_OURS}{secrets.token_hex(3)}"


def _untouched(folder: Path) -> float:
    """Seconds since something in it was written."""
    try:
        return time.time() - max(one.stat().st_mtime for one in (folder, *folder.iterdir()))
    except OSError:
        return 0.0  # its owner is at work


_spares: set[Path] = set()
"""Those that this process has made."""


@atexit.register
def _remove_spares() -> None:
    for spare in _spares:
        _remove_spare(spare)


def _remove_spare(spare: Path) -> None:
    """Another process may be about to write into it: whoever gives it another name first has it."""
    gone = spare.parent / partial_name()
    with suppress(OSError):
        os.rename(spare, gone)
        shutil.rmtree(gone, ignore_errors=True)


_removals: list[threading.Thread] = []


def _remove_beside(folder: Path) -> None:
    """Freeing the blocks of gigabytes takes a while that nobody needs to wait for; what the end of the process leaves is
    removed by the next one who saves."""
    thread = threading.Thread(target=shutil.rmtree, args=(folder, True), name="ebbtide-remove", daemon=True)
    _removals.append(thread)
    thread.start()


def wait_for_removals() -> None:
    """Their room is wanted."""
    while _removals:
        _removals.pop().join()


def make_folder(path: Path, purpose: str) -> None:
    """A folder that can be written to, or a refusal before there is something to lose."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise ConfigError(
            f"{purpose}: '{path}' cannot be written to ({error.strerror}); choose a folder that can"
        ) from error


def not_written(error: OSError, partial: Path, step: int) -> DiskError:
    where = str(error.filename or partial)
    return DiskError(
        f"{where}: the checkpoint of step {step} could not be written: {error.strerror or error}; those that were there "
        "are as they were",
        file=where,
    )


def find(path: str | Path) -> Path:
    """The checkpoint that a path means: one, or the latest of a run."""
    path = Path(path)
    if (path / INDEX).is_file():
        return path
    found = RunFolder(path).latest()
    if found is None:
        what = (
            "has no complete checkpoint"
            if path.is_dir()
            else "is no folder"
            if path.exists()
            else "is not there"
        )
        raise ConfigError(
            f"load: '{path}' {what}; expected a checkpoint, or a folder that engine.save() wrote to"
        )
    return found


def is_run(path: Path) -> bool:
    """Whether there is a checkpoint, or a folder of them."""
    return (path / INDEX).is_file() or (path.is_dir() and bool(RunFolder(path).complete()))


def step_of(checkpoint: Path) -> int:
    """By its name; -1 where somebody has given it another."""
    name = NAME.fullmatch(checkpoint.name)
    return int(name[1]) if name else -1


def sync(path: Path) -> None:
    """The entries of a folder, or the content of a file."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _lock(folder: Path) -> int:
    """A descriptor that holds its lock; raises where somebody else does."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(number)
        raise
    return number


def _unlock(number: int) -> None:
    fcntl.flock(number, fcntl.LOCK_UN)  # for children, too, that were forked off and share it
    os.close(number)


def _is_locked(partial: Path) -> bool:
    """Whether the one who writes there lives."""
    try:
        _unlock(_lock(partial))
    except OSError:
        return True  # or gone, or not ours
    return False
