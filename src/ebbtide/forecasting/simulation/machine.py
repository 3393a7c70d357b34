"""What the hardware offers: bytes by tier, rates by link and unit. From a TOML file, read strictly.

Rates are a second's; all of them are what the unit reaches in practice, but for `flops`, of which `efficiency` is
the share that large matrix products reach. Where a table of rates was measured, it goes before both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ebbtide.errors import ConfigError, nearest
from ebbtide.planner.record import ATTENTION, CONVOLUTION, MATMUL, Work
from ebbtide.strict import (
    Check,
    Key,
    Section,
    build,
    choice,
    number,
    optional,
    pair,
    plain,
    read_file,
    refuse,
    several,
    size,
    text,
    whole,
)
from ebbtide.units import format_size, nearest_flops, nearest_rate, parse_flops, parse_rate

Curve = tuple[tuple[float, float], ...]


def _quantity(parse: Callable[[Any], float], near: Callable[[object], str], allowed: str) -> Check:
    def check(key: Key, value: Any) -> float:
        try:
            return parse(value)
        except ConfigError:
            raise refuse(key, value, allowed, near(value)) from None

    return check


rate = _quantity(parse_rate, nearest_rate, "a rate above zero such as '12GB/s'")
flops = _quantity(parse_flops, nearest_flops, "operations a second above zero such as '125T'")
_seconds = number("seconds from 0 to 1", lambda x: 0 <= x <= 1)
_share = number("a share above 0 and at most 1", lambda x: 0 < x <= 1)
_intensity = number("operations a byte, above zero", lambda x: x > 0)
_points = several(pair(_intensity, flops))


def _curve(key: Key, value: Any) -> Curve:
    curve: Curve = _points(key, value)
    for place, (before, after) in enumerate(pairwise(curve), 1):
        if after[0] <= before[0]:
            raise refuse(
                key.at(place),
                after[0],
                f"more operations a byte than the {before[0]:g} of the point before it",
            )
    return curve


@dataclass(frozen=True)
class MachineSection(Section):
    noun: ClassVar[str] = "machine key"


@dataclass(frozen=True)
class DeviceSpec(MachineSection):
    path: ClassVar[str] = "device"

    memory: Annotated[int, size(least=1, auto=False)]
    flops: Annotated[float, flops]
    """The peak at the compute precision."""
    bandwidth: Annotated[float, rate]
    kind: Annotated[str, choice("cuda", "cpu")] = "cuda"
    """`cpu`: the host's cores compute, so copies and updates share them, and the memory of device and host is
    the same RAM, stated twice."""
    precision: Annotated[str | None, optional(choice("bf16", "fp16", "fp32"))] = None
    """What products were measured in; left out, not known."""
    reserved: Annotated[int, size(least=0, auto=False)] = 0
    """Context and library workspaces: not for the budget."""
    efficiency: Annotated[float, _share] = 0.5
    launch: Annotated[float, _seconds] = 4e-6
    """What an operator takes however small it is."""
    pointwise: Annotated[float | None, optional(rate)] = None
    """What operators that only read and write reach; left out, 0.8 of `bandwidth`."""
    start: Annotated[float, _seconds] = 0.0
    """What such an operator takes beside `launch` and its bytes: until all cores are at work."""
    matmul: Annotated[Curve, _curve] = ()
    """(operations a byte, operations a second), measured; between points, straight lines."""
    attention: Annotated[Curve, _curve] = ()


@dataclass(frozen=True)
class HostSpec(MachineSection):
    path: ClassVar[str] = "host"

    memory: Annotated[int, size(least=0, auto=False)]
    """Of the whole node, as are `cores` and `bandwidth`."""
    cores: Annotated[int, whole()]
    bandwidth: Annotated[float, rate]
    reserved: Annotated[int, size(least=0, auto=False)] = 0
    """The system's and the processes' own."""
    update: Annotated[float | None, optional(rate)] = None
    """Bytes that the optimizer's update streams; left out, 0.8 of `bandwidth`."""


@dataclass(frozen=True)
class SsdSpec(MachineSection):
    path: ClassVar[str] = "ssd"

    memory: Annotated[int, size(least=0, auto=False)] = 0
    read: Annotated[float, rate] = 3.5e9
    write: Annotated[float, rate] = 2e9
    total: Annotated[float, rate] = 3.5e9
    """Reads and writes at the same time, together."""
    endurance: Annotated[int, size(least=0, auto=False)] = 0
    """Bytes that may be written in the disks' life (TBW); 0: not known."""


@dataclass(frozen=True)
class LinkSpec(MachineSection):
    path: ClassVar[str] = "links"

    host_device: Annotated[float, rate]
    """Each device, each direction."""
    device_device: Annotated[float, rate] = 100e9
    """Of a collective inside a node, each device."""
    node_node: Annotated[float, rate] = 10e9
    """Each node."""
    latency: Annotated[float, _seconds] = 2e-5
    """Of a move or collective, beside its bytes."""


