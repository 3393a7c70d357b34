"""What `torch.compile` was asked to compile, other than a block, runs as it is written.

Weights come and go between a module and the next, by hooks in Python; a traced pass is looked at operator by operator.
Neither is what the compiler sees: it gives up where a dispatch mode is on, for good, and takes hooks for computation
elsewhere, so that which parts of a model were compiled hung on what had run first. Blocks are compiled one by one
(`block_calls`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ebbtide.errors import warn_user
from ebbtide.tracing.hooks.block_calls import NAMED, CompiledBlocks


class Uncompiled:
    def __init__(self, module: nn.Module, blocks: CompiledBlocks) -> None:
        self._modules = [
            (name, child) for name, child in module.named_modules() if id(child) not in blocks.inside
        ]
        self._why = blocks.refused
        self._found = False

    def scope(self, look: bool) -> AbstractContextManager[Any]:
        """Around a pass; `look`: whether somebody may have compiled modules since the last one."""
        if look and not self._found and has_compiler():
            self._look()
        return as_written() if self._found else nullcontext()

    def _look(self) -> None:
        names = [name for name, module in self._modules if is_compiled(module)]
        if not names:
            return
        self._found = True
        listed = ", ".join(repr(name) for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        why = (
            self._why
            or "their weights come and go between one module and the next, which compiled code does not show"
        )
        warn_user(
            f"torch.compile: {len(names)} modules ({listed}) run as they are written, not compiled: {why}. Numbers are "
            "those of the model without torch.compile. Compile the model's blocks one by one before "
            'ebbtide.initialize() (block.compile()), or set compile = "blocks"'
        )


def as_written() -> AbstractContextManager[Any]:
    """For an imagined pass always: what the compiler gives up there it would not try again in a real one."""
    return torch.compiler.set_stance("force_eager") if has_compiler() else nullcontext()


def has_compiler() -> bool:
    """It is there as soon as anything is to be compiled, and takes a second to import."""
    return "torch._dynamo" in sys.modules


def is_compiled(module: nn.Module) -> bool:
    compiled = module._compiled_call_impl
    was = getattr(compiled, "was_compiled", compiled)  # the engine's calls of the root are no compiled ones
    return was is not None or hasattr(module.forward, "_torchdynamo_inline")
