"""A module in an engine is saved and loaded, by code of others, as if it were whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ebbtide.engine import Engine


@contextmanager
def loading_into(engine: Engine) -> Iterator[None]:
    """What is loaded into the module goes to its engine."""

    def load(state: Mapping[str, torch.Tensor], *_: Any, **__: Any) -> Any:
        return engine.load_state_dict(state, strict=False)

    engine.module.load_state_dict = load  # type: ignore[assignment]
    try:
        yield
    finally:
        del engine.module.load_state_dict


@contextmanager
def answering(module: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The module, or a part of it, that is asked for its state_dict has it from `state`: where one rank alone asks, as
    the one that writes does, no other takes part in gathering it."""
    parts = dict(module.named_modules()) if state else {}

    def answer(start: str, *_: Any, prefix: str = "", **__: Any) -> dict[str, torch.Tensor]:
        return {prefix + key[len(start) :]: value for key, value in state.items() if key.startswith(start)}

    for name, part in parts.items():
        part.state_dict = partial(answer, name and name + ".")
    try:
        yield
    finally:
        for part in parts.values():
            del part.state_dict
