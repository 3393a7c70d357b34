"""All measurements of this machine, and the machine that they make."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide.devices.cpu_device import fast_dtype
from ebbtide.forecasting.doctor import disk_rates, operators, ram, spin
from ebbtide.forecasting.doctor.advice import advise
from ebbtide.forecasting.doctor.operators import Operators
from ebbtide.forecasting.doctor.system import System, read_system
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.runtime.budgets import MARGIN
from ebbtide.tracing.standalone import NAMES

MIB = 1 << 20
DISK_SHARE = 0.9
"""Of what is free on a disk, what may be used."""


@dataclass(frozen=True)
class Findings:
    machine: Machine
    raw: dict[str, Any]
    """Every measurement, in bytes, seconds and their quotients."""
    advice: list[str]


@dataclass(frozen=True)
class Effort:
    """How much is measured: a minute's worth, or a few seconds'."""

    rounds: int
    stream: int
    elements: int
    file: int
    disk_seconds: float
    pass_seconds: float
    """That a pass of a block may take to be measured."""
    shapes: int
    spinning: bool


FULL = Effort(5, 256 * MIB, 24_000_000, 1024 * MIB, 2.0, 0.8, len(operators.SHAPES), True)
QUICK = Effort(2, 64 * MIB, 8_000_000, 128 * MIB, 0.5, 0.6, 6, False)
BRIEF = Effort(3, 128 * MIB, 16_000_000, 512 * MIB, 0.3, 0.8, len(operators.SHAPES), False)
"""To be repeated: as much as the full one, in fewer rounds."""


def examine(
    folder: Path, effort: Effort = FULL, report: Callable[[str], None] = lambda text: None
) -> Findings:
    """Measures the machine. `folder` is where the disk is measured; `report` is told what is being done."""
    system = read_system()
    device, dtype = compute_device()
    raw: dict[str, Any] = {"system": asdict(system), "device": _device_name(device), "quick": effort is QUICK}
    raw["threads"] = torch.get_num_threads()
    report("disk")  # first: a folder that will not do is said before anything takes time
    raw["disk"] = asdict(disk_rates.measure(folder, effort.file, effort.rounds, effort.disk_seconds))
    report("memory")
    raw["streams"] = ram.streams(torch.get_num_threads(), effort.stream, effort.rounds)
    raw["update"] = ram.update(torch.get_num_threads(), effort.elements, effort.rounds)
    raw["copies"] = ram.background_copies(effort.stream // 4, effort.rounds)
    if device.type == "cuda":
        from ebbtide.forecasting.doctor import cuda_rates

        report("links")
        raw["cuda"] = cuda_rates.links(device, effort.stream, effort.rounds) | {
            "memory": cuda_rates.memory(device)
        }
    report("operators")
    raw["precision"] = NAMES[dtype]
    raw["products"] = operators.single_product(
        device, {NAMES[one]: one for one in (torch.float32, dtype)}, effort.rounds
    )
    shapes = (
        len(operators.SHAPES) if device.type == "cuda" else effort.shapes
    )  # small ones say little of a GPU
    measurement = operators.Measurement(device, dtype, shapes, effort.pass_seconds)
    measurement.warm_up()
    for _ in range(effort.rounds):
        measurement.round()
    found = measurement.result()
    raw["operators"] = asdict(found)
    if effort.spinning:
        report("OpenMP")
        raw["spinning"] = spin.cost_of_spinning()
    machine = Machine.read(_values(system, raw, {"precision": raw["precision"], **device_values(found)}))
    return Findings(machine, raw, advise(system, raw))


def compute_device() -> tuple[torch.device, torch.dtype]:
    """Where the engine would compute, and in what it should: bf16 unless that has to be emulated."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), fast_dtype()
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16 if has_bf16 else torch.float16


def device_values(found: Operators) -> dict[str, Any]:
    """The keys of [device] that operators make."""
    return {
        "flops": found.flops,
        "efficiency": min(1.0, round(found.large / found.flops, 3)),
        "launch": found.launch,
        "pointwise": found.pointwise,
        "start": found.start,
        "matmul": [list(point) for point in found.matmul],
        "attention": [list(point) for point in found.attention],
    }


def _values(system: System, raw: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """The machine's tables."""
    stream = _rounded(max(raw["streams"]["copy"], raw["streams"]["add"], raw["update"]))
    # What `auto` budgets leave alone is not for the forecast either.
    taken = system.memory - int(system.available * (1 - MARGIN))
    ram = {"memory": system.memory // 10**6 * 10**6, "reserved": _whole_megabytes(taken)}
    host = {**ram, "cores": system.cores, "bandwidth": stream, "update": _rounded(raw["update"])}
    links = {"host_device": _rounded(raw["copies"]["rate"]), "latency": _rounded(raw["copies"]["latency"])}
    device = device | ram | {"kind": "cpu", "bandwidth": stream}
    if "cuda" in raw:
        found = raw["cuda"]
        size = found["memory"]
        device |= {"kind": "cuda", "memory": size["total"], "reserved": _whole_megabytes(size["taken"])}
        device["bandwidth"] = _rounded(found["inside"])
        links = {"host_device": _rounded(found["both_each"]), "latency": _rounded(found["latency"])}
        if "device_device" in found:
            links["device_device"] = _rounded(found["device_device"])
    values = {
        "name": _slug(raw["device"]),
        "device": device,
        "host": host,
        "links": links,
        "ssd": _ssd(raw["disk"]),
    }
    return values | {"devices_per_node": torch.cuda.device_count() if "cuda" in raw else 1}


def _ssd(found: dict[str, Any]) -> dict[str, Any]:
    usable = 0 if found["file_system"] in disk_rates.MEMORY_BACKED else int(found["free"] * DISK_SHARE)
    rates = {"read": found["read"], "write": found["write"], "total": found["mixed"]}
    return {"memory": usable // 10**9 * 10**9, **{name: _rounded(rate) for name, rate in rates.items()}}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    system = read_system()
    return f"{system.cpu}, {system.cores} cores"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "machine"


def _whole_megabytes(count: int) -> int:
    return max(0, -(-count // 10**6) * 10**6)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
