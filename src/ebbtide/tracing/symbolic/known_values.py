"""Values that depend on no weight, buffer or input are known under fake tensors, too.

Libraries branch on such values (do these positions start anew somewhere? is this mask all ones?) and do something
else where they cannot look. So small tensors that come from numbers alone are computed for real, and the imagined
pass goes the way of the real one.

Operators on real tensors alone run for real under a fake mode. What they write that was there before the pass (a counter
of batches that a module reached past its attributes) is undone after it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.tracing.meter import StorageMeter, storage_bytes
from ebbtide.tracing.operator_cost import tensors_in

_aten = torch.ops.aten
_FACTORIES = {_aten.arange, _aten.ones, _aten.zeros, _aten.full, _aten.scalar_tensor, _aten.linspace}
LIMIT = 1 << 20
"""Elements. What is larger is imagined: nothing of a model's size is allocated here."""


class KnownValues(TorchDispatchMode):
    """Entered above a fake mode and its meter."""

    supports_higher_order_operators = True

    def __init__(self, spare: float = math.inf, look: bool = True) -> None:
        """`spare`: bytes that they may take together; what goes beyond that is imagined. Without `look` nothing is
        computed for real that the fake mode would not."""
        super().__init__()
        self._spare, self._look = spare, look
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By storage: its bytes, and what they were before the pass."""
        self._held = StorageMeter(lambda storage: False)
        self.count = 0
        """Operators that ran for real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or (args and isinstance(args[0], FakeTensor)):
            return func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        known = not any(isinstance(value, FakeTensor) for value in given)
        if not known or not (given or func._overloadpacket in _FACTORIES):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._keep(func, args, kwargs)
        if not self._look:
            return func(*args, **kwargs)
        # Views and writes in place take no memory, and a write must not happen twice.
        if not (func.is_view or func._schema.is_mutable):
            try:
                imagined = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                pass  # it is the values that are asked for
            else:
                made = list(tensors_in(imagined))
                if sum(value.numel() for value in made) > LIMIT:
                    return imagined
                if self._held.alive() + storage_bytes(made) > self._spare:
                    return imagined
        self.count += 1
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
            self._held.note(out)
            return out

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """What this writes that the pass has not made is put back after it."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name)):
                storage = written.untyped_storage()
                if storage._cdata in self._before or self._held.knows(storage):
                    continue
                if storage.nbytes() > self._spare:
                    raise MemoryError(f"{func} writes {storage.nbytes()} bytes that nothing could put back")
                with unset_fake_temporarily():
                    content = torch.empty(0, dtype=torch.uint8, device=written.device).set_(storage)
                    self._before[storage._cdata] = content, content.clone()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        with unset_fake_temporarily():
            for content, before in self._before.values():
                content.copy_(before)
        self._before.clear()
