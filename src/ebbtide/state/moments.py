"""Optimizer state from a torch.optim.AdamW or Adam, into the chunks.

All of it is looked at before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ebbtide.errors import ConfigError
from ebbtide.run.session import Session
from ebbtide.state.parts import parts_of

MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
"""The engine's names and torch's."""


def by_name(
    session: Session, groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The state of each parameter that has some. `saved`: what torch's `state_dict()` gave."""
    theirs = saved["param_groups"]
    if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in groups]:
        raise ConfigError(
            f"optimizer state: it is of groups of {[len(group['params']) for group in theirs]} parameters, the engine's "
            f"are of {[len(group['params']) for group in groups]}: pass the same param_groups to initialize()"
        )
    names = {id(parameter): name for name, parameter in session.module.named_parameters()}
    found = {}
    for group, own in zip(theirs, groups, strict=True):
        for number, parameter in zip(group["params"], own["params"], strict=True):
            if number in saved["state"]:
                found[names[id(parameter)]] = saved["state"][number]
                _require(names[id(parameter)], tuple(parameter.shape), saved["state"][number])
    return found


def _require(name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> None:
    theirs = tuple(MOMENTS.values())
    if set(state) != {"step", *theirs}:
        raise ConfigError(
            f"optimizer state of {name!r}: expected step, {' and '.join(theirs)}, as torch's AdamW and Adam have them, "
            f"found {', '.join(sorted(state)) or 'nothing'}"
        )
    for kind in theirs:
        if tuple(state[kind].shape) != shape:
            raise ConfigError(
                f"optimizer state of {name!r}: expected {kind} of shape {shape}, found {tuple(state[kind].shape)}"
            )


def take(session: Session, found: Mapping[str, Mapping[str, Any]]) -> int:
    """Into the chunks, zeros where there is none; returns the number of steps."""
    for part in parts_of(session, everything=True):
        kind, _, name = part.key.partition("/")
        if kind not in MOMENTS:
            continue
        value = found[name][MOMENTS[kind]] if name in found else torch.zeros(part.shape)
        laid = torch.empty_strided(part.shape, part.stride, dtype=part.dtype)
        laid.copy_(value)
        part.store(0, laid.as_strided((part.numel,), (1,)))
    steps = {name: int(state["step"]) for name, state in found.items()}
    session.updates.steps.counts[:] = [steps.get(name, 0) for name in session.data.names]
    session.unmanaged.steps.update({name: steps.get(name, 0) for name in session.unmanaged.steps})
    return max(steps.values(), default=0)
