"""A run's folder, as ranks that save together see it: the first one keeps it, and what befalls it is told to all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ebbtide.checkpoint import folders
from ebbtide.checkpoint.folders import RunFolder
from ebbtide.errors import DiskError, EbbtideError
from ebbtide.runtime.distributed.ranks import Ranks


@contextmanager
def writing(run: RunFolder, step: int, ranks: Ranks | None, keep: int | None) -> Iterator[tuple[Path, Path]]:
    """(where to write, the name that it will have). What is raised within is raised on all ranks."""
    stack, paths = begin(run, step, ranks)
    if ranks is not None and ranks.rank:
        try:
            yield paths
        except OSError as error:
            raise folders.not_written(error, paths[0], step) from error
        _told(ranks.objects(None))
        return
    written = False
    try:
        with stack:
            yield paths
            written = True
        if keep is not None:
            try:
                run.keep(keep)
            except OSError as error:
                raise DiskError(f"{run.path}: old checkpoints cannot be removed: {error}") from error
    except Exception as error:
        if written and ranks is not None:
            ranks.objects(error)
        raise
    if ranks is not None:
        ranks.objects(None)


def begin(run: RunFolder, step: int, ranks: Ranks | None) -> tuple[ExitStack, tuple[Path, Path]]:
    """The same, to be ended later: by the first rank, for what the others close is empty."""
    if ranks is not None and ranks.rank:
        return ExitStack(), _told(ranks.objects(None))
    with ExitStack() as stack:
        try:
            paths = stack.enter_context(run.writing(step))
        except Exception as error:
            if ranks is not None:
                ranks.objects(error)
            raise
        if ranks is not None:
            ranks.objects(paths)
        return stack.pop_all(), paths


def _told(said: list[object]) -> tuple[Path, Path]:
    if isinstance(said[0], BaseException):
        raise said[0]
    return said[0]  # type: ignore[return-value]


def find(path: str | Path, ranks: Ranks | None) -> Path:
    """The checkpoint that a path means, the same for all ranks: `latest` may move meanwhile."""
    found: Path | EbbtideError
    try:
        found = folders.find(path)
    except EbbtideError as error:
        found = error
    if ranks is not None:
        everywhere = ranks.objects(found)
        found = everywhere[0]
        missing = [rank for rank, one in enumerate(everywhere) if isinstance(one, BaseException)]
        if missing and not isinstance(found, BaseException):
            found = DiskError(
                f"load: '{path}' is not there on ranks {missing}; expected a folder that all of them see"
            )
    if isinstance(found, BaseException):
        raise found
    return found
