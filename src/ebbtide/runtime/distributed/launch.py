"""The processes that a launcher started, as torchrun does: each says by its environment which one it is."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ebbtide.errors import ConfigError, RanksError

SAYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch.distributed wants to know from the environment."""


def launched() -> tuple[int, int]:
    """(how many processes were started, which of those on its machine this one is)."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise ConfigError(
            f"WORLD_SIZE, LOCAL_RANK: expected numbers, as torchrun sets them; found {error}"
        ) from None


def join(device: str, patience: timedelta | None = None) -> None:
    """`device`: the setting. `patience`: how long a rank waits for another before it takes it for lost."""
    size, place = launched()
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(place)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    except (RuntimeError, ValueError) as error:
        raise RanksError(
            f"the {size} processes that WORLD_SIZE tells of do not find each other. Each of them calls initialize(); a "
            f"process that trains by itself does so without WORLD_SIZE in its environment. torch says: {error}"
        ) from error


def join_if_launched(device: str) -> None:
    """A script under torchrun that does not join by itself would else train one model in each process, unknowingly."""
    size, _ = launched()
    if size == 1 or not dist.is_available() or dist.is_initialized():
        return
    missing = [name for name in SAYS if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE says that {size} processes train together, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not in the environment, so they cannot find each other. Start them "
            "with torchrun, which sets all of it; a process that trains by itself unsets WORLD_SIZE"
        )
    join(device)
