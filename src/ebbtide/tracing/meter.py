"""Exact live bytes of non-model data: a dispatch mode that follows storages, or the allocator's counters.

On the CPU every operator's outputs are seen as they are made and a weak reference says when their storage dies; on CUDA
the allocator keeps the peak, and the meter is told when chunks come and go so that a prefetch is no activation.

Note [by node]: in a backward that the user's code started, autograd runs every node under the thread-local state of its
caller, and a dispatch mode that is pushed while one node runs is gone with it. So the mode is pushed before each node
and popped after it. Nodes of compiled code run without it (`tracing.hooks.block_calls`), in every backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.errors import UnsupportedError
from ebbtide.memory.dtensors import kind_of_parts, part_of
from ebbtide.planner.record import Work
from ebbtide.tracing.device_rules import Rules
from ebbtide.tracing.hooks.gradient_sums import carried_out
from ebbtide.tracing.operator_cost import tensors_in, work_of
from ebbtide.tracing.symbolic.corrections import as_laid_out, with_workspace
from ebbtide.units import round_up

LEAF = "torch::autograd::AccumulateGrad"
COMPILED = "CompiledFunctionBackward"


class ByNode:
    def __init__(self) -> None:
        self._mode: TorchDispatchMode | None = None
        self._note: Callable[[Any], None] = lambda gradients: None
        self._seen: set[Any] = set()
        self._handles: list[Any] = []

    @contextmanager
    def around(self, mode: TorchDispatchMode, note: Callable[[Any], None]) -> Iterator[None]:
        """A backward: `mode` is around each node that `reach` has come to; `note` is told of what nodes are given."""
        self._mode, self._note = mode, note
        try:
            yield
        finally:
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()
            self._mode = None
            self._seen = set()

    def reach(self) -> None:
        """A node is about to run: it has the mode, and so has what is behind it, but for leaves, which stay."""
        running = torch._C._current_autograd_node()
        if self._mode is None or running is None or running in self._seen:
            return
        self._seen.add(running)
        todo = [running]
        while todo:
            following = {node for node, _ in todo.pop().next_functions if node is not None} - self._seen
            self._seen |= following
            todo += following
            for node in following:
                if node.name() not in (LEAF, COMPILED):
                    self._handles += [node.register_prehook(self._before), node.register_hook(self._after)]
        if running.name() != COMPILED:
            torch._C._push_on_torch_dispatch_stack(self._mode)  # it ends with the node

    def _before(self, gradients: Any) -> None:
        assert self._mode is not None
        torch._C._push_on_torch_dispatch_stack(self._mode)
        self._note(gradients)

    def _after(self, *_: Any) -> None:
        torch._C._pop_torch_dispatch_stack(None)


_DEVICE = torch.ops.prim.device.default


class Meter(Protocol):
    sees_blocks: bool
    """Whether what compiled code takes is seen, too."""

    def note(self, values: Any) -> None:
        """Tensors that were not made where they would be seen."""

    def take_peak(self) -> int:
        """The most bytes alive since the last call."""

    def alive(self) -> int: ...

    def take_work(self) -> tuple[Work, ...]:
        """What operators did since the last call, where they are seen."""


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of every storage made under it, but for those that `ignore` claims (by address of
    the storage object)."""

    supports_higher_order_operators = True
    """To refuse them by name."""
    sees_blocks = False

    def __init__(
        self, ignore: Callable[[int], bool], device: torch.device | None = None, rules: Rules | None = None
    ) -> None:
        """`rules`: those of another device that is to be foretold."""
        super().__init__()
        self._rules = rules
        self._ignore = ignore
        self._device = device
        self._refs: dict[int, Any] = {}
        self._alive = 0
        self._peak = 0
        self._work: list[Work] = []
        self._known: dict[Work, Work] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and (kind := kind_of_parts()) is not None and any(issubclass(one, kind) for one in types):
            return NotImplemented  # what it does with the parts is seen
        if func is _DEVICE:  # asked for at every turn
            return getattr(args[0], "fake_device", None) or func(*args)
        if isinstance(func, HigherOrderOperator):
            raise UnsupportedError(
                f"{func.name()} in a pass that is looked at operator by operator: torch compiles what it calls, and "
                "cannot there; uncompiled, weights that are read inside would get no gradients. Write it with Python's "
                "own `if` and `for` (the engine follows where they lead), or with torch.where"
            )
        out = carried_out(func, args, kwargs or {})
        out = as_laid_out(func, args, with_workspace(func, args, out))
        if self._device is not None and isinstance(out, torch.Tensor) and out.is_meta:
            return out  # somebody only asks what shape it would have
        work = work_of(func, args, kwargs or {}, out)
        if work is not None:
            self._work.append(self._known.setdefault(work, work))
        if isinstance(out, torch.Tensor):
            self._note(out)
        elif out is not None:
            self.note(out)
        if self._rules is not None and func._overloadpacket in self._rules.temporaries:
            extra = self._rules.temporaries[func._overloadpacket](*args, **(kwargs or {}))
            self._peak = max(self._peak, self._alive + extra)
        return out

    def note(self, values: Any) -> None:
        """Counts tensors that were not made under the mode: a batch, say."""
        for value in tensors_in(values):
            self._note(value)

    @property
    def holds(self) -> bool:
        """Whether any storage that was made under it is still alive."""
        return bool(self._refs)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._refs

    def disown(self, storage: int) -> None:
        """The storage has become model data."""
        found = self._refs.pop(storage, None)
        known = found() if found is not None else None
        if known is not None:
            self._alive -= known.nbytes()

    def _note(self, tensor: torch.Tensor) -> None:
        tensor = part_of(tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse and other tensors without one storage
        key = storage._cdata
        if key in self._refs or self._ignore(key):
            return
        if self._device is not None and tensor.device != self._device:
            return
        count = storage.nbytes()
        if self._rules is not None:
            count = round_up(count, self._rules.granule)
        self._refs[key] = weakref.ref(storage, partial(self._died, key, count))
        self._alive += count
        self._peak = max(self._peak, self._alive)

    def _died(self, key: int, count: int, _: Any) -> None:
        if self._refs.pop(key, None) is not None:
            self._alive -= count

    def take_peak(self) -> int:
        peak, self._peak = self._peak, self._alive
        return peak

    def alive(self) -> int:
        return self._alive

    def take_work(self) -> tuple[Work, ...]:
        work, self._work = tuple(self._work), []
        return work


class AllocatorMeter:
    """CUDA: what the caching allocator counts, less our chunks and what lies beside the budget."""

    sees_blocks = True

    def __init__(self, device: torch.device, ours: Callable[[], int], beside: int = 0) -> None:
        self._device = device
        self._ours = ours
        self._beside = beside
        self._peak = 0
        torch.cuda.reset_peak_memory_stats(device)

    def split(self) -> None:
        """Called before chunk bytes change: what was seen so far is taken with the old chunk bytes."""
        most = torch.cuda.max_memory_allocated(self._device) - self._ours() - self._beside
        self._peak = max(self._peak, most)

    def restart(self) -> None:
        """Called after chunk bytes have changed."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def take_peak(self) -> int:
        self.split()
        self.restart()
        peak, self._peak = self._peak, 0
        return peak

    def alive(self) -> int:
        # Less than nothing where somebody has given up what lay beside the budget.
        return max(0, torch.cuda.memory_allocated(self._device) - self._ours() - self._beside)

    def take_work(self) -> tuple[Work, ...]:
        return ()

    def note(self, values: Any) -> None:
        """The allocator has counted them."""


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())
