"""An engine's checkpoints on their way to the disk: all at once, or from a copy while training goes on.

Note [in the background]: of a rank's values as much is copied as its budget never needed so far, and the rest is written
before `save` returns. What was copied is written by a thread. A rank that is done says so with a file in the
checkpoint's folder, which all ranks see; the first one's thread waits for those, and gives the checkpoint its name. So
no rank's computation waits for another, and a rank that is gone leaves a checkpoint that is not there. A process that
ends, with its engine closed or not, waits for what is being written, and says what could not be; one that is killed
leaves a checkpoint that is not there.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ebbtide.checkpoint import shared_folders
from ebbtide.checkpoint.folders import INDEX, LOOK, SILENCE, RunFolder, not_written, write_synced
from ebbtide.checkpoint.rank_files import Snapshot
from ebbtide.errors import DiskError, warn_user
from ebbtide.memory.budget import SNAPSHOT
from ebbtide.runtime.session import Session

OTHERS_END = 60.0
"""Seconds that others have to end what they write, when it is in vain."""
SEEN = 5.0
"""Seconds until a file that another machine has renamed is seen here."""


def checkpoints() -> Any:
    """What reads and writes them. torch.distributed.checkpoint takes as long to import as half of torch: those who do
    neither need not wait for it."""
    from ebbtide.checkpoint import dcp_planners

    return dcp_planners


class Saver:
    def __init__(self, session: Session) -> None:
        self._session, self._ranks = session, session.ranks
        self._runs: dict[Path, RunFolder] = {}
        """Folders that were saved to."""
        self.pending: PendingSave | None = None
        self.failed = ""
        """Why the last one that was written in the background is not there."""
        self._unnamed: tuple[Path, Path] | None = None
        """Where the last one is written in the background, and the name that the first rank gives it at the end."""
        session.room.add_giver(SNAPSHOT, self)

    def save(
        self,
        path: Path,
        step: int,
        facts: Mapping[str, Any],
        content: Any,
        keep: int | None,
        background: bool,
    ) -> Path:
        """Returns the folder that the checkpoint has, or will have."""
        self.settle()
        run = self._runs.setdefault(path, RunFolder(path))
        if not background:
            with shared_folders.writing(run, step, self._ranks, keep) as (partial, target):
                checkpoints().write(self._session, partial, facts, content)
            self.failed, self._unnamed = "", None
            return target
        stack, (partial, target) = shared_folders.begin(run, step, self._ranks)
        snapshot = Snapshot(self._session.ledger, self._session.store.near)
        try:
            checkpoints().write(self._session, partial, facts, content, snapshot)
            self.pending = PendingSave(self._session, stack, snapshot, partial, run, step, keep)
        except BaseException as error:
            snapshot.close()
            snapshot.release()
            stack.__exit__(*sys.exc_info())
            if isinstance(error, OSError):
                raise not_written(error, partial, step) from error
            raise
        self._unnamed = partial, target
        return target

    def give_room(self, short: int) -> bool:
        """What is written from a copy is waited for."""
        self.settle()
        return True

    def settle(self, warn: bool = True) -> None:
        """Waits for the one that is being written."""
        pending = self.pending
        if pending is None:
            return
        pending.wait()  # whoever is interrupted here, with Ctrl-C, can wait again
        self.pending = None
        _unheard.discard(pending)
        pending.snapshot.release()
        self.failed = "" if pending.error is None else str(pending.error)
        if self.failed and warn:
            warn_user(f"{self.failed} (in the background)")

    def hear_first(self) -> None:
        """On the other ranks, whose part is written: until the first one has named the checkpoint, or given it up."""
        if self._ranks is None or not self._ranks.rank or self._unnamed is None or self.failed:
            return
        partial, target = self._unnamed
        begun, told, in_vain = time.monotonic(), False, False
        until = begun + self._ranks.patience
        while partial.is_dir() and time.monotonic() < until:
            if self._ranks.broken and not in_vain:
                until, in_vain = min(until, time.monotonic() + OTHERS_END), True
            if not told and time.monotonic() > begun + SILENCE:
                told = True
                warn_user(f"save: waiting for the first rank to write its part of {target} and name it")
            time.sleep(LOOK)
        until = time.monotonic() + SEEN
        while not (target / INDEX).is_file():
            if time.monotonic() > until:
                self.failed = f"{target} is not there: the first rank could not write it, and says why"
                break
            time.sleep(LOOK)
        self._unnamed = None

    def close(self) -> None:
        self.settle()
        for run in self._runs.values() if self._ranks is None or not self._ranks.rank else ():
            run.remove_spare()


class PendingSave:
    """One that is written by a thread of its own."""

    def __init__(
        self,
        session: Session,
        stack: ExitStack,
        snapshot: Snapshot,
        partial: Path,
        run: RunFolder,
        step: int,
        keep: int | None,
    ) -> None:
        self._ranks, self._stack, self.snapshot = session.ranks, stack, snapshot
        self._partial, self._run, self._step, self._keep = partial, run, step, keep
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._in_vain: float | None = None
        """When the process wanted to end, or it was found that there will be no checkpoint."""
        self._waits_for: tuple[int, float] | None = None
        """The rank whose part is not written yet, when this one's is, and since when."""
        self._process = os.getpid()
        _unheard.add(self)
        # Not one that Python waits for by itself: it would wait for other ranks, too, for as long as they have.
        threading.Thread(target=self._write, name="ebbtide-save", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        # Not `join`: Python takes a thread for dead whose join was interrupted (before 3.13).
        told = False
        while not self._over.wait(SILENCE):
            if self._waits_for is not None and not told:
                told = True
                rank, since = self._waits_for
                warn_user(
                    f"save: waiting for rank {rank} to write its part of the checkpoint of step {self._step}, for "
                    f"{max(0.0, self._until(since) - time.monotonic()):.0f} seconds at most"
                )

    def _write(self) -> None:
        try:
            self._finish()
        finally:
            if self.error is None:
                _unheard.discard(self)
            self._over.set()

    def end_with_process(self) -> None:
        """Not in a child that was forked off, which has no part in it, nor the thread."""
        if os.getpid() != self._process:
            return
        self._in_vain = time.monotonic()
        self.wait()
        if self.error is not None:
            warn_user(f"{self.error} (in the background)")

    def _finish(self) -> None:
        try:
            self.snapshot.write()
            if self._ranks is not None and self._ranks.rank:
                write_synced(self._sign(self._ranks.rank, True), b"")
                return
            self._hear_others()
            self._stack.close()
            if self._keep is not None:
                self._run.keep(self._keep)
        except BaseException as error:
            self.error = (
                not_written(error, self._partial, self._step) if isinstance(error, OSError) else error
            )
            if self._ranks is not None and self._ranks.rank:
                with suppress(OSError):
                    write_synced(self._sign(self._ranks.rank, False), str(self.error).encode())
                return
            with suppress(Exception):
                self._in_vain = self._in_vain or time.monotonic()
                self._hear_others()  # what they still write would stay
            with suppress(Exception):
                self._stack.__exit__(type(error), error, error.__traceback__)

    def _sign(self, rank: int, good: bool) -> Path:
        return self._partial / f".{'written' if good else 'failed'}-{rank:05d}"

    def _until(self, begun: float) -> float:
        """How long others are waited for."""
        assert self._ranks is not None
        if self._ranks.broken:
            self._in_vain = self._in_vain or time.monotonic()
        until = begun + self._ranks.patience
        return until if self._in_vain is None else min(until, max(begun, self._in_vain) + OTHERS_END)

    def _hear_others(self) -> None:
        """Until all of them have written, or one says that it cannot."""
        waited = range(1, 1 if self._ranks is None else self._ranks.size)
        begun = time.monotonic()
        for rank in waited:
            self._waits_for = rank, begun
            while not self._sign(rank, True).exists():
                if self._sign(rank, False).exists():
                    raise DiskError(
                        f"rank {rank}: {self._sign(rank, False).read_text()}", file=str(self._partial)
                    )
                if not self._partial.is_dir():
                    raise DiskError(
                        f"{self._partial} is gone, with what was written of the checkpoint of step {self._step}",
                        file=str(self._partial),
                    )
                if time.monotonic() > self._until(begun):
                    raise DiskError(
                        f"{self._partial}: rank {rank} has not written its part of the checkpoint of step {self._step}",
                        file=str(self._partial),
                    )
                time.sleep(LOOK)
        self._waits_for = None
        for rank in waited:
            self._sign(rank, True).unlink()


_unheard: set[PendingSave] = set()
"""Saves under way, and saves that failed before anybody asked for them."""


@atexit.register
def _end_with_process() -> None:
    for one in [*_unheard]:
        one.end_with_process()
