"""What is known of an update rule without computing it: its settings, its state, and what torch.optim calls both.

The formulas are in `kernels.rule`, under the same names. Config, optimizer, checkpoints and forecast ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RuleFacts:
    name: str
    states: Mapping[str, str]
    """By kind of state beside the master, in the order in which kernels take them: its name in torch.optim."""
    defaults: Mapping[str, Any]
    """The settings that the rule reads; torch.optim's defaults where it has the rule."""
    torch: str = ""
    """The class in torch.optim that it takes settings and state of."""
    decoupled: bool = False
    """Whether weight decay is none of the gradient's."""
    steps_in_state: bool = True
    """Whether torch.optim counts steps in a parameter's state."""

    @property
    def state_bytes(self) -> int:
        """An element's, in fp32, without the master."""
        return 4 * len(self.states)


_MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
UPDATE_RULES = {
    rule.name: rule
    for rule in (
        RuleFacts("adamw", _MOMENTS, {**_ADAM, "weight_decay": 0.01}, "AdamW", decoupled=True),
        RuleFacts("adam", _MOMENTS, {**_ADAM, "weight_decay": 0.0}, "Adam"),
        RuleFacts(
            "lion",
            {"momentum": "exp_avg"},
            {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
            decoupled=True,
        ),
        RuleFacts(
            "sgd",
            {"momentum": "momentum_buffer"},
            {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
            "SGD",
            steps_in_state=False,
        ),
    )
}
BY_TORCH = {rule.torch: rule for rule in UPDATE_RULES.values() if rule.torch}
MEAN_NOTHING: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "maximize": (False,),
    "correct_bias": (True,),
    "capturable": (False,),
    "differentiable": (False,),
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "decoupled_weight_decay": (False, True),
    "dampening": (0,),
    "nesterov": (False,),
}
"""What torch's optimizers have besides, and with which values it means nothing here."""
