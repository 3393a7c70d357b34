"""Copies of a managed module that are ordinary modules: what an average, a reference or a teacher begins with.

While all parameters are in place `copy.deepcopy` gives a module with their values, in the dtype that is computed in, and
with none of the engine's hooks. At any other time it is refused, for the values are not all in one place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ebbtide.tracing.hooks.tables import refuse_copy

OURS = (
    "_apply",
    "zero_grad",
    "_compiled_call_impl",
    "compile",
    "_replicate_for_data_parallel",
    "__deepcopy__",
)
"""Attributes of a managed module that the engine has put there."""


class PlainCopy:
    """In place of a managed module's `__deepcopy__`."""

    def __init__(self, module: nn.Module, in_place: Callable[[], bool]) -> None:
        """`in_place`: whether all parameters are, and stay."""
        self._module, self._in_place = module, in_place
        module.__deepcopy__ = self  # type: ignore[assignment]

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        if not self._in_place():
            refuse_copy()
        module = self._module
        made: nn.Module = module.__class__.__new__(module.__class__)
        memo[id(module)] = made
        state = module.__getstate__()
        made.__setstate__(
            {
                name: copy.deepcopy(_without_ours(name, value), memo)
                for name, value in state.items()
                if name not in OURS
            }
        )
        return made

    def remove(self) -> None:
        vars(self._module).pop("__deepcopy__", None)


def _without_ours(name: str, value: Any) -> Any:
    if name in ("_parameters", "_modules"):
        return dict(value.items())
    if isinstance(value, dict) and "hooks" in name:
        kept = {key: hook for key, hook in value.items() if not _is_ours(hook)}
        return type(value)(kept)
    return value


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "hook", hook)  # as state_dict hooks are wrapped
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "ebbtide"
