"""Compiled blocks: a call of one is compiled code, and one unit to the observer.

The compiler sees no hooks and no tables of ours inside a block: they would break its graph. So the unit begins before
the compiled code does and ends after it, in what torch asks a module for before anything else, hooks included
(`_compiled_call_impl`). In an imagined pass, and under transforms of torch.func, the block runs as it is written.

torch.compile gives up where a dispatch mode is on, for good. So modes are off while compiled code runs, and those that
count tensors are told what it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ebbtide.devices.real_memory import unreal
from ebbtide.errors import warn_user

NAMED = 4
"""Modules that a warning lists."""


@runtime_checkable
class SeesBlocks(Protocol):
    """A dispatch mode that counts tensors, and does not see those that compiled code makes."""

    def note(self, values: Any) -> None:
        """A block has given this."""


@dataclass(frozen=True)
class CompiledBlock:
    """A module that runs compiled."""

    name: str
    module: nn.Module
    compiled: Callable[..., Any] | None
    """What is called in its place; None where the call of the module itself is (`torch.compile(module)`)."""


class CompiledBlocks:
    """Those of a model, and whether they can be compiled at all."""

    def __init__(self, blocks: Sequence[CompiledBlock], refused: str = "") -> None:
        """`refused`: why what the user compiled cannot be blocks."""
        self.all, self.refused = list(blocks), refused
        self.inside = {id(child) for block in self.all for child in block.module.modules()}
        """By identity: modules that have no hook or table of ours."""
        self.failed = False
        """Whether the compiler could not do one, so that all run as they are written."""
        self._modules = [child for block in self.all for child in block.module.modules()]
        self._kept = self._found()

    @property
    def changed(self) -> bool:
        """Whether some module inside has had a parameter or a child put in or taken out."""
        return self._found() != self._kept

    def _found(self) -> list[tuple[int, ...]]:
        return [(*map(id, c._parameters.values()), *map(id, c._modules.values())) for c in self._modules]

    def looked_at(self) -> None:
        """What is inside now counts."""
        self._kept = self._found()

    @property
    def tables(self) -> list[dict[str, nn.Parameter | None]]:
        """In which parameters are inside."""
        return [child._parameters for child in self._modules]

    def give_up(self, block: CompiledBlock, error: Exception) -> None:
        self.failed = True
        cause = getattr(error, "inner_exception", error)
        line = f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}"
        warn_user(
            f"torch.compile cannot compile {block.name!r}, a {type(block.module).__name__}: {line}. All blocks run as "
            "they are written from now on, under the same budget, and take more time. Leave torch.compile (or "
            'compile = "blocks") out to be rid of this warning'
        )


class BlockCall:
    """In place of a block's `_compiled_call_impl`."""

    def __init__(self, block: CompiledBlock, blocks: CompiledBlocks, around: Callable[..., Any]) -> None:
        """`around` runs a function with the block's chunks there."""
        self._block, self._blocks, self._around = block, blocks, around
        self._call = block.compiled
        self._names = vars(block.module)
        self.was: Any = self._names.get("_compiled_call_impl")
        self._names["_compiled_call_impl"] = self

    def stay(self) -> None:
        """A pass begins: a block that the user has compiled anew since the last one stays a unit."""
        found = self._names.get("_compiled_call_impl")
        if found is not self:
            self._call = self.was = found
            self._names["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module = self._block.module
        if unreal():
            return module._call_impl(*args, **kwargs)
        watching = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, SeesBlocks)]
        with self._without_modes():
            found = self._compiled(args, kwargs)
        for mode in watching:
            mode.note(found)
        return found

    @staticmethod
    def _without_modes() -> AbstractContextManager[Any]:
        return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self._block
        if self._blocks.failed:
            return self._as_written(args, kwargs)
        try:
            return (self._call or block.module._call_impl)(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failed = error
        found = self._as_written(args, kwargs)  # where the model itself is wrong, it says so
        self._blocks.give_up(block, failed)
        return found

    def _as_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return self._block.module._call_impl(*args, **kwargs)

    def remove(self) -> None:
        self._names.pop("_compiled_call_impl", None)
        if self.was is not None:
            self._names["_compiled_call_impl"] = self.was
