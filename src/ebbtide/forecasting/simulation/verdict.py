"""An outlook in words: whether it fits and how much memory would do, how near the bound it runs, what holds it back,
what would lift it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.outlook import Outlook, Question, look
from ebbtide.units import format_size, round_up


def more_memory(question: Question, found: Outlook) -> list[str]:
    """How much more of the tier that is short would do. Where the cores are the device its memory is RAM: of what there
    is, if that is enough, else of more."""
    before = question.ask.machine
    on_cpu = before.device.kind == "cpu"
    for more_ram in (False, True) if on_cpu else (True,):
        machine = _enlarged(question, found, more_ram)
        if machine is not None:
            changed = [
                tier for tier in ("device", "host", "ssd") if getattr(machine, tier) != getattr(before, tier)
            ]
            return [
                " and ".join(
                    f'{tier}.memory = "{_megabytes(getattr(machine, tier).memory)}"' for tier in changed
                )
            ]
    return []


def _enlarged(question: Question, found: Outlook, more_ram: bool) -> Machine | None:
    """The machine with as much more memory as would do; several tries, for chunks do not divide as bytes do."""
    machine, short = question.ask.machine, found.short
    for _ in range(6):
        if short is None:
            return None
        machine = _with_more(machine, short.tier, short.bytes, more_ram)
        if not more_ram and machine.device.memory > machine.host.memory - machine.host.reserved:
            return None
        other = look(replace(question, ask=replace(question.ask, machine=machine)), quick=True)
        if other.fits:
            return machine
        short = other.short
    return None


def _with_more(machine: Machine, tier: str, count: int, more_ram: bool) -> Machine:
    each = 1 if tier == "device" else machine.devices_per_node
    tiers = {tier}
    if machine.device.kind == "cpu" and tier == "device" and more_ram:
        tiers.add("host")  # it is the same RAM
    changes: dict[str, Any] = {}
    for name in tiers:
        section = getattr(machine, name)
        changes[name] = replace(section, memory=round_up(section.memory + count * each, 10**6))
    return replace(machine, **changes)


def _megabytes(count: int) -> str:
    return f"{count // 10**6}MB" if count < 10**11 else f"{-(-count // 10**9)}GB"


NAMES = {
    "compute": "computing",
    "host": "updates on the host",
    "update": "updates on the host",
    "device update": "updates on the device",
    "norm": "the gradients' norm",
    "host_to_device": "host-to-device",
    "device_to_host": "device-to-host",
    "ssd_read": "SSD reads",
    "ssd_write": "SSD writes",
    "disk": "the SSD",
    "wire": "the links between devices",
    "memory": "the host's memory bandwidth",
    "activations": "activations on their way",
}
WORTH = 1.03
"""A change is worth saying where a step becomes faster by this factor."""


@dataclass(frozen=True)
class Lift:
    """What a change of the machine would do."""

    change: str
    faster: float


def _scaled(part: str, key: str, factor: float) -> Callable[[Machine], Machine]:
    def change(machine: Machine) -> Machine:
        section = getattr(machine, part)
        value = getattr(section, key)
        if value is None:
            return machine
        scaled = int(value * factor) if isinstance(value, int) else value * factor
        return replace(machine, **{part: replace(section, **{key: scaled})})

    return change


def _faster_host(machine: Machine) -> Machine:
    return _scaled("host", "update", 2)(_scaled("host", "bandwidth", 2)(machine))


def _faster_wire(machine: Machine) -> Machine:
    return _scaled("links", "node_node", 2)(_scaled("links", "device_device", 2)(machine))


def _faster_device(machine: Machine) -> Machine:
    device = machine.device
    matmul = tuple((x, 2 * y) for x, y in device.matmul)
    attention = tuple((x, 2 * y) for x, y in device.attention)
    return replace(
        machine, device=replace(device, flops=2 * device.flops, matmul=matmul, attention=attention)
    )


def _faster_disk(machine: Machine) -> Machine:
    for key in ("read", "write", "total"):
        machine = _scaled("ssd", key, 2)(machine)
    return machine


def _more_memory(tier: str) -> Callable[[Machine], Machine]:
    def change(machine: Machine) -> Machine:
        device, host = machine.device, machine.host
        more = getattr(machine, tier).memory // 4
        if tier == "device":
            device = replace(device, memory=device.memory + more)
        if tier == "host" or device.kind == "cpu":  # where the cores are the device, it is the same RAM
            host = replace(host, memory=host.memory + more)
        return replace(machine, device=device, host=host)

    return change


def _memory(tier: str) -> tuple[str, Callable[[Machine], Machine]]:
    name = {"device": "device memory", "host": "RAM"}[tier]
    return f"a quarter more {name}", _more_memory(tier)


_LINK = ("twice the host-to-device rate", _scaled("links", "host_device", 2))
_HOST = ("twice the host's memory bandwidth", _faster_host)
_DISK = ("an SSD twice as fast", _faster_disk)
_WIRE = ("links between devices twice as fast", _faster_wire)
_COMPUTE = ("a device that computes twice as fast", _faster_device)

CHANGES: Mapping[str, tuple[tuple[str, Callable[[Machine], Machine]], ...]] = {
    "host_to_device": (_LINK, _memory("device")),
    "device_to_host": (_LINK, _memory("device")),
    "activations": (_LINK, _memory("device")),
    "update": (_HOST, _memory("device")),
    "host": (_HOST, _memory("device")),
    "memory": (_HOST, _memory("device")),
    "ssd_read": (_memory("host"), _DISK),
    "ssd_write": (_memory("host"), _DISK),
    "disk": (_memory("host"), _DISK),
    "wire": (_WIRE,),
    "compute": (_COMPUTE,),
}


def _memories(machine: Machine) -> tuple[int, ...]:
    return machine.device.memory, machine.host.memory, machine.ssd.memory


def lifts(question: Question, found: Outlook) -> list[Lift]:
    """What would make the step faster, most first."""
    if not found.step_seconds:
        return []
    tried = []
    for name, change in CHANGES.get(found.bottleneck or "", ()):
        machine = change(question.ask.machine)
        changed = replace(question, ask=replace(question.ask, machine=machine))
        if _memories(machine) == _memories(question.ask.machine):
            again = look(changed, plan=found.plan, in_slices=found.exchange_in_slices)
            before, after = found.step_seconds, again.step_seconds
        else:  # another plan: like is compared with like
            before = look(question, quick=True).step_seconds or found.step_seconds
            after = look(changed, quick=True).step_seconds
        if after:
            tried.append(Lift(name, before / after))
    return sorted((lift for lift in tried if lift.faster >= WORTH), key=lambda lift: -lift.faster)


def sentence(found: Outlook, lifted: list[Lift]) -> str:
    if not found.fits:
        assert found.short is not None
        tier = {"device": "device memory", "host": "RAM", "ssd": "SSD"}[found.short.tier]
        return f"does not fit: {format_size(found.short.bytes)} of {tier} a device are missing"
    assert found.achieved_over_bound is not None
    text = f"fits; {100 * found.achieved_over_bound:.0f} % of the bound; "
    stall = next((stall for stall in found.stalls if stall.cause == found.bottleneck), None)
    held = NAMES.get(found.bottleneck or "", str(found.bottleneck))
    text += f"held back by {held}"
    if stall is not None and stall.moment >= 0:
        text += f" ({stall.seconds:.3g} s, most at moment {stall.moment})"
    if lifted:
        text += f"; {lifted[0].change} would make a step {lifted[0].faster:.2f} times as fast"
    return text
