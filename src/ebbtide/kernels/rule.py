"""Update rules: what is computed per element, from which states, with which coefficients.

A rule is a formula in torch and the coefficients of one step; that is all it takes to train with it, for
the fallback runs any rule. Where there is a native or Triton kernel of the rule's name, it must give the
same bits.

Note "one rounding": to give the same bits everywhere, a formula uses fp32 operations one at a time: `mul`,
`add`, `sub`, division of a tensor by a tensor, `root` below. No `alpha=`, `addcmul`, `lerp` (they contract
on some processors), no division by a scalar (a GPU multiplies by the reciprocal), no torch.sqrt (on a CPU
it is off by a bit in one element of 150). Coefficients are rounded to fp32 once, here.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ebbtide.errors import ConfigError
from ebbtide.update_rules import UPDATE_RULES


@dataclass(frozen=True, slots=True)
class Rule:
    """An elementwise update rule. `states` are the kinds of state beside the master, as `update_rules` has them.

    `coefficients(group, step, scale)` gives fp32 numbers from a param group (lr, betas, eps, weight_decay),
    the step counted from 1, and the factor that the gradient is multiplied by (clipping, loss scale). That factor comes
    first, then the limit of the gradient's elements.

    `formula(p32, g32, states, coefficients)` updates p32 and states in place. It leaves g32 alone: this may
    be the gradient itself.
    """

    name: str
    states: tuple[str, ...]
    coefficients: Callable[..., tuple[float, ...]]
    formula: Callable[[Tensor, Tensor, tuple[Tensor, ...], Sequence[float]], None]

    @property
    def settings(self) -> Iterable[str]:
        """Those that a param group must have."""
        return UPDATE_RULES[self.name].defaults if self.name in UPDATE_RULES else ("lr",)


def _known(name: str, coefficients: Any, formula: Any) -> Rule:
    return Rule(name, tuple(UPDATE_RULES[name].states), coefficients, formula)


def require_settings(group: Mapping[str, Any], place: int, settings: Iterable[str] = ()) -> None:
    """Before anything is updated with them. `settings`: those that the rule reads; left out, those that are there."""
    for key in settings or ("lr", *(key for key in group if key in _SETTINGS)):
        expected, fits = _SETTINGS[key]
        try:
            good = key in group and fits(group[key])
        except (TypeError, ValueError, RuntimeError):
            good = False
        if not good:
            found = repr(group[key]) if key in group else "nothing"
            raise ConfigError(
                f"param_groups[{place}]: expected {expected} as {key!r}, found {found}; nothing was updated. Set "
                f"engine.optimizer.param_groups[{place}][{key!r}]"
            )


def _fractions(betas: Any) -> bool:
    return len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)


_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("a finite number", lambda value: abs(float(value)) < 1e38),
    "betas": ("two numbers from 0 up to 1, without 1,", _fractions),
    "momentum": ("a number from 0 up to 1, without 1,", lambda value: 0 <= float(value) < 1),
    "eps": ("a finite number from 0 on", lambda value: 0 <= float(value) < math.inf),
    "weight_decay": ("a finite number", lambda value: math.isfinite(float(value))),
}


def root(x: Tensor) -> Tensor:
    """The square root of fp32 numbers, correctly rounded: in fp64 no result comes near the middle of two."""
    return x.double().sqrt_().float()


def _coefficients(
    group: Mapping[str, Any], step: int, scale: float, limit: float = math.inf, *, decoupled: bool
) -> tuple[float, ...]:
    if step < 1:
        raise ValueError(f"steps are counted from 1, found step {step}")
    lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    b1, b2 = map(float, group["betas"])
    exact = (
        scale,
        limit,
        b1,
        1 - b1,
        b2,
        1 - b2,
        1 / math.sqrt(1 - b2**step),
        eps,
        lr / (1 - b1**step),
        1 - lr * decay if decoupled else decay,
    )
    return tuple(array("f", exact))


def limited(rule: Rule, clip_value: float | None) -> Rule:
    """The rule, with each element of the gradient kept within a value."""
    if clip_value is None:
        return rule
    return replace(rule, coefficients=partial(rule.coefficients, limit=clip_value))


def _taken(g32: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The gradient as every rule takes it: scaled, and within its limit."""
    scale, limit, *_ = coefficients
    return (g32 * scale).clamp_(-limit, limit)


def _move(p: Tensor, g: Tensor, states: tuple[Tensor, ...], coefficients: Sequence[float]) -> None:
    momentum, variance = states
    _, _, b1, rest1, b2, rest2, inv_sqrt_bc2, eps, step_size, _ = coefficients
    momentum.mul_(b1).add_(g * rest1)
    variance.mul_(b2).add_((g * rest2).mul_(g))
    divisor = root(variance).mul_(inv_sqrt_bc2).add_(eps)
    p.sub_((momentum / divisor).mul_(step_size))


def _adamw(p32: Tensor, g32: Tensor, states: tuple[Tensor, ...], coefficients: Sequence[float]) -> None:
    g = _taken(g32, coefficients)
    p32.mul_(coefficients[9])
    _move(p32, g, states, coefficients)


def _adam(p32: Tensor, g32: Tensor, states: tuple[Tensor, ...], coefficients: Sequence[float]) -> None:
    g = _taken(g32, coefficients).add_(p32 * coefficients[9])
    _move(p32, g, states, coefficients)


ADAMW = _known("adamw", partial(_coefficients, decoupled=True), _adamw)
ADAM = _known("adam", partial(_coefficients, decoupled=False), _adam)


def _lion_coefficients(
    group: Mapping[str, Any], step: int, scale: float, limit: float = math.inf
) -> tuple[float, ...]:
    b1, b2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return tuple(array("f", (scale, limit, b1, 1 - b1, b2, 1 - b2, lr, 1 - lr * decay)))


def _lion(p32: Tensor, g32: Tensor, states: tuple[Tensor, ...], coefficients: Sequence[float]) -> None:
    [momentum] = states
    _, _, b1, rest1, b2, rest2, lr, keep = coefficients
    g = _taken(g32, coefficients)
    direction = (momentum * b1).add_(g * rest1)
    sign = (direction > 0).float().sub_((direction < 0).float())
    momentum.mul_(b2).add_(g * rest2)
    p32.mul_(keep).sub_(sign.mul_(lr))


def _sgd_coefficients(
    group: Mapping[str, Any], step: int, scale: float, limit: float = math.inf
) -> tuple[float, ...]:
    settings = (float(group[key]) for key in ("momentum", "lr", "weight_decay"))
    return tuple(array("f", (scale, limit, *settings)))


def _sgd(p32: Tensor, g32: Tensor, states: tuple[Tensor, ...], coefficients: Sequence[float]) -> None:
    [momentum] = states
    _, _, kept, lr, decay = coefficients
    momentum.mul_(kept).add_(_taken(g32, coefficients).add_(p32 * decay))
    p32.sub_(momentum * lr)


LION = _known("lion", _lion_coefficients, _lion)
SGD = _known("sgd", _sgd_coefficients, _sgd)
RULES = {rule.name: rule for rule in (ADAMW, ADAM, LION, SGD)}
