"""What decides how a planned iteration runs, beside the plan itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.plan.draft import Plan
from ebbtide.plan.rates import Rates
from ebbtide.plan.shape import ModelShape, Settings


@dataclass(frozen=True)
class Job:
    """All that decides how an iteration runs."""

    shape: ModelShape
    plan: Plan
    settings: Settings
    rates: Rates
    update_bytes: tuple[int, ...]
    """By chunk: what an update of this rank's slice reads and writes."""
    captured: tuple[int, ...] = ()
    """By parameter: bytes of its gradient that are copied when it arrives; left out, gradients wait where autograd
    made them."""
    blocking: bool = False
    """The thread that issues the computation waits for each update on the host."""
    all_reduce: bool = False
    """Every rank has all of the model: gradients are summed over ranks."""
    lock_free: bool = False
    """Updates go on beside the passes, which wait for none."""
    exchanges: Mapping[int, int] = field(default_factory=dict)
    """By moment of the record: bytes that a rank sends to the others (experts' tokens)."""
    clip: bool = False
    """The norm is a barrier: with several ranks it waits for all reductions."""
    max_staleness: int = 1
    rounds: int = 1
    """In which ranks exchange the gradients of a chunk."""
