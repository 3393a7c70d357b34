"""A session in the planner's terms: its shape, its settings, and what a plan is worth."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ebbtide.config import Config
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.rates import Rates, StepJob
from ebbtide.forecasting.simulation.walk import step_seconds
from ebbtide.planner.search import Cost
from ebbtide.planner.shape import ModelShape, Settings, update_bytes
from ebbtide.runtime.movement.eviction import Room
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.runtime.updates.updates import Updates


def shape_of(data: ModelData, updates: Updates) -> ModelShape:
    count = range(len(data.layout.chunks))
    states = tuple(sum(chunk.nbytes for chunk in data.store.state_chunks(index)) for index in count)
    params = tuple(data.parameter_chunk(index).nbytes for index in count)
    grads = tuple(p if trained else 0 for p, trained in zip(params, data.trained, strict=True))
    shared = data.store.slicing.shared
    whole = tuple(data.computed(i).nbytes if data.gathered(i) else 0 for i in count) if shared else ()
    places = tuple(place.chunk for place in data.places)
    pages, page_bytes = ((), ()) if shared else data.layout.stored  # a rank's slice is in one piece
    expected = tuple(
        updates.sink.gradient_bytes(m) if parameter.requires_grad else 0
        for m, parameter in enumerate(data.parameters)
    )
    return ModelShape(
        data.run_chunks,
        places,
        params,
        grads,
        states,
        whole,
        pages,
        page_bytes,
        expected,
        tuple(tuple(run.parameters) for run in data.runs),
    )


def settings_of(config: Config, room: Room, shared: bool) -> Settings:
    """`shared`: gradients do not just arrive, one by one: ranks reduce them, stages add them up."""
    data, ledger = room.data, room.ledger
    every = range(len(data.layout.chunks))
    separate = all(data.master_dtype(i) == torch.float32 for i in every if data.trained[i])
    return Settings(
        room.budget("device"),
        room.budget("host"),
        config.placement,
        config.eviction,
        config.prefetch,
        config.accumulate,
        config.updates == "in-backward",
        separate
        and config.accumulate == 1
        and config.updates == "exact"
        and not shared
        and config.placement != "static",
        ssd=room.budget("ssd"),
        waiting_width=config.waiting_width,
        max_staleness=config.max_staleness,
        given={tier: ledger.asked(tier, count) for tier, count in ledger.budgets.items()},
        sharers=ledger.sharers,
        one_memory=data.store.backend.one_memory and not shared,
    )


def cost_of(
    config: Config, shape: ModelShape, settings: Settings, data: ModelData, updates: Updates
) -> Cost | None:
    """Seconds on the machine that is described, else none: then plans compete by the bytes that they move."""
    if not config.machine:
        return None
    rates = Rates(Machine.read(config.machine))
    volume = update_bytes(shape, config.resolved_master)
    kept = updates.sink.in_place.always or updates.sink.in_place.where_planned
    captured = () if kept else tuple(_gradient_bytes(data))
    return lambda plan: step_seconds(
        StepJob(
            shape,
            plan,
            settings,
            rates,
            volume,
            captured,
            blocking=not settings.prefetch,
            lock_free=settings.lock_free,
            max_staleness=config.max_staleness,
        )
    )


def _gradient_bytes(data: ModelData) -> Iterator[int]:
    for place, view in zip(data.places, data.views, strict=True):
        yield (view.numel if view is not None else 0) * data.parameter_chunk(place.chunk).dtype.itemsize
