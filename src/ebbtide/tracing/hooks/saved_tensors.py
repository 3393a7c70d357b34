"""Saved-tensor hooks: backward gets a weight from where its chunk now lives, not from where it was.

Note [pairs inside checkpoints]: torch's non-reentrant checkpoint installs a pair of its own around the
region and counts what passes through it. A pair of ours outside would never see the recomputed tensors, and
they would hold weights in place until they are used. So a pair is pushed at each module that owns
parameters, inside whatever is there, and hands what is not ours to that outer pair. It takes the same
tensors in the first run and in the recomputation, so the outer pair's count stays right, as long as it is pushed
in both or in neither (`beside_others`). A checkpoint is handed something empty for each weight, and asked for it
again: a region that saves nothing but weights is run twice, too, with whatever else it does.

Note [regions left by an exception]: before torch 2.13 such a region is a generator that waits at its end. Where forward
raises in it, its pair stays pushed until the collector finds the generator, and what is below stays for ever: for every
pass of the process that follows, another engine's, too. So these are ended with the pass (`end_regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import isgenerator
from traceback import walk_tb
from typing import Any

import torch
import torch.utils.checkpoint

from ebbtide.tracing.hooks.observer import Observer, SavedTensor

_top = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks

_CHECKPOINT = torch.utils.checkpoint.__name__
_REGIONS = torch.utils.checkpoint.__file__
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Delegated:
    """What an outer pair packed, with its way back."""

    __slots__ = ("unpack", "value")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], value: Any) -> None:
        self.unpack = unpack
        self.value = value


class _InRegion:
    """A weight that is saved in a checkpointed region, and what its recomputation goes by."""

    __slots__ = ("handle", "region")

    def __init__(self, handle: Any, region: _Delegated) -> None:
        self.handle = handle
        self.region = region


class _Pair:
    __slots__ = ("in_region", "observer_of", "outer")

    def __init__(self, observer_of: Callable[[], Observer], outer: Hooks | None) -> None:
        self.observer_of = observer_of
        self.outer = outer
        self.in_region = outer is not None and getattr(outer[0], "__module__", "") == _CHECKPOINT

    def pack(self, tensor: torch.Tensor) -> Any:
        handle = self.observer_of().pack(tensor)
        if handle is not None:
            return _InRegion(handle, self._delegate(tensor.new_empty(0))) if self.in_region else handle
        if self.outer is None:
            return self.observer_of().keep(tensor) or SavedTensor(tensor)
        return self._delegate(tensor)

    def _delegate(self, tensor: torch.Tensor) -> _Delegated:
        assert self.outer is not None
        return _Delegated(self.outer[1], self.outer[0](tensor))

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedTensor):
            return packed.get()
        if type(packed) is _Delegated:
            return packed.unpack(packed.value)
        if type(packed) is _InRegion:
            packed.region.unpack(packed.region.value)
            packed = packed.handle
        return self.observer_of().unpack(packed)


class SavedTensors:
    """Pushes and pops pairs; `push` says whether there is something to pop."""

    def __init__(self, observer_of: Callable[[], Observer]) -> None:
        self._observer_of = observer_of
        self._alone = _Pair(observer_of, None)
        self.beside_others = False
        """Whether a pair was ever pushed inside somebody else's."""

    def push(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        outer = _top(False)
        if outer is None:
            pair = self._alone
        elif _ours(outer) is not None:
            return False
        else:
            pair = _Pair(self._observer_of, outer)
            self.beside_others = True
        _push(pair.pack, pair.unpack)
        return True

    def pop(self) -> None:
        _pop()

    def top(self) -> _Pair | None:
        """Ours, where it is the innermost of all."""
        return _ours(_top(False))

    def pop_to(self, pair: _Pair | None) -> None:
        """Until it is on top again, or one of somebody else's."""
        while self.top() not in (None, pair):
            _pop()


def _ours(hooks: Hooks | None) -> _Pair | None:
    pair = None if hooks is None else getattr(hooks[0], "__self__", None)
    return pair if isinstance(pair, _Pair) else None


@contextmanager
def no_saved_hooks() -> Iterator[None]:
    """Nobody is told of what is saved meanwhile: a checkpoint of the user's counts what passes through its hooks."""
    taken: list[Hooks] = []
    while (top := _top(False)) is not None:
        taken.append(top)
        _pop()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            _push(pack, unpack)


def innermost() -> Hooks | None:
    """What is told first of a tensor that is saved."""
    return _top(False)


def others_save() -> bool:
    """Whether that is somebody else."""
    top = _top(False)
    return top is not None and _ours(top) is None


def end_regions(error: BaseException | None) -> None:
    """Those that an exception has left, or the one that it was made of: the innermost first."""
    if error is None:
        return
    end_regions(error.__cause__ or error.__context__)
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_filename == _REGIONS]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isgenerator(value):
                with suppress(Exception):  # it is the first error that is told
                    value.close()
