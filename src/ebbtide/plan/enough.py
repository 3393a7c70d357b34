"""How much memory would do for what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ebbtide.plan.forecast import Outlook, Question, look
from ebbtide.plan.machine import Machine
from ebbtide.units import round_up


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
