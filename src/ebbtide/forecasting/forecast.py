"""`ebbtide.forecast`: what training a model on a machine will be like, before anything is allocated.

And the largest model, or batch, that trains: a search over layers, or sequences, with the whole forecast each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from ebbtide.config import Config
from ebbtide.errors import ConfigError
from ebbtide.forecasting.forecaster import Forecast, Forecaster, Largest, Workload
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.outlook import Outlook, Question, fits, look
from ebbtide.forecasting.simulation.strategies import STRATEGIES
from ebbtide.models import ModelSpec

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
    if forecaster.spec is None:
        raise ConfigError(f"--find-max {what}: expected a model by name, for it is made anew in other sizes")
    if what == "model" and not forecaster.spec.layers:
        raise ConfigError(f"--find-max model: the layers of {forecaster.spec.name} cannot be counted")
    spec = forecaster.spec

    def asked(size: int) -> Question:
        if what == "model":
            return forecaster.question(machine, work, strategy, size)
        return forecaster.question(machine, replace(work, batch=size), strategy)

    @cache
    def trains(size: int) -> bool:
        return fits(asked(size))

    @cache
    def at(size: int) -> Outlook:
        return look(asked(size), quick=True)

    def quick_enough(size: int) -> bool:
        return trains(size) and (not min_tflops or (at(size).tflops_per_device or 0.0) >= min_tflops)

    start = spec.layers if what == "model" else work.batch
    size = fitting = largest(trains, start, MOST[what])
    if size and not quick_enough(size):
        # Larger batches compute faster, so no smaller one is quick enough; of models a smaller one may be.
        size = largest(quick_enough, max(1, size // 2), size) if what == "model" else 0
    if not size:
        raise _none(at(fitting or 1), what, min_tflops)
    if what == "batch":
        work = replace(work, batch=size)
        answer = forecaster.answer(machine, work, strategy)
        best = Largest(answer.outlook.params, spec.layers or None, size)
    else:
        answer = forecaster.with_layers(size).answer(machine, work, strategy)
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
    if not least.fits:
        assert least.short is not None
        size = "one layer" if what == "model" else "a batch of 1"
        return ConfigError(f"--find-max {what}: not even {size} fits: {least.short.message}")
    other = "raise the batch or the sequence length" if what == "model" else "take another machine"
    return ConfigError(
        f"--find-max {what}: the largest that fits computes {least.tflops_per_device:.3g} TFLOPS a device, "
        f"--min-tflops asks for {min_tflops:g}; lower it, or {other}"
    )


def forecast(
    model: str | ModelSpec | nn.Module | Callable[[], nn.Module],
    machine: Machine | Mapping[str, object] | str | Path,
    *,
    batch: int = 1,
    seq: int = 1024,
    gpus: int | None = None,
    strategy: str = "ebbtide",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
    config: Config | Mapping[str, object] | str | Path | None = None,
    example: Any = None,
    tokens: int | None = None,
    find_max: str | None = None,
    min_tflops: float = 0.0,
) -> Forecast:
    """Whether and how `model` trains on `machine` (a file, a described machine's name, a table).

    `model` is a name as `ebbtide train` takes it, a module (on the meta device too), or a function that builds one;
    the last two need an `example` of the forward's arguments, as `ebbtide.trace` takes it, and `tokens`, what a
    batch of it trains. `batch` is a device's.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}")
    described = Machine.read(machine)
    described = described.with_devices(gpus) if gpus is not None else described
    work = Workload(batch, seq, checkpoint_activations, offload_activations)
    forecaster = Forecaster(model, config, example, tokens)
    if min_tflops < 0 or (min_tflops and find_max is None):
        raise ConfigError(f"min_tflops: expected a number of at least 0, with find_max, found {min_tflops!r}")
    if find_max is None:
        return forecaster.answer(described, work, strategy)
    return find_largest(forecaster, described, work, strategy, find_max, min_tflops)
