"""Calls of the root module begin a pass, as a call of the engine does; calls of other modules outside a pass cannot
train.

torch asks a module for `_compiled_call_impl` before anything else, hooks included. What is put there runs around the
whole call, so a pass that raises ends as any `with` does; torch.compile leaves the function alone. A loss that comes
from a module called by itself is refused when backward reaches it. `generate` of transformers keeps ranks in step where
a module has the mark of torch's FSDP, so the engine's modules have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.devices.real_memory import unreal
from ebbtide.errors import UnsupportedError, warn_user
from ebbtide.tracing.hooks.compiled import has_compiler

MARK = "_is_fsdp_managed_module"


class InStep:
    """What modules that generate are marked with: true while ranks need each other."""

    def __init__(self, module: nn.Module, apart: Callable[[], bool]) -> None:
        """`apart`: whether each rank has all weights now, and so can run alone."""
        self._apart = apart
        self._marked = [child for child in module.modules() if hasattr(child, "generate")]
        for child in self._marked:
            setattr(child, MARK, self)

    def __bool__(self) -> bool:
        return not self._apart()

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()  # a copy of the module is no engine's

    def remove(self) -> None:
        for child in self._marked:
            vars(child).pop(MARK, None)


def refuse_backward(module: nn.Module, output: Any) -> None:
    """`module` gave `output`; its module is not known to be in a pass."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0 or unreal():
        return  # a checkpoint computes again, or nobody can go back
    for tensor in tree_iter(output):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_Refusal(type(module).__name__))


class _Refusal:
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            f"the loss comes from a {self._kind} that was called by itself, outside a pass of the engine's, so its "
            "gradients would be part of no step. Call engine(...) or the module, or run what you call as the pass: "
            "engine.run(function, *args), as in engine.run(model.encode, x)"
        )


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
        warn_user(
            "module.compile(): the engine's module runs as it is written, not compiled: its weights come and go between "
            "one module and the next, which compiled code does not show. Leave the call out to be rid of this warning"
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
