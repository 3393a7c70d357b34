"""What an imagined pass prints, logs or writes to a file is dropped, and what it draws at random is drawn again.

Streams and handlers are muted for the imagined pass alone; other threads go on writing through them.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty, Queue
from typing import Any

import torch

from ebbtide.tracing.symbolic.escapes import imagining


@contextmanager
def undrawn() -> Iterator[None]:
    """By the generators that torch, Python, and NumPy where that is in use, have for all. `unchanged` does the same for
    generators of the user's own."""
    numpy = sys.modules.get("numpy.random")
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    put_back: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        put_back.append(partial(numpy.set_state, numpy.get_state(legacy=False)))
    try:
        with torch.random.fork_rng(devices=list(cards)):
            yield
    finally:
        for again in put_back:
            again()


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
def aside(queues: Iterable[Queue[Any]], bars: Iterable[Any]) -> Iterator[None]:
    """The imagined pass puts into copies of queues and takes from them; other threads go on with the queues. A progress
    bar, which keeps its stream's `write`, is switched off: its attributes are put back."""
    put = [(queue, name) for queue in queues for name in _divert(queue)]
    try:
        for bar in bars:
            bar.disable = True
        yield
    finally:
        for queue, name in put:
            vars(queue).pop(name, None)


def _divert(queue: Queue[Any]) -> list[str]:
    with queue.mutex:
        content = list(queue.queue)

    def take(*_: Any, **__: Any) -> Any:
        if not content:
            raise Empty
        return content.pop(0)

    instead: dict[str, Callable[..., Any]] = {
        "put": lambda item, *_, **__: content.append(item),
        "get": take,
        "task_done": lambda: None,
        "join": lambda: None,
    }
    found = [name for name in instead if name not in vars(queue)]
    for name in found:
        setattr(queue, name, _if_imagining(instead[name], getattr(queue, name)))
    return found


def _if_imagining(instead: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (instead if imagining() else real)(*args, **kwargs)


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
