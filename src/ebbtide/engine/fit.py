"""What `device.memory` a loop needs, found by planning: nothing runs, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.errors import UnsupportedError
from ebbtide.planner.placement import enough
from ebbtide.planner.record import Record
from ebbtide.planner.uses import SCALARS
from ebbtide.runtime.planning.calls import Call, call_of
from ebbtide.runtime.session import Session
from ebbtide.tracing.standalone import arguments_of
from ebbtide.units import format_size


@dataclass(frozen=True)
class Fit:
    """Bytes of device memory that are enough, and those that hold everything."""

    least: int
    whole: int
    passes: tuple[tuple[str, int], ...]
    """What each pass needs."""
    stays: int = 0
    """Bytes that stay while another engine computes: what a pass has that waits for its backward, or what it gave."""
    trains: bool = False
    hint: str = ""
    """What may have been meant otherwise."""

    @property
    def half(self) -> int:
        """Halfway."""
        return (self.least + self.whole) // 2

    def __add__(self, other: Fit) -> Fit:
        """Of two engines that share a budget. One that only evaluates does so while the other waits; of two that train
        each may go back through the other."""
        both = self.trains and other.trains
        least = max(self.least + other.stays, self.stays + other.least)
        return Fit(
            self.least + other.least if both else least,
            self.whole + other.whole,
            self.passes + other.passes,
            self.stays + other.stays,
            self.trains or other.trains,
            self.hint or other.hint,
        )

    def __str__(self) -> str:
        passes = ", ".join(f"{name} {format_size(count)}" for name, count in self.passes)
        return (
            f"device.memory = {self.least} is enough ({format_size(self.least)}: {passes}); {self.half} is halfway to "
            f"{self.whole}, which holds everything ({format_size(self.whole)}){self.hint}"
        )


def fit(
    session: Session,
    module: nn.Module,
    batches: Sequence[Any],
    loss: Callable[[Any], torch.Tensor] | None,
    run: Callable[..., Any] | None,
    evaluate: Iterable[Any],
) -> Fit:
    passes, left, peak, stays, trains = [], 0, 0, 0, False
    for number, batch in enumerate(batches, 1):
        record = _imagined(session, _call(session, module, batch, run or _with(module, loss)))
        left, trains = max(left, record.left), True
        peak = max(peak, record.peak + record.left)
        stays = max(stays, record.left_by_forward + record.fixed)
        # What the loop holds of one pass, it holds until forward of the next is over.
        passes.append((f"training {number}", _enough(session, record.carrying(record.left))))
    only = run if run is not None and not passes else module
    for number, batch in enumerate(evaluate, 1):
        with torch.no_grad():
            record = _imagined(session, _call(session, module, batch, only))
        stays = max(stays, record.left + record.fixed)
        held = max(left, record.left - 2 * _nbytes(batch))  # this batch and the next: the loop drops inputs
        peak = max(peak, record.peak + held)
        passes.append((f"evaluation {number}", session.evaluations.least(record) + held))
    model_data = sum(session.shape.sizes) + sum(session.shape.state_bytes)
    least = max(count for _, count in passes)
    return Fit(least, max(least, peak + model_data), tuple(passes), stays, trains, _hint(batches))


def _nbytes(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _hint(batches: Sequence[Any]) -> str:
    """Where forward's second argument may be taken for another batch, and is left out by its default."""
    if len(batches) < 2 or not all(isinstance(batch, torch.Tensor) for batch in batches):
        return ""
    return f". These are {len(batches)} batches of one tensor each; one batch of two is fit((x, y))"


def _call(session: Session, module: nn.Module, batch: Any, function: Callable[..., Any]) -> Call:
    call = call_of(module, function, *arguments_of(batch))
    if function is module:
        return call
    return replace(call, function=partial(session.interceptor.around, function))


def _with(module: nn.Module, loss: Callable[[Any], torch.Tensor] | None) -> Callable[..., Any]:
    return module if loss is None else partial(_with_loss, module, loss)


def _with_loss(module: nn.Module, loss: Callable[[Any], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """The loss first, which backward goes from; the loop holds forward's output beside it."""
    output = module(*args, **kwargs)
    return {"loss": loss(output), "output": output}


def _imagined(session: Session, call: Call) -> Record:
    record = session.imagining.imagine(call)
    if record is None:
        raise UnsupportedError(
            f"fit: this pass cannot be imagined ({session.imagining.note}). Each argument of fit is one batch, as "
            "forward takes it: several positional arguments are a tuple, fit((x, y)). If that is so, what it takes "
            'shows only when it runs, and device.memory = "least" finds a budget then'
        )
    return record


def _enough(session: Session, record: Record) -> int:
    """Where the host takes what the device does not hold."""
    settings = session.traces.settings
    elsewhere = 4 * (sum(session.shape.sizes) + sum(session.shape.state_bytes))
    if not settings.ssd_beside_device:
        settings = replace(settings, host=max(settings.host, elsewhere))
    return enough(session.shape, record, replace(settings, device=0, given={})) + SCALARS
