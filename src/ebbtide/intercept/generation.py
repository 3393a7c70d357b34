"""`generate` of transformers' models on several ranks.

Ranks that share chunks go through the same passes, and their texts end at different lengths. transformers lets a rank
that has finished go on until all have where a module has the mark that torch's FSDP gives: so do the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

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
