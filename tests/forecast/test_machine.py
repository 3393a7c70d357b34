"""Machines as files: what ships, what is refused and how, parts and multiples of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import ConfigError
from ebbtide.forecasting.doctor.machine_file import machine_toml
from ebbtide.forecasting.simulation.machine import DeviceSpec, Machine, machine_names
from ebbtide.planner.record import ATTENTION, CONVOLUTION, MATMUL, OTHER, Work

IMAGINES = True

SHIPPED = ["a100-node", "h200-node", "laptop", "pc-24gb", "pc-8gb", "v100-node"]

YARD = """
name = "yard"
nodes = 1
devices_per_node = 8
[device]
memory = "32GB"
reserved = "1GB"            # context, library workspaces
flops = "125T"              # peak at the compute precision
efficiency = 0.45           # share of it that large matmuls reach
bandwidth = "900GB/s"
[host]
memory = "240GB"            # of the whole node
cores = 12
bandwidth = "100GB/s"
[ssd]
memory = "0"
read = "3.5GB/s"
write = "2GB/s"
total = "3.5GB/s"           # both together
[links]
host_device = "12GB/s"      # per device, each direction
device_device = "112GB/s"   # collective bandwidth inside a node, per device
node_node = "25GB/s"        # per node
"""
"""The file that is promised."""


def values(**changes: Any) -> dict[str, Any]:
    """A machine's tables, with changes by dotted key; None takes a key away."""
    tables: dict[str, Any] = {
        "name": "test",
        "devices_per_node": 8,
        "device": {"memory": "24GB", "flops": "71T", "bandwidth": "936GB/s"},
        "host": {"memory": "64GB", "cores": 12, "bandwidth": "35GB/s"},
        "links": {"host_device": "22GB/s"},
    }
    for path, value in changes.items():
        *above, name = path.split("__")
        table = tables
        for key in above:
            table = table.setdefault(key, {})
        if value is None:
            del table[name]
        else:
            table[name] = value
    return tables


def test_what_ships() -> None:
    assert machine_names() == SHIPPED
    for name in SHIPPED:
        machine = Machine.read(name)
        assert machine.name == name
        assert machine.device.memory > machine.device.reserved
        assert (machine.device.kind == "cpu") == (name == "laptop")
        assert machine.host.reserved or name == "v100-node"


def test_the_promised_file(tmp_path: Path) -> None:
    path = tmp_path / "yard.toml"
    path.write_text(YARD)
    machine = Machine.read(path)
    assert machine.devices == 8
    assert (machine.device.memory, machine.device.flops, machine.device.bandwidth) == (32e9, 125e12, 900e9)
    assert (machine.ssd.memory, machine.ssd.total, machine.links.node_node) == (0, 3.5e9, 25e9)
    assert Machine.read("v100-node") == Machine.read(values_of(machine) | {"name": "v100-node"})


def values_of(machine: Machine) -> dict[str, Any]:
    return json.loads(json.dumps(machine.to_dict()))


