"""What a run needs beside its values to go on as if it had never stopped: optimizer settings, step counts, the loss
scale, random numbers, traces; and moments that come from an optimizer of torch's. All of it is checked before
anything changes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.checkpoint import values
from ebbtide.checkpoint.tensor_parts import parts_of
from ebbtide.errors import ConfigError
from ebbtide.kernels import Rule
from ebbtide.planner.record import Record
from ebbtide.runtime.session import Session
from ebbtide.runtime.updates.loss_scale import LossScaler
from ebbtide.update_rules import UPDATE_RULES, RuleFacts


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
                rule = session.config.optimizer.rule
                _require(rule, names[id(parameter)], tuple(parameter.shape), saved["state"][number])
    return found


def _require(rule: RuleFacts, name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> None:
    theirs = tuple(rule.states.values())
    expected = (*(("step",) if rule.steps_in_state else ()), *theirs)
    if set(state) != set(expected):
        raise ConfigError(
            f"optimizer state of {name!r}: expected {' and '.join(expected)}, as torch's {rule.torch} has them, "
            f"found {', '.join(sorted(state)) or 'nothing'}"
        )
    for kind in theirs:
        if tuple(state[kind].shape) != shape:
            raise ConfigError(
                f"optimizer state of {name!r}: expected {kind} of shape {shape}, found {tuple(state[kind].shape)}"
            )


def take(session: Session, found: Mapping[str, Mapping[str, Any]]) -> int:
    """Into the chunks, zeros where there is none; returns the number of steps."""
    states = session.config.optimizer.rule.states
    for part in parts_of(session, everything=True):
        kind, _, name = part.key.partition("/")
        if kind not in states:
            continue
        value = found[name][states[kind]] if name in found else torch.zeros(part.shape, device="cpu")
        laid = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="cpu")
        laid.copy_(value)
        part.store(0, laid.as_strided((part.numel,), (1,)))
    steps = {name: int(state.get("step", 0)) for name, state in found.items()}
    session.updates.param_groups.counts[:] = [steps.get(name, 0) for name in session.data.names]
    session.unmanaged.steps.update({name: steps.get(name, 0) for name in session.unmanaged.steps})
    return max(steps.values(), default=0)


Groups = Sequence[dict[str, Any]]


def facts_of(session: Session, groups: Groups, scaler: LossScaler | None, steps: int) -> dict[str, Any]:
    """As JSON takes it."""
    values.names(session)  # or there is something that would not be saved
    updates, data, ranks = session.updates, session.data, session.ranks
    apart = session.lock_free is not None and ranks is not None
    return {
        "steps": steps,
        "rule": updates.rule.name,
        "rank_counts": ranks.objects(list(updates.param_groups.counts))
        if apart and ranks is not None
        else None,
        "counts": dict(zip(data.names, updates.param_groups.counts, strict=True)) | session.unmanaged.steps,
        "groups": [_group(session, group) for group in groups],
        "scaler": None if scaler is None else scaler.state_dict(),
        "device": session.backend.kind,
        "managed": session.data.names,
        "traces": [record.plain() for record in session.traces.records()],
        "passes": passes_of(session),
    }


def passes_of(session: Session) -> str:
    """What a pass is made of: a trace is of no use where that is another, as when blocks are compiled from now on."""
    loss = "in pieces" if session.config.loss == "pieces" else "whole"
    return f"{len(session.parts.units)} units, {len(session.data.runs)} runs, loss {loss}"


def _group(session: Session, group: Mapping[str, Any]) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in session.module.named_parameters()}
    settings = {
        key: value.item() if hasattr(value, "item") else value  # a tensor's or numpy's number
        for key, value in group.items()
        if key != "params"
    }
    return {"params": [names[id(parameter)] for parameter in group["params"]], "settings": settings}


def check(session: Session, groups: Groups, facts: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose optimizer had another rule or other groups."""
    values.names(session)  # or the groups have parameters without a name
    unknown = [
        name for name in (*session.data.names, *session.unmanaged.steps) if name not in facts["counts"]
    ]
    if unknown:
        raise ConfigError(
            f"load: the checkpoint does not say how often {unknown[0]!r} was updated; load another"
        )
    found, expected = facts["groups"], [_group(session, group) for group in groups]
    if len(found) != len(expected):
        raise ConfigError(
            f"load: the checkpoint has {len(found)} param_groups, expected {len(expected)}; pass the same to "
            "initialize()"
        )
    other = _other_rule(session.updates.rule, facts)
    if other:
        raise ConfigError(
            f"load: the checkpoint is of another update rule: {other}. Set optimizer.name as it was, or take the "
            "weights alone: engine.load_weights(folder)"
        )
    for place, (saved, own) in enumerate(zip(found, expected, strict=True)):
        odd = sorted(set(saved["params"]) ^ set(own["params"]))
        if odd:
            where = "the checkpoint" if odd[0] in saved["params"] else "the engine"
            raise ConfigError(
                f"load: param_groups[{place}]: {odd[0]!r} is in {where} only; pass the same groups to initialize()"
            )


