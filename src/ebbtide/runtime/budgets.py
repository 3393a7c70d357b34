"""How many bytes each tier has, and whether the model data fits: decided once, before anything is moved."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ebbtide.config import Config
from ebbtide.devices import Backend
from ebbtide.devices.cpu_device import multiplies
from ebbtide.errors import BudgetError, ConfigError, UnsupportedError, warn_user
from ebbtide.memory.budget import Ledger
from ebbtide.memory.dtensors import part_of
from ebbtide.planner.shape import ModelShape
from ebbtide.runtime.parameters.selection import (
    Choice,
)
from ebbtide.units import format_size

MARGIN = 0.05
"""Share of what is free that `auto` leaves alone: the machine has other users."""


def warn_of_slow_products(choice: Choice, kind: str) -> None:
    """Nothing is wrong with the numbers; whoever waits should know for what."""
    slow = sorted({str(d).removeprefix("torch.") for d in choice.dtypes.values() if not multiplies(d)})
    if kind == "cpu" and slow:
        warn_user(
            f"precision: this processor has no instructions for products in {' and '.join(slow)}, and torch takes up to "
            'a hundred times as long for them as in fp32; precision = "fp32" takes at most 2 bytes a parameter more'
        )


def resolve_budgets(config: Config, backend: Backend, neighbours: int = 1) -> dict[str, int]:
    """Bytes of each tier. On a CPU device and host are RAM: without a device budget there is one of them only. Host and
    SSD are the machine's, which `neighbours` processes share."""
    asked = _resolve(config, backend, neighbours)
    return {tier: count if tier == "device" else count // neighbours for tier, count in asked.items()}


def _resolve(config: Config, backend: Backend, neighbours: int) -> dict[str, int]:
    """With the host and the SSD of the machine."""
    free, capacity = backend.available(), backend.capacity()
    device, host = config.device.memory, config.host.memory
    if device == "least" or device == "half":
        host = int(free["host"] * (1 - MARGIN)) if host == "auto" else int(host)
        return {"device": 0, "host": host, "ssd": _ssd_budget(config)}
    for tier, asked in (("device", device), ("host", host)):
        if asked != "auto" and int(asked) > capacity[tier]:
            raise ConfigError(
                f"{tier}.memory: {format_size(int(asked))} asked for, but this machine has "
                f"{format_size(capacity[tier])} in all, or its job no more; set it to {capacity[tier]} or less, or to "
                "'auto'"
            )
    if backend.kind == "cuda":
        device = int(free["device"] * (1 - MARGIN)) if device == "auto" else device
        host = int(free["host"] * (1 - MARGIN)) if host == "auto" else host
        if not host and config.ssd.memory != 0:
            raise ConfigError(
                "host.memory: expected more than 0 where ssd.memory is not, found 0: what is on SSD passes through the "
                "host's memory, and is updated there; give it some, or leave SSD out"
            )
    elif device == "auto" and config.placement != "auto" and host == "auto" and config.ssd.memory == 0:
        host = int(free["device"] * (1 - MARGIN)) // 2  # a named placement needs both tiers
        device = host // neighbours
    elif device == "auto":
        host = 0 if host == "auto" else host
        device = max(0, int(free["device"] * (1 - MARGIN)) - int(host)) // neighbours
    else:
        host = max(0, int(free["host"] * (1 - MARGIN)) - device * neighbours) if host == "auto" else host
    return {"device": int(device), "host": int(host), "ssd": _ssd_budget(config)}


def _ssd_budget(config: Config) -> int:
    """Where `auto` is asked for, what the folders have free, each of them as much as the others."""
    if config.ssd.memory == 0:
        return 0
    if not config.ssd.folder:
        raise ConfigError(
            "ssd.folder: a folder is needed where ssd.memory is not 0; name one on a fast disk (--ssd-dir)"
        )
    if config.ssd.memory != "auto":
        return int(config.ssd.memory)
    free = []
    for folder in config.ssd.folder:
        try:
            facts = os.statvfs(folder)
        except OSError as error:
            raise ConfigError(f"ssd.folder: {folder!r} cannot be used: {error.strerror}") from None
        free.append(facts.f_bavail * facts.f_frsize)
    return int(min(free) * len(free) * (1 - MARGIN))


def check_fit(ledger: Ledger, config: Config, shape: ModelShape, spared: int) -> None:
    """Refuses model data that no placement could hold, before anything is allocated. `spared`: of the device, what
    is reserved and can be given up."""
    grads = sum(shape.gradient_bytes) if config.updates != "in-backward" else 0
    if config.resolved_master == "separate" and config.accumulate == 1:
        grads = 0
    needed = sum(shape.parameter_bytes) + sum(shape.state_bytes) + grads
    room = {tier: ledger.budgets[tier] - ledger.reserved[tier] for tier in ledger.budgets}
    room["device"] += spared
    short = needed - sum(room.values())
    if short > 0:
        theirs = sum(ledger.reserved.values()) - spared
        others = (
            f" (other engines in this process hold {format_size(theirs)}: engine.close())"
            if theirs > 0
            else ""
        )
        raise BudgetError(
            f"model data of {format_size(needed)} does not fit {format_size(room['device'])} of device, "
            f"{format_size(room['host'])} of host and {format_size(room['ssd'])} of SSD memory{others}: short by "
            f"{format_size(short)}",
            tier="ssd" if room["ssd"] else "host",
            short=ledger.asked("host", short),
            advice=f"raise host.memory, device.memory or ssd.memory by {ledger.asked('host', short)} bytes, or take a "
            "smaller model",
        )
    largest = shape.largest
    short = largest - room["device"]
    if short > 0 and not ledger.stretch("device", short):
        raise BudgetError(
            f"device: the largest chunk has {format_size(largest)}, the budget is {format_size(room['device'])}: "
            f"short by {format_size(short)}",
            tier="device",
            short=short,
            advice=f"raise device.memory by {short} bytes, or lower chunk_size",
        )


def refuse_nowhere(config: Config, budgets: Mapping[str, int]) -> None:
    """Activations can leave the device only where there is somewhere to go."""
    if config.offload_activations != "off" and not budgets["host"] and not budgets["ssd"]:
        raise ConfigError(
            f"offload_activations: {config.offload_activations!r} sends activations to the host or to SSD, but neither "
            "has memory here; set host.memory (on a CPU device.memory, too, for without it there is one tier) or "
            "ssd.memory and ssd.folder, or offload_activations to 'off'"
        )


def refuse_unbuilt(config: Config) -> None:
    if config.updates == "in-backward" and config.precision == "fp16":
        raise UnsupportedError(
            'updates = "in-backward" cannot take back a step whose fp16 gradients overflow; use precision = "bf16", or '
            'updates = "exact"'
        )


OWN = ("device", "host", "ssd")
"""Settings in which ranks may differ."""


def alike(config: Config, choice: Choice) -> dict[str, object]:
    """What must be the same on all ranks, by what to call it."""
    found: dict[str, object] = {key: value for key, value in config.to_dict().items() if key not in OWN}
    for what, group in (("managed", choice.managed), ("unmanaged", choice.unmanaged)):
        for name, parameter in group.items():
            part = part_of(parameter)
            shape, stride = tuple(part.shape), part.stride()
            found[name] = (what, shape, stride, str(choice.dtypes[name]), parameter.requires_grad)
    return found