def test_units_of_rates_and_operations() -> None:
    written = values(device__bandwidth="12GiB/s", device__flops="1.9P", host__bandwidth=12_000_000_000)
    machine = Machine.read(written | {"device": written["device"] | {"matmul": [[10, "350G"], [20.5, 4e11]]}})
    assert machine.device.bandwidth == 12 * 2**30
    assert machine.device.flops == 1.9e15
    assert machine.host.bandwidth == 12e9
    assert machine.device.matmul == ((10.0, 350e9), (20.5, 4e11))


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"name": None}, ["'name' is missing"]),
        ({"device__memory": None}, ["'device.memory' is missing"]),
        ({"links": None}, ["'links' is missing", "a table"]),
        ({"host": "64GB"}, ["'host'", "a table of settings ([host])", "'64GB'"]),
        ({"nods": 1}, ["unknown machine key 'nods'", "did you mean 'nodes'?"]),
        ({"device__bandwith": "1GB/s"}, ["'device.bandwith'", "did you mean 'device.bandwidth'?"]),
        ({"device__cores": 8}, ["'device.cores'", "did you mean 'host.cores'?"]),
        ({"memory": "1GB"}, ["unknown machine key 'memory'", "did you mean 'device.memory'?"]),
        ({"device__memory": "0"}, ["'device.memory'", "above zero", "found '0'"]),
        ({"device__memory": "24Gb"}, ["'device.memory'", "did you mean '24GB'?"]),
        ({"device__memory": -1}, ["'device.memory'", "found -1"]),
        ({"device__memory": 24}, ["'device.memory'", "from 1MB to 10PB", "found 24"]),
        ({"device__memory": float("nan")}, ["'device.memory'", "found nan"]),
        ({"device__memory": "auto"}, ["'device.memory'", "found 'auto'"]),
        ({"device__reserved": "24GB"}, ["'device.reserved'", "less than device.memory"]),
        ({"host__reserved": "1TB"}, ["'host.reserved'", "less than host.memory"]),
        ({"device__flops": "0T"}, ["'device.flops'", "'125T'", "found '0T'"]),
        ({"device__flops": "71TFLOPS"}, ["'device.flops'", "did you mean '71T'?"]),
        ({"device__flops": 71}, ["'device.flops'", "from 0.1G", "found 71"]),
        ({"device__flops": 1e30}, ["'device.flops'", "to 1000P", "found 1e+30"]),
        ({"device__flops": float("inf")}, ["'device.flops'", "found inf"]),
        ({"device__efficiency": 0}, ["'device.efficiency'", "above 0 and at most 1", "found 0"]),
        ({"device__efficiency": 1.5}, ["'device.efficiency'", "above 0 and at most 1", "found 1.5"]),
        ({"device__efficiency": "half"}, ["'device.efficiency'", "found 'half'"]),
        ({"device__bandwidth": "12GB"}, ["'device.bandwidth'", "did you mean '12GB/s'?"]),
        ({"device__bandwidth": "100Gbit/s"}, ["'device.bandwidth'", "a byte has 8 bits"]),
        ({"device__bandwidth": "100Gbps"}, ["'device.bandwidth'", "a byte has 8 bits"]),
        ({"device__bandwidth": "-3GB/s"}, ["'device.bandwidth'", "found '-3GB/s'"]),
        ({"device__bandwidth": float("nan")}, ["'device.bandwidth'", "found nan"]),
        ({"host__bandwidth": 35}, ["'host.bandwidth'", "from 1MB/s", "found 35"]),
        ({"links__host_device": 1e30}, ["'links.host_device'", "to 1000TB/s", "found 1e+30"]),
        ({"links__latency": 3}, ["'links.latency'", "seconds from 0 to 1", "found 3"]),
        ({"ssd__read": "0GB/s"}, ["'ssd.read'", "found '0GB/s'"]),
        ({"ssd__totl": "1GB/s"}, ["'ssd.totl'", "did you mean 'ssd.total'?"]),
        ({"host__cores": 0}, ["'host.cores'", "at least 1", "found 0"]),
        ({"devices_per_node": 0}, ["'devices_per_node'", "at least 1", "found 0"]),
        ({"nodes": 2.5}, ["'nodes'", "found 2.5"]),
        ({"nodes": 10**9}, ["'nodes'", "to 1000000"]),
        ({"device__kind": "gpu"}, ["'device.kind'", "'cuda', 'cpu'", "found 'gpu'"]),
        ({"device__matmul": [[10, 1e11], [10, 2e11]]}, ["'device.matmul[1]'", "more operations a byte than the 10"]),
        ({"device__matmul": [[10, 1e11], [5, 2e11]]}, ["'device.matmul[1]'", "found 5"]),
        ({"device__matmul": [[0, 1e11]]}, ["'device.matmul[0][0]'", "above zero"]),
        ({"device__matmul": [[10, "1GB/s"]]}, ["'device.matmul[0][1]'", "operations a second"]),
        ({"device__matmul": [[10, 3.0]]}, ["'device.matmul[0]'", "found 3.0"]),
        ({"device__attention": [[10]]}, ["'device.attention[0]'", "a pair"]),
        ({"device__attention": 3}, ["'device.attention'", "a list"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Machine.read(values(**changes))
    message = str(caught.value)
    assert [fragment for fragment in fragments if fragment not in message] == []
    assert len(message.splitlines()) == 1


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown machine 'v100node'; did you mean 'v100-node'\?.*a100-node"
    ):
        Machine.read("v100node")
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot read the machine file: No such file"):
        Machine.read("nowhere.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("name = \n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        Machine.read(bad)
    bad.write_text(YARD.replace('"900GB/s"', '"900GB"'))
    with pytest.raises(ConfigError, match=r"bad\.toml: machine key 'device.bandwidth'.*'900GB/s'\?"):
        Machine.read(bad)


def test_what_programs_make_may_be_small() -> None:
    assert DeviceSpec(memory=100, flops=1.0, bandwidth=2.0).bandwidth == 2.0


MEASURED = values(
    name='a "quoted" näme',
    device__memory=25_276_502_016,
    devices_per_node=1,
    device__kind="cpu",
    device__flops=415.7e9,
    device__launch=1.7e-5,
    device__pointwise=1 / 3 * 1e10,
    device__matmul=[[21.3, 4.1e10], [219.5, 3.512345e11]],
    device__attention=[[32, 6e10]],
    host__update=39_700_000_001.5,
    ssd__memory="70GB",
    ssd__read="1.84GB/s",
)


@pytest.mark.parametrize("source", [*SHIPPED, "measured"])
def test_written_machines_read_back_equal(source: str, tmp_path: Path) -> None:
    machine = Machine.read(MEASURED if source == "measured" else source)
    assert Machine.read(values_of(machine)) == machine
    path = tmp_path / "machine.toml"
    path.write_text(machine_toml(machine, "Measured by hand:\ntwo lines."), encoding="utf-8")
    assert Machine.read(path) == machine
    assert path.read_text().startswith("# Measured by hand:\n# two lines.\nname = ")


def test_parts_and_multiples() -> None:
    machine = Machine.read(values())
    assert machine.with_devices(8) == machine
    part = machine.with_devices(3)
    assert (part.nodes, part.devices_per_node, part.devices, part.host) == (1, 3, 3, machine.host)
    more = machine.with_devices(64)
    assert (more.nodes, more.devices_per_node, more.devices) == (8, 8, 64)
    assert more.with_devices(8).devices == 8
    for count in (0, -8):
        with pytest.raises(ConfigError, match=f"--gpus: expected at least 1, found {count}"):
            machine.with_devices(count)
    with pytest.raises(
        ConfigError, match="--gpus: expected a multiple of the 8 devices of a node, or fewer, found 12"
    ):
        machine.with_devices(12)


def test_seconds() -> None:
    curve = [[10, 1e12], [110, 3e12]]
    plain = Machine.read(values(device__launch=1e-5, device__efficiency=0.5))
    measured = Machine.read(values(device__launch=0, device__pointwise="1GB/s", device__matmul=curve))
    large, small = Work(MATMUL, 10**12, 10**8), Work(MATMUL, 10**6, 10**9)
    assert plain.seconds(large) == pytest.approx(1e-5 + 1e12 / 35.5e12)
    assert plain.seconds(small) == pytest.approx(1e-5 + 1e9 / 936e9)
    assert plain.seconds(Work(OTHER, 0, 10**9)) == pytest.approx(1e-5 + 1e9 / (0.8 * 936e9))
    assert measured.seconds(Work(OTHER, 0, 10**9)) == pytest.approx(1)
    slow = Machine.read(values(device__launch=1e-5, device__start=1e-4, device__pointwise="1GB/s"))
    assert slow.seconds(Work(OTHER, 0, 10**6)) == pytest.approx(1.1e-4 + 1e-3)
    assert slow.seconds(Work(OTHER, 0, 10**4)) == pytest.approx(1e-5 + 1e-5)  # too few bytes for all cores
    for intensity, rate in ((5, 0.5e12), (10, 1e12), (60, 2e12), (110, 3e12), (1000, 3e12)):
        for kind in (MATMUL, CONVOLUTION):
            work = Work(kind, intensity * 10**9, 10**9)
            assert measured.seconds(work) == pytest.approx(work.flops / rate)
    assert measured.seconds(Work(ATTENTION, 10**12, 10**8)) == pytest.approx(1e12 / 35.5e12)


def test_cores_are_one_device_and_ram_is_counted_once() -> None:
    with pytest.raises(ConfigError, match="devices_per_node"):
        Machine.read(values(device__kind="cpu", devices_per_node=2))
    with pytest.raises(ConfigError, match=r"device\.memory"):
        Machine.read(
            values(device__kind="cpu", devices_per_node=1, device__memory="500GB", host__memory="16GB")
        )
    laptop = Machine.read("laptop").with_memory(device=4 * 10**9, host=6 * 10**9)
    assert laptop.host.memory == 10 * 10**9
