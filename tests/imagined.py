"""Passes of the zoo's models, imagined once a test instead of once an engine.

A symbolic trace is a function of the module, of what the engine knows of its parameters and of the batch's shapes;
budgets, eviction and what a disk does have no part in it. Tests about those make many engines (each refused budget is
one), and took a third of their time to imagine the same pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

import zoo
from ebbtide.record import Record
from ebbtide.tracing.cost import tensors_in
from ebbtide.tracing.meter import storage_bytes

AMPLE = 1 << 17
"""More bytes than what such a pass computes for real takes: with as many free, it does not matter how many are."""


def once(imagine: Callable[..., Record]) -> Callable[..., Record]:
    found: dict[Hashable, Record] = {}

    def remembered(
        module: nn.Module, *given: Any, saved: bool, free: float, function: Any, **others: Any
    ) -> Record:
        parameters, args, kwargs, signature, fixed, *_ = given
        what = zoo.built(module)
        if (
            what is None
            or function is not module
            or free - fixed - storage_bytes(tensors_in((args, kwargs))) < AMPLE
        ):
            return imagine(module, *given, saved=saved, free=free, function=function, **others)
        key = (what, parameters, signature, fixed, saved)
        if key not in found:
            found[key] = imagine(module, *given, saved=saved, free=free, function=function, **others)
        return found[key]

    return remembered
