"""What an imagined pass prints, logs or writes to a file is dropped: the real one says it.

Streams and handlers are muted for the imagined pass alone; other threads go on writing through them.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ebbtide.tracing.imagining_flag import imagining


@contextmanager
def muted(files: Iterable[Any]) -> Iterator[None]:
    """`files`: those that the user's code has open for writing, as far as they are known."""
    streams = {id(one): one for one in (sys.stdout, sys.stderr, *files) if one is not None}
    with ExitStack() as stack:
        for stream in streams.values():
            stack.enter_context(_dropping(stream))
        for handler in _handlers():
            handler.addFilter(_is_real)
            stack.callback(handler.removeFilter, _is_real)
        yield


@contextmanager
def unwarned() -> Iterator[None]:
    """Warnings of the pass itself: what Python gives once for each place, the real pass is to give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_real(record: logging.LogRecord) -> bool:
    return not imagining()


def _handlers() -> list[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {id(one): one for logger in loggers for one in getattr(logger, "handlers", ())}
    if logging.lastResort is not None:
        found[id(logging.lastResort)] = logging.lastResort
    return list(found.values())


@contextmanager
def _dropping(stream: Any) -> Iterator[None]:
    """What keeps the file's `write` as it was (a csv writer does) writes on: another thread's lines could not be told
    from those of the imagined pass."""
    put = [name for name in ("write", "writelines") if _replace(stream, name)]
    try:
        yield
    finally:
        for name in put:
            delattr(stream, name)


def _replace(stream: Any, name: str) -> bool:
    write: Callable[[Any], Any] | None = getattr(stream, name, None)
    if write is None or name in getattr(stream, "__dict__", ()):
        return False

    def write_if_real(content: Any) -> Any:
        if not imagining():
            return write(content)
        return len(content) if name == "write" else None

    with suppress(AttributeError, TypeError):
        setattr(stream, name, write_if_real)
        return True
    return False
