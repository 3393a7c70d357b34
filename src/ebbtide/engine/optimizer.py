"""The torch.optim face of the engine's updates: param groups and learning-rate schedulers work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from ebbtide.config import OptimizerConfig
from ebbtide.errors import ConfigError, UnsupportedError, nearest, warn_user
from ebbtide.kernels import require_settings
from ebbtide.update_rules import MEAN_NOTHING, RuleFacts

NO_MOMENTS = (
    "has the param groups and no moments; engine.save(folder) writes all that training needs to go on"
)
joined: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers of torch's that were handed over."""
training: weakref.WeakSet[EngineOptimizer] = weakref.WeakSet()
"""Those of engines that are not closed."""


@dataclass(frozen=True)
class OptimizerCalls:
    """What the optimizer's methods do."""

    update: Callable[[], bool]
    """Takes the engine's step, and says whether it was skipped."""
    clear: Callable[[bool], None]
    """Drops gradients; whether None is to be there and not zeros."""
    take: Callable[[Mapping[str, Any]], None]
    """Takes a torch optimizer's state into the chunks."""


class EngineOptimizer(torch.optim.Optimizer):
    """Holds the param groups. Its `step` is the engine's update; its state lives in chunks, not here."""

    def __init__(
        self,
        module: nn.Module,
        groups: Iterable[dict[str, Any]],
        settings: OptimizerConfig,
        calls: OptimizerCalls,
    ) -> None:
        self.step_was_skipped = False
        """Whether the last step changed nothing: its gradients were not finite."""
        self.handed: torch.optim.Optimizer | None = None
        """The one that was handed over: a scheduler on it changes the same groups."""
        self._its_groups: list[dict[str, Any]] = []
        """Of that one, as it came."""
        self._hooks: list[Any] = []
        self._module, self._rule = module, settings.rule
        self._calls = calls
        super().__init__(groups, settings.settings)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step. A closure, which runs forward and backward, is called first; this gives what it does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_was_skipped = self._calls.update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        place, group = len(self.param_groups), dict(param_group)
        group["params"] = [_parameter(one) for one in _listed(group["params"])]
        known = {id(p) for p in self._module.parameters()}
        unknown = [p for p in group["params"] if id(p) not in known]
        if unknown:
            raise ConfigError(
                f"param_groups[{place}] has {len(unknown)} parameters that are not the module's; "
                "pass those of module.parameters()"
            )
        group = as_settings(group, place, self._rule)
        require_settings({**self.defaults, **group}, place, self._rule.defaults)
        super().add_param_group(group)

    @property
    def overheard(self) -> bool:
        """Whether somebody else's code runs as a step begins, which may change settings or weights."""
        step = vars(self).get("step")
        replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
        everywhere = torch_optimizer._global_optimizer_pre_hooks.values()
        others = any(
            (getattr(hook, "__module__", None) or "").partition(".")[0] != "ebbtide" for hook in everywhere
        )
        return replaced or others or bool(self._optimizer_step_pre_hooks)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that are held; after a step there are none."""
        self._calls.clear(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The param groups. The state is in chunks, and a file that is written without it trains on as another run."""
        warn_user(f"engine.optimizer.state_dict() {NO_MOMENTS}")
        return super().state_dict()

    def join(self, handed: torch.optim.Optimizer) -> None:
        """With an optimizer of torch's that was handed over: its groups are these, and what is loaded into it goes on to
        the engine."""
        self.handed, self._its_groups = handed, handed.param_groups
        handed.param_groups = self.param_groups  # what a scheduler on it changes counts
        joined.add(handed)
        own = weakref.ref(self)

        def saved(_: torch.optim.Optimizer) -> None:
            warn_user(f"{type(handed).__name__}.state_dict() {NO_MOMENTS}")

        def loaded(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            engines = own()
            if engines is None:
                return state_dict
            engines.load_state_dict(state_dict)
            return {**state_dict, "state": {}}

        def shared(one: torch.optim.Optimizer) -> None:
            engines = own()
            if engines is not None:
                one.param_groups = engines.param_groups

        self._hooks = [
            handed.register_state_dict_pre_hook(saved),
            handed.register_load_state_dict_pre_hook(loaded),
            handed.register_load_state_dict_post_hook(shared),
        ]

    def leave(self) -> None:
        """The engine is closed. What was handed over is an ordinary one again: with the groups that it came with, and
        what became of their settings."""
        training.discard(self)
        handed, self.handed = self.handed, None
        if handed is None:
            return
        for hook in self._hooks:
            hook.remove()
        joined.discard(handed)
        for before, now in zip(self._its_groups, self.param_groups, strict=False):
            before |= {key: value for key, value in now.items() if key in before and key != "params"}
        handed.param_groups = self._its_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Param groups, as `state_dict` gives them; and the moments of a torch.optim.AdamW or Adam, into the chunks."""
        known = {"step", *self._rule.states.values()}
        if any(set(of_one) - known for of_one in state_dict.get("state", {}).values()):
            self._calls.take(state_dict)  # refused: it is another rule's
        own = {key for group in self.param_groups for key in group} - MEAN_NOTHING.keys()
        groups = [
            as_settings(group, place, self._rule, handed=True, known=own)
            for place, group in enumerate(state_dict["param_groups"])
        ]
        if state_dict.get("state"):
            self._calls.take(state_dict)
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        if self.handed is not None:
            self.handed.param_groups = self.param_groups

    def _refuse_copy(self, *_: object) -> NoReturn:
        raise UnsupportedError(
            "the engine's optimizer cannot be copied or pickled: its parameters and state are in the engine's "
            "chunks. Use engine.save(folder), or copy the settings in its param_groups"
        )

    __deepcopy__ = _refuse_copy
    __reduce_ex__ = _refuse_copy


_KEPT = (
    "params",
    "param_names",
    "name",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
)
"""Of a group, whatever the rule; some are schedulers'."""


def as_settings(
    group: Mapping[str, Any],
    place: int,
    rule: RuleFacts,
    handed: bool = False,
    known: Collection[str] = (),
) -> dict[str, Any]:
    """A group of torch's as one of the engine's: what means nothing here goes, what would mean something is refused.
    `handed`: it is of an optimizer of torch's, all of whose groups are updated by the rule. `known`: what the loop has
    put into the engine's groups itself."""
    found, settings = {}, ", ".join(rule.defaults)
    for key, value in group.items():
        if key in _KEPT or key in rule.defaults or key in known:
            found[key] = value
        elif key not in MEAN_NOTHING:
            raise ConfigError(
                f"param_groups[{place}]: unknown setting {key!r}{nearest(key, rule.defaults)}; known here: {settings}"
            )
        elif value not in MEAN_NOTHING[key]:
            raise ConfigError(
                f"param_groups[{place}]: expected {key} = {MEAN_NOTHING[key][0]}, found {value!r}: the engine's "
                f"rules have {settings}, and no {key}"
            )
    decoupled = group.get("decoupled_weight_decay", rule.decoupled)
    if handed and decoupled != rule.decoupled and group.get("weight_decay"):
        raise ConfigError(
            f"param_groups[{place}]: expected decoupled_weight_decay = {rule.decoupled}, as {rule.name} has it, found "
            f"{decoupled}: the engine updates all groups by one rule, and config['optimizer']['name'] says which"
        )
    return found


def make_optimizer(
    module: nn.Module,
    settings: OptimizerConfig,
    param_groups: Iterable[Any] | None,
    calls: OptimizerCalls,
) -> EngineOptimizer:
    """With the user's groups, or one of all parameters that require gradients."""
    if param_groups is None:
        groups = [{"params": [p for p in module.parameters() if p.requires_grad]}]
        if not groups[0]["params"]:
            groups = [{"params": list(module.parameters())}]
    else:
        given = _listed(param_groups)
        groups = given if all(isinstance(one, dict) for one in given) else [{"params": given}]
    return EngineOptimizer(module, groups, settings, calls)


def _listed(given: Any) -> list[Any]:
    """As torch's optimizers take parameters: several, or a single one."""
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _parameter(one: Any) -> Any:
    """As they come from `parameters` and `named_parameters`."""
    return one[1] if isinstance(one, tuple) and len(one) == 2 else one
