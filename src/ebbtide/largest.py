"""The largest model, or batch, that trains: a search over layers, or sequences, with the whole forecast at each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ebbtide.errors import ConfigError
from ebbtide.forecasts import Forecast, Forecaster, Largest, Workload
from ebbtide.plan.forecast import Outlook, look
from ebbtide.plan.machine import Machine

KINDS = ("model", "batch")
MOST = {"model": 4096, "batch": 1 << 20}
"""Layers, and sequences a device, beyond which nobody asks."""


def find_largest(
    forecaster: Forecaster,
    machine: Machine,
    work: Workload,
    strategy: str,
    what: str,
    min_tflops: float = 0.0,
) -> Forecast:
    """The forecast of the largest size that fits and computes with `min_tflops` or more on each device."""
    if what not in KINDS:
        raise ConfigError(f"--find-max: expected 'model' or 'batch', found {what!r}")
    if forecaster.spec is None or (what == "model" and not forecaster.spec.layers):
        raise ConfigError(f"--find-max {what}: expected a model by name whose layers can be counted")
    spec = forecaster.spec
    known: dict[int, Outlook] = {}

    def at(size: int) -> Outlook:
        if size not in known:
            if what == "model":
                question = forecaster.question(machine, work, strategy, size)
            else:
                question = forecaster.question(machine, replace(work, batch=size), strategy)
            known[size] = look(question)
        return known[size]

    def good(size: int) -> bool:
        found = at(size)
        return found.fits and (found.tflops_per_device or 0.0) >= min_tflops

    start = spec.layers if what == "model" else work.batch
    size = largest(good, start, MOST[what])
    if not size:
        raise _none(at(1), what, min_tflops)
    if what == "batch":
        work = replace(work, batch=size)
        answer = forecaster.answer(machine, work, strategy)
        best = Largest(answer.outlook.params, spec.layers or None, size)
    else:
        deep = Forecaster(spec.with_layers(size), forecaster.config)
        answer = deep.answer(machine, work, strategy)
        best = Largest(answer.outlook.params, size, work.batch)
    return replace(answer, max=best)


def largest(good: Callable[[int], bool], start: int, most: int) -> int:
    """The largest size up to `most` that is good, where larger ones are not once one is not; 0: none is."""
    low, high = 0, max(1, min(start, most))
    while good(high):
        low = high
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def _none(least: Outlook, what: str, min_tflops: float) -> ConfigError:
    size = "one layer" if what == "model" else "a batch of 1"
    if not least.fits:
        assert least.short is not None
        return ConfigError(f"--find-max {what}: not even {size} fits: {least.short.message}")
    return ConfigError(
        f"--find-max {what}: with {size} the step computes {least.tflops_per_device:.3g} TFLOPS a device, "
        f"--min-tflops asks for {min_tflops:g}; lower it, or raise the batch or the sequence length"
    )