@dataclass(frozen=True)
class Machine(MachineSection):
    name: Annotated[str, text]
    device: DeviceSpec
    host: HostSpec
    links: LinkSpec
    ssd: SsdSpec = SsdSpec()
    nodes: Annotated[int, whole()] = 1
    devices_per_node: Annotated[int, whole()] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in (self.device, self.host):
            if one.reserved >= one.memory and one.memory:
                raise ConfigError(
                    f"{one.key('reserved')}: expected less than {one.key('memory').path}, which is "
                    f"{format_size(one.memory)}, found {format_size(one.reserved)}"
                )

        if self.device.kind == "cpu" and self.devices_per_node > 1:
            raise ConfigError(
                f"{self.key('devices_per_node')}: expected 1 where device.kind is 'cpu' (all cores are one device), "
                f"found {self.devices_per_node}"
            )
        if self.device.kind == "cpu" and self.device.memory > self.host.memory:
            raise ConfigError(
                f"{self.device.key('memory')}: expected at most host.memory ({format_size(self.host.memory)}), for "
                f"it is the same RAM where device.kind is 'cpu', found {format_size(self.device.memory)}"
            )

    @classmethod
    def read(cls, source: Machine | Mapping[str, object] | str | Path) -> Machine:
        """From a machine, a table, the path of a TOML file, or the name of a machine that ships with the package."""
        if isinstance(source, Machine):
            return source
        if isinstance(source, Mapping):
            return _plausible(build(cls, source))
        path = find_machine(source)
        try:
            return _plausible(build(cls, read_file(path, "machine")))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return plain(self)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def with_devices(self, count: int) -> Machine:
        """The part of it that has `count` devices; more than it has adds nodes of the same kind. A part of a node
        keeps the node's host."""
        if count < 1:
            raise ConfigError(f"--gpus: expected at least 1, found {count}")
        if count <= self.devices_per_node:
            return replace(self, nodes=1, devices_per_node=count)
        if count % self.devices_per_node:
            raise ConfigError(
                f"--gpus: expected a multiple of the {self.devices_per_node} devices of a node, or fewer, found {count}"
            )
        return replace(self, nodes=count // self.devices_per_node)

    def with_memory(
        self, device: int | None = None, host: int | None = None, ssd: int | None = None
    ) -> Machine:
        """The machine with other budgets: of a device, of a node's host, of a node's disks. What is given is the budget
        itself: nothing of it is reserved."""
        devices, hosts, disks = self.device, self.host, self.ssd
        if device is not None:
            devices = replace(devices, memory=device, reserved=0)
        if host is not None:
            # Where the cores are the device, its memory is a part of the host's; the budget is what lies beside it.
            beside = devices.memory if devices.kind == "cpu" else 0
            hosts = replace(hosts, memory=beside + host, reserved=0)
        if ssd is not None:
            disks = replace(disks, memory=ssd)
        return replace(self, device=devices, host=hosts, ssd=disks)

    def seconds(self, work: Work) -> float:
        """What an operator takes on the device when it has it for itself."""
        return self._rates.seconds(work)

    @cached_property
    def _rates(self) -> _Rates:
        return _Rates(self.device)


_RATES = (
    "bandwidth",
    "pointwise",
    "update",
    "read",
    "write",
    "total",
    "host_device",
    "device_device",
    "node_node",
)
_PLAUSIBLE: dict[str, tuple[float, float, str]] = {
    "memory": (1e6, 1e16, "a size from 1MB to 10PB, such as '24GB'"),
    "flops": (1e8, 1e18, "operations a second from 0.1G to 1000P, such as '125T'"),
    "nodes": (1, 1e6, "a whole number from 1 to 1000000"),
    "devices_per_node": (1, 1e4, "a whole number from 1 to 10000"),
    "cores": (1, 1e5, "a whole number from 1 to 100000"),
} | dict.fromkeys(_RATES, (1000000.0, 1000000000000000.0, "a rate from 1MB/s to 1000TB/s, such as '12GB/s'"))
"""What some hardware could offer, by key: a number without its unit (12 for 12GB/s) lies outside."""


def _plausible(machine: Machine) -> Machine:
    """What people write is checked for sense; what programs make may be as small as they like."""
    for section in (machine, machine.device, machine.host, machine.ssd, machine.links):
        for one in fields(section):
            least, most, allowed = _PLAUSIBLE.get(one.name, (0.0, 0.0, ""))
            value = getattr(section, one.name)
            if allowed and value and not least <= value <= most:
                raise refuse(section.key(one.name), value, allowed)
    for name in ("matmul", "attention"):
        for place, (_, value) in enumerate(getattr(machine.device, name)):
            least, most, allowed = _PLAUSIBLE["flops"]
            if not least <= value <= most:
                raise refuse(machine.device.key(name).at(place), value, allowed)
    return machine


ALL_CORES = 1 << 17
"""Bytes from which operators that only read and write give all cores something to do."""


class _Rates:
    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self.pointwise = device.pointwise or 0.8 * device.bandwidth
        self.large = device.flops * device.efficiency
        self.curves = {MATMUL: device.matmul, ATTENTION: device.attention, CONVOLUTION: device.matmul}
        self._known: dict[Work, float] = {}

    def seconds(self, work: Work) -> float:
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = self._compute(work)
        return found

    def _compute(self, work: Work) -> float:
        if not work.flops:
            start = self.device.start if work.bytes >= ALL_CORES else 0.0
            return self.device.launch + start + work.bytes / self.pointwise
        curve = self.curves.get(work.kind, ())
        if not curve:
            return self.device.launch + max(work.flops / self.large, work.bytes / self.device.bandwidth)
        return self.device.launch + work.flops / _on(curve, work.flops / max(work.bytes, 1))


def _on(curve: Curve, x: float) -> float:
    """The value at x, in straight lines between points; level outside them, but through zero below the first."""
    place = bisect_left([point[0] for point in curve], x)
    if place == 0:
        return curve[0][1] * x / curve[0][0]
    if place == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


FOLDER = Path(__file__).parent / "machines"


def machine_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_machine(name: str | Path) -> Path:
    """A described machine's file, or a path as it is."""
    path = Path(name)
    if path.suffix or len(path.parts) > 1 or path.is_file():
        return path
    if str(name) in machine_names():
        return FOLDER / f"{name}.toml"
    raise ConfigError(
        f"--machine: unknown machine {str(name)!r}{nearest(str(name), machine_names())}; expected a TOML file or one of "
        f"{', '.join(machine_names())}"
    )
