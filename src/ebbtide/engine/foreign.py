"""Optimizers of torch's beside the engine's own: one that is handed over as settings, and one that is left in the loop.

Another optimizer over managed parameters has nothing to do, for their gradients are not in `.grad`; a scheduler on it
changes no learning rate of the engine's. The first is refused when it steps, which a hook of torch's says of every
optimizer; the second by the engine's next step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ebbtide.config import Config, OptimizerConfig
from ebbtide.engine.optimizer import EngineOptimizer, as_settings, joined, training
from ebbtide.errors import ConfigError, StateError, UnsupportedError
from ebbtide.runtime.parameters.parameter_classes import name_of_managed
from ebbtide.update_rules import BY_TORCH, UPDATE_RULES

_hooked: list[Any] = []


def refuse_foreign_steps() -> None:
    """From the first engine on."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(refuse_step))


def refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, EngineOptimizer):
        return
    if optimizer in joined:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step(): it was handed over, and the engine updates by its settings: "
            "call engine.step() in its place. Nothing was changed"
        )
    name = _managed_by(optimizer)
    if name:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step(): {name}, one of its parameters, is in an engine's chunks, so it would "
            "find no gradient there. Call engine.step(). Where this optimizer has the settings that you want, hand it "
            "over: ebbtide.initialize(module, config, optimizer); where it is to train some parameters by itself, keep "
            "those out of the chunks with `unmanaged`, and out of the param_groups that initialize() is given; then "
            "step it before engine.step(), which drops all gradients"
        )
    if _shares_a_parameter(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step(): the engine's param_groups have its parameters, too, and would update "
            "them a second time: give initialize() param_groups without them, and step this one before engine.step(). "
            "Nothing was changed"
        )


def _shares_a_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """With an engine that is not closed."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    groups = (group for own in list(training) for group in own.param_groups)
    return any(id(parameter) in mine for group in groups for parameter in group["params"])


def _managed_by(optimizer: torch.optim.Optimizer) -> str:
    """The name of one of an optimizer's parameters that an engine has."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((name for one in parameters if (name := name_of_managed(one))), "")


class Schedulers:
    """Learning rates of other optimizers over the same parameters: when one changes, a scheduler has the wrong one."""

    def __init__(self, own: EngineOptimizer) -> None:
        self._own = weakref.ref(own)
        self._others: list[tuple[weakref.ref[torch.optim.Optimizer], list[float]]] | None = None

    def look(self) -> None:
        """At each step. The first one finds those that there are by then."""
        if self._others is None:
            self._others = [(weakref.ref(one), _rates(one)) for one in self._find()]
        for other, rates in self._others:
            found = other()
            if found is not None and _rates(found) != rates:
                self._others = None
                raise StateError(
                    f"the learning rate of a {type(found).__name__} changes, and that is not the optimizer that trains "
                    "these parameters: give the scheduler engine.optimizer, or hand this optimizer over in "
                    "ebbtide.initialize(module, config, optimizer). Nothing was changed"
                )

    def _find(self) -> Iterable[torch.optim.Optimizer]:
        own = self._own()
        if own is None:
            return
        here = {id(parameter) for group in own.param_groups for parameter in group["params"]}
        for one in _others():
            groups = [] if one.param_groups is own.param_groups else one.param_groups
            if any(id(parameter) in here for group in groups for parameter in group["params"]):
                yield one


def _others() -> list[torch.optim.Optimizer]:
    """All optimizers that there are, but for those of engines. Objects are looked through, by the hundred thousand, only
    where there may be one: a class that ever made one has a step that torch hooked."""
    kinds = {kind for kind in _kinds(torch.optim.Optimizer) if getattr(kind.step, "hooked", False)}
    return [one for one in gc.get_objects() if type(one) in kinds] if kinds else []


def _kinds(kind: type[torch.optim.Optimizer]) -> Iterator[type[torch.optim.Optimizer]]:
    """The classes of optimizers, but for the engine's own."""
    for one in kind.__subclasses__():
        if one is not EngineOptimizer:
            yield one
            yield from _kinds(one)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def handed_over(config: Config, given: Any) -> tuple[Config, Any, torch.optim.Optimizer | None]:
    """The config and the param groups that an optimizer of torch's stands for, with itself; or what was given."""
    if not isinstance(given, torch.optim.Optimizer):
        return config, given, None
    kind = type(given)
    if kind.__module__.partition(".")[0] != "torch" or kind.__name__ not in BY_TORCH:
        raise ConfigError(
            f"initialize takes a torch.optim.{' or '.join(BY_TORCH)} as settings, found "
            f"{kind.__module__}.{kind.__name__}: the engine updates by rules of its own, in chunks. Take one of those, "
            "or name the rule in config['optimizer']"
        )
    rule = BY_TORCH[kind.__name__]
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in given.param_groups}
    if rule.name == "adam" and decoupled == {True}:
        rule = UPDATE_RULES["adamw"]
    if config.optimizer.name not in (rule.name, OptimizerConfig().name):
        raise ConfigError(
            f"config['optimizer']['name'] is {config.optimizer.name!r} and the optimizer that was handed over is a "
            f"{kind.__name__}: leave one of them out"
        )
    if given.state:
        raise UnsupportedError(
            f"the {kind.__name__} that was handed over has made steps already, and its moments would be lost: hand over "
            "a new one, and after that engine.optimizer.load_state_dict(its state_dict()); from a checkpoint of the "
            "engine's, engine.load(folder)"
        )
    groups = [as_settings(group, place, rule, handed=True) for place, group in enumerate(given.param_groups)]
    rates: Mapping[str, Any] = groups[0]
    found = {f"optimizer.{key}": _plain(rates[key]) for key in rule.defaults}
    return config.with_({"optimizer.name": rule.name, **found}), groups, given


def _plain(value: Any) -> Any:
    return list(map(float, value)) if isinstance(value, tuple | list) else float(value)
