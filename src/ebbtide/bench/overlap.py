"""Does one resource work while another does? Every piece of work is a sleep of the same length.

A chain of layers computes by sleeping, links and disks are throttled, an update sleeps. In each case two of these have
the same to do in a step, and a step that overlaps them perfectly takes as long as one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.devices.cpu_device import CpuBackend
from ebbtide.engine import Engine
from ebbtide.kernels import Kernels, Operands, Rule, cpu_kernels
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.space import DiskSpace
from ebbtide.runtime.process_tiers import Tiers

LAYERS = 12
ELEMENTS = 1 << 16
CHUNK = 2 * ELEMENTS
STATE = 10 * ELEMENTS
WARM_UP = 3


@dataclass(frozen=True)
class OverlapCase:
    """What sleeps, in units of one sleep a layer (or chunk); `units`: of the busier resource in a step."""

    units: int
    forward: bool = False
    backward: bool = False
    update: bool = False
    links: tuple[str, ...] = ()
    """Throttled so that one chunk's parameters (or gradients) take a unit."""
    disks: tuple[str, ...] = ()
    """Throttled so that one chunk's state, or its parameters where these are frozen, take a unit."""
    trained: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)


_ON_SSD: dict[str, Any] = {"placement": "host", "updates": "in-backward", "host": {"memory": 0}}
CASES = {
    "compute, host to device": OverlapCase(
        2 * LAYERS, forward=True, backward=True, links=("host_to_device",), trained=False
    ),
    "compute, device to host": OverlapCase(
        LAYERS,
        backward=True,
        links=("device_to_host",),
        config={"placement": "host", "updates": "in-backward"},
    ),
    "compute, update on the host": OverlapCase(
        LAYERS, forward=True, update=True, config={"placement": "host"}
    ),
    "compute, SSD reads": OverlapCase(
        2 * LAYERS, forward=True, backward=True, disks=("ssd_read",), trained=False, config=_ON_SSD
    ),
    "compute, SSD reads of state": OverlapCase(LAYERS, backward=True, disks=("ssd_read",), config=_ON_SSD),
    "compute, SSD writes of state": OverlapCase(LAYERS, backward=True, disks=("ssd_write",), config=_ON_SSD),
    "SSD reads, SSD writes": OverlapCase(LAYERS, disks=("ssd_read", "ssd_write"), config=_ON_SSD),
    "update, SSD reads": OverlapCase(LAYERS, update=True, disks=("ssd_read",), config=_ON_SSD),
    "update, SSD writes": OverlapCase(LAYERS, update=True, disks=("ssd_write",), config=_ON_SSD),
}


def run(unit: float = 0.02, repeats: int = 5, cases: tuple[str, ...] = tuple(CASES)) -> dict[str, Any]:
    """`unit`: seconds of a sleep. Rows: a step as a multiple of what one of the two resources has to do."""
    rows = []
    for name in cases:
        case = CASES[name]
        ideal = case.units * unit
        on, off = (_measure(case, unit, repeats, prefetch) / ideal for prefetch in (True, False))
        rows.append({"resources": name, "pipelined": on, "on_demand": off})
    return {"unit_seconds": unit, "layers": LAYERS, "repeats": repeats, "rows": rows}


def _measure(case: OverlapCase, unit: float, repeats: int, prefetch: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(case, unit, prefetch, Path(folder))
        try:
            seconds = []
            for _ in range(WARM_UP + repeats):
                start = time.perf_counter()
                engine.backward(engine(torch.ones(1, requires_grad=True)))
                engine.step()
                seconds.append(time.perf_counter() - start)
        finally:
            engine.close()
    return statistics.median(seconds[WARM_UP:])


def _engine(case: OverlapCase, unit: float, prefetch: bool, folder: Path) -> Engine:
    moved = CHUNK if not case.trained else STATE
    backend = CpuBackend(rates=dict.fromkeys(case.links, CHUNK / unit))
    one_tier = case.config.get("host") == {"memory": 0}
    budgets = {
        "device": 4 * CHUNK + (2 * STATE + LAYERS * CHUNK if one_tier and case.trained else 0) + (1 << 18),
        "host": 0 if one_tier else 64 * LAYERS * CHUNK,
        "ssd": 64 * LAYERS * CHUNK if one_tier else 0,
    }
    disk = None
    if one_tier:
        disk = DiskSpace([folder], budgets["ssd"], rates=dict.fromkeys(case.disks, moved / unit))
    config = Config.read(
        {"layout": "tensor", "prefetch": prefetch, "device": {"kind": "cpu", "memory": budgets["device"]}}
        | dict(case.config)
    )
    module = _Chain(case, unit)
    engine = Engine(module, config, tiers=Tiers(backend, Ledger(budgets), disk))
    if case.update:
        updates = engine._session.updates.chunks
        updates.kernels = {tier: _Slow(unit) for tier in ("device", "host")}
    return engine


class _Slow:
    """The kernels, with updates that take a unit of time for all elements of a layer."""

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._kernels: Kernels = cpu_kernels()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        for operands, coefficients in pieces:
            time.sleep(self._unit * operands.parameter.numel() / ELEMENTS)
            self._kernels.update(rule, operands, coefficients)


class _Chain(nn.Module):
    def __init__(self, case: OverlapCase, unit: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _SleepingLayer(case.trained, unit * case.forward, unit * case.backward) for _ in range(LAYERS)
        )
        # An engine without anything to train has nothing to step.
        self.bias = nn.Parameter(torch.zeros(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x + self.bias[:1]).sum()


class _SleepingLayer(nn.Module):
    def __init__(self, trained: bool, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMENTS), requires_grad=trained)
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Sleep.apply(x, self.weight, *self.seconds)
        return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ahead: float, back: float) -> torch.Tensor:
        time.sleep(ahead)
        ctx.save_for_backward(weight)
        ctx.back = back
        return x * weight[:1].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.back)
        trained = ctx.needs_input_grad[1]
        return gradient, torch.full_like(weight, 1e-3) if trained else None, None, None
