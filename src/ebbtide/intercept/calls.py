"""Calls of the root module: whoever calls it begins a pass, as a call of the engine does.

torch asks a module for `_compiled_call_impl` before anything else, hooks included. What is put there runs around the
whole call, so a pass that raises ends as any `with` does; and torch.compile, which would trace through hooks, finds a
function that it has to leave alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ebbtide.backend.real import unreal
from ebbtide.errors import UnsupportedError
from ebbtide.intercept.compiled import has_compiler


class RootCalls:
    def __init__(self, module: nn.Module, begin: Callable[..., Any], under_way: Callable[[], bool]) -> None:
        """`begin` runs a call of the module as a pass, and calls it again within; `under_way`: whether a pass is."""
        self._module, self._begin, self._under_way = module, begin, under_way
        self.was_compiled: Any = module._compiled_call_impl
        """By `module.compile()`, before."""
        self._disabled: Any = None
        module._compiled_call_impl = self
        module.compile = self._refuse_compiling  # type: ignore[method-assign]
        module._replicate_for_data_parallel = self._refuse_replicas  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._under_way() or unreal() or torch._C._get_tracing_state() is not None:
            return self._module._call_impl(*args, **kwargs)
        if self._disabled is None and has_compiler():
            self._disabled = torch.compiler.disable(self._begin)
        return (self._disabled or self._begin)(*args, **kwargs)

    def _refuse_compiling(self, *_: Any, **__: Any) -> None:
        warnings.warn(
            "module.compile(): the engine's module runs as it is written, not compiled: its weights come and go between "
            "one module and the next, which compiled code does not show. Leave the call out to be rid of this warning",
            stacklevel=2,
        )

    def _refuse_replicas(self) -> NoReturn:
        raise UnsupportedError(
            "DataParallel copies a module to several GPUs, and the engine's module has its weights in chunks. Start one "
            "process for each GPU with torchrun: ebbtide.initialize() then shares the model among them"
        )

    def remove(self) -> None:
        names = vars(self._module)
        for name in ("_compiled_call_impl", "compile", "_replicate_for_data_parallel"):
            names.pop(name, None)
        if self.was_compiled is not None:
            self._module._compiled_call_impl = self.was_compiled
