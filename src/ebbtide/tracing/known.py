"""Values that depend on no weight, buffer or input are known under fake tensors, too.

Libraries branch on such values (do these positions start anew somewhere? is this mask all ones?) and do something
else where they cannot look. So small tensors that come from numbers alone are computed for real, and the imagined
pass goes the way of the real one.
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

from ebbtide.tracing.cost import tensors_in
from ebbtide.tracing.meter import StorageMeter, storage_bytes

_aten = torch.ops.aten
_FACTORIES = {_aten.arange, _aten.ones, _aten.zeros, _aten.full, _aten.scalar_tensor, _aten.linspace}
LIMIT = 1 << 20
"""Elements. What is larger is imagined: nothing of a model's size is allocated here."""


class KnownValues(TorchDispatchMode):
    """Entered above a fake mode and its meter."""

    supports_higher_order_operators = True

    def __init__(self, spare: float = math.inf) -> None:
        """`spare`: bytes that they may take together; what goes beyond that is imagined."""
        super().__init__()
        self._spare = spare
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
