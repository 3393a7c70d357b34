"""A machine as a TOML file that a person can read and change, and that reads back equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from ebbtide.errors import ConfigError
from ebbtide.forecasting.simulation.machine import Machine, MachineSection
from ebbtide.strict import plain
from ebbtide.units import parse_flops, parse_rate, parse_size

COMMENTS = {
    "device.kind": "cpu: the host's cores compute, and the memory of device and host is the same RAM",
    "device.precision": "what flops, matmul and attention were measured in",
    "device.reserved": "taken by others, not for the budget",
    "device.flops": "at the compute precision, operations a second",
    "device.efficiency": "share of it that large products reach",
    "device.bandwidth": "read and written, together",
    "device.launch": "seconds that an operator takes however small it is",
    "device.start": "seconds that they take beside, until all cores are at work",
    "device.pointwise": "bytes a second of operators that only read and write",
    "device.matmul": "[operations a byte, operations a second]",
    "device.attention": "the same of attention, forward and backward",
    "host.memory": "of the whole node",
    "host.reserved": "taken by others, not for the budget",
    "host.bandwidth": "read and written, together",
    "host.update": "bytes a second that the optimizer's update streams",
    "ssd.memory": "free where it was measured",
    "ssd.total": "read and written at once, together",
    "ssd.endurance": "bytes that may be written in the disks' life; 0: not known",
    "links.host_device": "each device, each direction",
    "links.device_device": "of a collective inside a node, each device",
    "links.node_node": "each node",
    "links.latency": "seconds of a move beside its bytes",
}
_SIZES = {"memory", "reserved", "endurance"}
_FLOPS = {"flops"}
_RATES = {
    "bandwidth", "pointwise", "update", "read", "write", "total", "host_device", "device_device", "node_node",
}  # fmt: skip
_CURVES = {"matmul", "attention"}


def machine_toml(machine: Machine, heading: str = "") -> str:
    """The file's text, with every key that is not left out and what it means."""
    lines = [f"# {line}" for line in heading.splitlines()]
    sections = [one for one in fields(machine) if isinstance(getattr(machine, one.name), MachineSection)]
    for one in fields(machine):
        if one not in sections:
            lines.append(f"{one.name} = {json.dumps(getattr(machine, one.name), ensure_ascii=False)}")
    for one in sections:
        lines += ["", f"[{one.name}]", *_lines(getattr(machine, one.name))]
    return "\n".join(lines) + "\n"


def _lines(section: MachineSection) -> Iterator[str]:
    for name, value in plain(section).items():
        comment = COMMENTS.get(f"{section.path}.{name}", "")
        if name in _CURVES:
            if value:
                yield f"{name} = [{'  # ' + comment if comment else ''}"
                yield from (f"  [{x!r}, {_flops(y)}]," for x, y in value)
                yield "]"
            continue
        written = f"{name} = {_written(name, value)}"
        yield f"{written:<28}# {comment}" if comment else written


def _written(name: str, value: Any) -> str:
    if name in _SIZES:
        return _with_unit(value, parse_size, (("GB", 1e9), ("MB", 1e6)))
    if name in _RATES:
        return _with_unit(value, parse_rate, (("GB/s", 1e9), ("MB/s", 1e6)))
    return _flops(value) if name in _FLOPS else json.dumps(value, ensure_ascii=False)


def _flops(value: float) -> str:
    return _with_unit(value, parse_flops, (("T", 1e12), ("G", 1e9)))


def _with_unit(value: float, parse: Callable[[str], float], units: tuple[tuple[str, float], ...]) -> str:
    """The shortest text that reads back as the very value."""
    for unit, scale in units:
        text = f"{value / scale:.6f}".rstrip("0").rstrip(".") + unit
        try:
            if value >= scale and parse(text) == value:
                return f'"{text}"'
        except ConfigError:
            continue
    return repr(value)
