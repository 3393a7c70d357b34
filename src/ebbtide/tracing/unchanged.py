"""A pass that is only imagined leaves what the user's code keeps as it was.

A forward pass and its hooks run twice where it is imagined: a list that features are appended to, a counter in a
closure, a hook that removes itself would know. So what they can reach is held and put back, and what they print, log
or write is dropped. `reach.py` says how far that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ebbtide.tracing.muted import aside, muted
from ebbtide.tracing.reach import Reach, again


@contextmanager
def unchanged(
    module: nn.Module, imagined: Callable[[torch.Tensor], torch.Tensor], function: Callable[..., Any]
) -> Iterator[None]:
    """Tensors that the modules' attributes and the functions' closures hold are `imagined` ones meanwhile: an operator
    that is given real tensors only (a counter of batches) runs for real under a fake mode, and would write.
    `function`: what is called, the module or what works with it."""
    gradients = [(p, p.grad) for p in module.parameters()]
    reach = Reach()
    reach.module(module)
    if function is not module:
        reach.function(function)
    try:
        with muted(reach.files), aside(reach.queues, reach.bars):
            _replace(reach, imagined)
            yield
    finally:
        _put_back(reach, gradients)


def _put_back(reach: Reach, gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    """All of it, whatever some of it raises."""
    failed: Exception | None = None
    for parameter, gradient in gradients + reach.gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient
    for held, _ in reach.held:
        try:
            held.put_back()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _replace(reach: Reach, imagined: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A tensor that is held twice is one tensor."""
    known: dict[int, torch.Tensor] = {}

    def other(most: float, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            return again(value)
        if id(value) not in known:
            if len(known) >= most:
                return value
            known[id(value)] = imagined(value)
        return known[id(value)]

    for held, most in reach.held:
        if most:
            held.replace(partial(other, most))
