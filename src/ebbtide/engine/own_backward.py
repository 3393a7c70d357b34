"""`loss.backward()` in place of `engine.backward(loss)`: the user's code starts it, and outputs of the pass say so.

A hook on each output of a forward pass is called before anything of the pass is reached. There the backward pass begins;
autograd calls back when it is over. Where backward raises it does not: then what was begun is given up by the next call
of the engine's, which finds the callback gone.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from ebbtide.errors import StateError, UnsupportedError
from ebbtide.runtime.gradients.stand_ins import is_led
from ebbtide.runtime.planning.calls import tensors
from ebbtide.runtime.session import Session


class Abandoned(BaseException):
    """What ends a backward pass from outside that raised: nobody else sees it."""


class _Over:
    """What autograd calls at the end of a backward, and drops where that raised."""

    __slots__ = ("__weakref__", "_own")

    def __init__(self, own: OwnBackward) -> None:
        self._own = own

    def __call__(self) -> None:
        self._own.end()


class GoesBack(Protocol):
    """Whose pass it was."""

    def reversing(self, loss: None) -> AbstractContextManager[None]:
        """Around a backward."""

    def accumulating(self) -> bool:
        """Whether the backward that autograd runs now brings gradients."""


class OwnBackward:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: AbstractContextManager[None] | None = None
        self._over: weakref.ref[_Over] | None = None

    def watch(self, found: Any, passes: GoesBack) -> None:
        """A forward pass gave this."""
        reached = _Reached(weakref.ref(self), weakref.ref(passes))
        for node in {tensor.grad_fn for tensor in tensors(found) if tensor.grad_fn is not None}:
            node.register_prehook(reached)

    @property
    def live(self) -> bool:
        """Whether such a backward runs now."""
        return self._open is not None and self._over is not None and self._over() is not None

    def reached(self, passes: GoesBack) -> None:
        """Backward comes to an output."""
        led = is_led()
        if self.live or (led and self._session.interceptor.compiles):
            self._session.recording.reach()
            return
        if led or not passes.accumulating():
            return
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "loss.backward(create_graph=True): a gradient that is to be differentiated again does not go into the "
                "chunks. Take it with torch.autograd.grad(loss, inputs, create_graph=True), add what depends on it to "
                "the loss, and call backward on that. Nothing was changed"
            )
        self.give_up()
        if self._session.interceptor.scopes:
            return
        entered = passes.reversing(None)
        entered.__enter__()
        self._session.recording.reach()
        self._open, over = entered, _Over(self)
        self._over = weakref.ref(over)
        torch.autograd.Variable._execution_engine.queue_callback(over)

    def end(self) -> None:
        entered, self._open, self._over = self._open, None, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def give_up(self) -> None:
        """Ends one that raised. From another thread while it runs it is refused."""
        if self._open is None:
            return
        if self.live:
            if torch._C._current_graph_task_id() >= 0:
                return  # called from within, by a hook
            raise StateError(
                "another thread is in a backward pass of this engine: use it from one thread at a time, or give each an "
                "engine of its own"
            )
        entered, self._open, self._over = self._open, None, None
        abandoned = Abandoned()
        with suppress(Abandoned):
            entered.__exit__(Abandoned, abandoned, None)


class _Reached:
    """The hook; a graph is not to keep an engine."""

    __slots__ = ("_own", "_passes")

    def __init__(self, own: weakref.ref[OwnBackward], passes: weakref.ref[GoesBack]) -> None:
        self._own, self._passes = own, passes

    def __call__(self, *_: Any) -> None:
        own, passes = self._own(), self._passes()
        if own is not None and passes is not None:
            own.reached(passes)
