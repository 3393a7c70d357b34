"""The largest GPT that trains exactly within given budgets: found by the plan, proved with real steps.

RAM is one tier unless a host budget says otherwise; what it cannot hold is on SSD. The bound counts what cores and disk
must do: forward and backward are measured on models of two and eight of the same layers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ebbtide.bench.ssd_steps import bound_of, measure_ceilings, peak_rss
from ebbtide.bench.steps import LR, Ours, alone, drawn_quickly, suited
from ebbtide.forecasting.forecast import find_largest
from ebbtide.forecasting.forecaster import Forecaster, Workload
from ebbtide.forecasting.simulation.bound import least_streamed
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.models import ModelSpec, find_model
from ebbtide.models.recompute import checkpoint_activations
from ebbtide.planner.shape import update_bytes
from ebbtide.planner.sizes import days_left
from ebbtide.runtime.parameters.selection import PRECISIONS

WIDTHS = (256, 512, 768, 1024, 1280, 1600, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
DEPTH = 36
"""Layers that the width is chosen for; how many it becomes is found by the plan."""
SAMPLES = (2, 8)
"""Layers of the models that forward and backward are measured on."""
MARGIN = 0.02
"""Of the budgets, left free: the engine's first iteration counts outputs that its caller might keep."""
BYTES = 12
"""A parameter: bf16 and the other half of its master, or fp32; two moments."""


def run(
    device: int,
    host: int,
    ssd: int,
    folder: Path | None = None,
    seq: int = 1024,
    batch: int = 1,
    steps: int = 3,
    endurance: int = 0,
    precision: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`device`, `host` and `ssd`: bytes."""
    settings = {"updates": "in-backward", "precision": suited(precision)}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        spec = _largest(device, host, ssd, settings, seq, batch, report)
        config: dict[str, Any] = {
            **settings,
            "optimizer": {"lr": LR},
            "device": {"kind": "cpu", "memory": device},
            "host": {"memory": host},
        }
        if ssd:
            config["ssd"] = {"folder": scratch, "memory": ssd}
        report(f"{spec.name}: {steps} steps after one that is traced")
        found = alone(_train, spec, config, seq, batch, steps)
        report("what cores and disk must do")
        forward, backward = alone(_passes, spec, settings["precision"], seq, batch)
        ceilings = measure_ceilings(Path(scratch))
    bound = bound_of(forward, backward, found, ceilings, clipped=False)
    return {
        "model": spec.name,
        "seq": seq,
        "batch": batch,
        "precision": settings["precision"],
        **found,
        "forward_seconds": forward,
        "backward_seconds": backward,
        **bound,
        "achieved_over_bound": bound["bound_seconds"] / found["step_seconds"],
        "endurance_days": days_left(endurance, found["ssd_write_bytes"], found["step_seconds"]),
        "ceilings": ceilings,
    }


def _largest(
    device: int,
    host: int,
    ssd: int,
    settings: Mapping[str, Any],
    seq: int,
    batch: int,
    report: Callable[[str], None],
) -> ModelSpec:
    most = (device + host + ssd) / BYTES
    width = min(WIDTHS, key=lambda width: abs(12 * DEPTH * width**2 - most))
    start = find_model(f"gpt:layers={DEPTH},hidden={width},heads={width // 64},positions={max(seq, 1024)}")
    report(f"how many layers of width {width} fit")
    rates = {"bandwidth": 25e9, "memory": device + host}
    machine = Machine.read(
        {
            "name": "budgets",
            "device": {**rates, "kind": "cpu", "flops": 1e12},
            "host": {**rates, "cores": 2},
            "links": {"host_device": 10e9},
        }
    ).with_memory(round(device * (1 - MARGIN)), host, round(ssd * (1 - MARGIN)))
    forecaster = Forecaster(start, settings)
    work = Workload(batch, seq, checkpoint_activations=True)
    answer = find_largest(forecaster, machine, work, "ebbtide", "model")
    assert answer.max is not None and answer.max.layers is not None
    return replace(start.with_layers(answer.max.layers))


def _checkpointed(module: torch.nn.Module, spec: ModelSpec) -> torch.nn.Module:
    checkpoint_activations(module, spec.name)
    return module


def _batch(spec: ModelSpec, batch: int, seq: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, spec.vocabulary, (batch, seq), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _train(spec: ModelSpec, config: dict[str, Any], seq: int, batch: int, steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    ours = Ours(spec, _batch(spec, batch, seq), config, module=_checkpointed(spec.on_meta(), spec))
    engine, session = ours.engine, ours.engine._session
    started = time.perf_counter() - began
    try:
        losses, seconds = [ours.step()], []
        before = dict(engine.stats()["moved_bytes"])
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(ours.step())
            seconds.append(time.perf_counter() - start)
        stats = engine.stats()
        shape, plan = session.shape, session.cursor.plan
        assert plan is not None
        moved = {link: (count - before[link]) // steps for link, count in stats["moved_bytes"].items()}
        return {
            "params": sum(place.numel for place in session.data.places),
            "layers": spec.layers,
            "step_seconds": statistics.median(seconds),
            "tokens_per_second": batch * seq / statistics.median(seconds),
            "start_seconds": started,
            "losses": losses,
            "ssd_read_bytes": moved["ssd_read"],
            "ssd_write_bytes": moved["ssd_write"],
            "least_streamed_bytes": least_streamed(shape, plan.record, session.traces.settings),
            "update_bytes": sum(update_bytes(shape, session.config.resolved_master)),
            "state_on_ssd": session.homes.streamed(shape) / sum(shape.state_bytes),
            "peak_bytes": stats["peak_bytes"],
            "budget_bytes": stats["budget_bytes"],
            "peak_rss_bytes": peak_rss(),
        }
    finally:
        ours.close()


def _passes(spec: ModelSpec, precision: str, seq: int, batch: int) -> tuple[float, float]:
    """Seconds of forward and backward of the whole model in plain PyTorch, from two and eight of its layers."""
    data = _batch(spec, batch, seq)
    found = {}
    few, more = SAMPLES
    for layers in SAMPLES:
        fewer = spec.with_layers(layers)
        module = _checkpointed(drawn_quickly(fewer).to(PRECISIONS[precision]), fewer)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            loss = module(**data).loss
            middle = time.perf_counter()
            loss.backward()
            seconds.append((middle - start, time.perf_counter() - middle))
            module.zero_grad(set_to_none=True)
        found[layers] = [min(side) for side in zip(*seconds[1:], strict=True)]
    beyond = (spec.layers - more) / (more - few)
    forward, backward = (b + beyond * (b - a) for a, b in zip(found[few], found[more], strict=True))
    return forward, backward
