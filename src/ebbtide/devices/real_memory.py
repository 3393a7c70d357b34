"""Real memory, whatever the user's code runs under.

Under torch.func's transforms and FakeTensorMode new tensors are no memory, and operators do nothing or something else.
A pass of the user's may run so, to estimate or to differentiate; chunks that move for it are real all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

Method = TypeVar("Method", bound=Callable[..., Any])
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def unreal() -> bool:
    """Whether new tensors are no memory here, or operators something else."""
    return (
        torch._C._get_dispatch_mode(_FAKE) is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@contextmanager
def real() -> Iterator[None]:
    """Operators are what they are. Other modes, that count or measure, stay."""
    if not unreal():
        yield
        return
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def on_real_memory(method: Method) -> Method:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not unreal():
            return method(*args, **kwargs)
        with real():
            return method(*args, **kwargs)

    return called  # type: ignore[return-value]
