"""What all that an engine can do is done with: the session, and whether it may be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.engine.own_backward import OwnBackward
from ebbtide.engine.tracebacks import trim
from ebbtide.errors import EbbtideError, StateError
from ebbtide.runtime.distributed.model_parallel import ModelParallel
from ebbtide.runtime.session import Session
from ebbtide.tracing.hooks.compiled import has_compiler

Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Refused to who comes while another thread is inside. A training loop that is compiled compiles nothing of it."""
    left_alone: list[Any] = []

    @wraps(method)
    def called(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        if not left_alone and has_compiler():
            left_alone.append(torch.compiler.disable(method))
        try:
            with self._alone():
                return (left_alone[0] if left_alone else method)(self, *args, **kwargs)
        except EbbtideError as error:
            raise trim(error)  # noqa: B904  (the same error)

    return called  # type: ignore[return-value]


class EngineCore:
    config: Config
    module: nn.Module
    steps: int
    _session: Session
    _closed: bool
    _process: int
    """The one that has the engine's threads; a forked child of it does not."""
    _turn: Any
    """A lock of the thread that is inside."""
    _broken: str
    """Why some parameters are updated and others are not, until all of them are written."""
    _losses: list[torch.Tensor]
    """Of this step, so far."""
    _own_backward: OwnBackward
    _clip_once: float | None

    def _open(self) -> Session:
        """The session, for reading and writing values."""
        if self._closed:
            raise StateError("the engine is closed; initialize() another one")
        if os.getpid() != self._process:
            raise StateError(
                f"the engine was made by process {self._process} and is used by {os.getpid()}, a forked child, which "
                "has none of its threads; give the child the values that it needs, or a module and an engine of its own"
            )
        with self._alone():
            self._own_backward.give_up()
            return self._session

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise StateError(
                "another thread is in a forward pass, a backward pass or a step of this engine, and passes of two would "
                "mix their gradients: use it from one thread at a time, or give each an engine of its own"
            )
        try:
            yield
        finally:
            self._turn.release()

    @property
    def _companions(self) -> ModelParallel | None:
        """Those that have the rest of the model."""
        return self._session.companions

    def _check(self) -> None:
        broken = self._broken or self._open().queue.failed
        if broken:
            raise StateError(
                f"the engine is partially stepped: {broken}. Load a checkpoint, or weights with load_state_dict()"
            )

    def _clear(self) -> None:
        """Drops gradients that were held, and what was counted for this step."""
        self._session.drop_gradients()
        self._session.unmanaged.discard()
        self._losses, self._clip_once = [], None

    def _notice_dropped(self) -> None:
        """Gradients that the user's code has set to None are dropped."""
        if self._session.notice_dropped():
            self._losses, self._clip_once = [], None

    def _zero_grad(self) -> None:
        """What the user's zero_grad does."""
        self._own_backward.give_up()
        if self.config.updates == "in-backward" and self._session.micro:
            raise StateError(
                'zero_grad: updates = "in-backward" has applied the gradients of this backward already; call '
                'engine.step(), or use updates = "exact" to drop what a batch brought'
            )
        self._clear()

    def _end_pending(self) -> None:
        """Before all weights are written. What an engine that is broken has pending may never be done: it goes."""
        self._session.queue.drop()
        if self._broken and self._session.lock_free is not None:
            self._session.lock_free.give_up()

    def _mend(self) -> None:
        """All weights were written: what was half-done is gone."""
        self._broken = ""
        self._session.queue.mend()
        self._session.data.changed(range(len(self._session.data.names)))