def _other_rule(rule: Rule, facts: Mapping[str, Any]) -> str:
    """What tells that the checkpoint is of another one; an older checkpoint does not name its rule."""
    name = facts.get("rule", rule.name)
    missing = [key for key in rule.settings for saved in facts["groups"] if key not in saved["settings"]]
    kinds = {key.partition("/")[0] for key in facts["tensors"]} - set(rule.states)
    odd = sorted(kinds & {kind for known in UPDATE_RULES.values() for kind in known.states})
    if name != rule.name:
        return f"it was made with optimizer.name = {name!r}, the engine has {rule.name!r}"
    if missing:
        return f"it has no {missing[0]!r}, which {rule.name} reads"
    return f"it has {odd[0]}, which {rule.name} does not know" if odd else ""


def restore(session: Session, groups: Groups, scaler: LossScaler | None, facts: Mapping[str, Any]) -> int:
    """Takes the facts over, and returns the number of steps."""
    counts = facts["counts"]
    session.updates.param_groups.counts[:] = _counts_of(session, facts)
    session.unmanaged.steps.update({name: counts[name] for name in session.unmanaged.steps})
    for group, saved in zip(groups, facts["groups"], strict=True):
        for key, value in saved["settings"].items():
            group[key] = tuple(value) if isinstance(value, list) else value
    if scaler is not None and facts["scaler"] is not None:
        scaler.load_state_dict(facts["scaler"])
    alike = facts.get("passes", None if session.interceptor.compiles else passes_of(session)) == passes_of(
        session
    )
    if alike and facts["device"] == session.backend.kind and facts["managed"] == session.data.names:
        for record in map(Record.from_plain, facts["traces"]):
            if all(access.run < len(session.data.runs) for access in record.accesses):
                session.traces.recall(record)
    return int(facts["steps"])


def _counts_of(session: Session, facts: Mapping[str, Any]) -> list[int]:
    """Of each parameter, how often it was updated. Lock-free, ranks do that each in its own time: what they had is
    theirs again where they are as many."""
    names, ranks, apart = session.data.names, session.ranks, facts.get("rank_counts")
    if apart and facts["managed"] == names:
        if ranks is not None and len(apart) == ranks.size:
            return list(apart[ranks.rank])
        return [max(counts) for counts in zip(*apart, strict=True)]
    return [facts["counts"][name] for name in names]


def random_state() -> dict[str, Any]:
    """Of every generator that a training loop draws from."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [name, torch.tensor(keys.tolist(), device="cpu"), *rest]
    return found


@contextmanager
def as_drawn() -> Iterator[None]:
    """Whatever is drawn or restored within, the next number is the one that was to come."""
    before = random_state()
    try:
        yield
    finally:
        restore_random(before)


def restore_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys.tolist(), dtype="uint32"), *rest))
