"""The memory that engines share: one back end and one ledger for each kind of device in the process."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from ebbtide.config import Config
from ebbtide.devices import Backend, open_backend
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.data_files import rank_folder, remove_left
from ebbtide.memory.disk.space import DiskSpace
from ebbtide.runtime.budgets import MARGIN, resolve_budgets
from ebbtide.runtime.distributed.model_parallel import ModelParallel, others_too
from ebbtide.runtime.distributed.ranks import Ranks, all_or_none, neighbours
from ebbtide.runtime.movement.eviction import Room


@dataclass
class Tiers:
    """Memory that all engines of this process on one kind of device share."""

    backend: Backend
    ledger: Ledger
    disk: DiskSpace | None = None
    rooms: WeakSet[Room] = field(default_factory=WeakSet)
    own_folders: tuple[str, ...] = ()
    """Those on SSD that were made for this rank."""

    def close_unused(self) -> None:
        """The end, where no engine is left."""
        if not self.rooms:
            self.close()

    def close(self) -> None:
        """Removes the files on SSD, ends the threads, and gives back what memory was kept for reuse."""
        self.backend.close()
        if self.disk is None:
            return
        self.disk.close()
        for folder in self.own_folders:
            with suppress(OSError):  # somebody else has put something there
                os.rmdir(folder)


_shared: dict[str, Tiers] = {}


def open_tiers(config: Config, ranks: Ranks | None = None, companions: ModelParallel | None = None) -> Tiers:
    """Fresh tiers with the config's budgets. Ranks that share chunks share what their machine has; the one with the
    least of a tier decides for all, so that they have one plan."""
    if companions is not None:
        place, count = companions.neighbours
    else:
        place, count = (0, 1) if ranks is None else neighbours(ranks)
    with others_too(companions), all_or_none(ranks):
        left = config.ssd.folder if config.ssd.memory and not place else ()
        removed = sum(remove_left(folder) for folder in left)
    with all_or_none(ranks):
        backend = open_backend(config.device.kind, config.poison)
        budgets = resolve_budgets(config, backend, count)
    folders: tuple[str, ...] = ()
    if ranks is not None:
        everywhere = ranks.numbers([budgets[tier] for tier in sorted(budgets)])
        budgets = {tier: min(row[i] for row in everywhere) for i, tier in enumerate(sorted(budgets))}
    with all_or_none(ranks):
        if (ranks is not None or companions is not None) and budgets["ssd"]:
            folders = _own_folders(config, place)
        disk = None
        if budgets["ssd"]:
            disk = DiskSpace(folders or config.ssd.folder, budgets["ssd"], checksums=config.ssd.checksums)
            disk.removed += removed
    wish = config.device.memory if config.device.memory in ("least", "half") else ""
    if wish and (ranks is not None or companions is not None):
        raise UnsupportedError(
            f"device.memory: {wish!r} is found in one process, and the plans of several must agree; name a size"
        )
    most = int(backend.available()["device"] * (1 - MARGIN)) if wish else budgets["device"]
    # Where RAM is both, the device's comes off the host's, unless that was set to a size of its own.
    one_ram = backend.kind == "cpu"
    from_host = one_ram and config.host.memory == "auto"
    if wish and one_ram and not from_host:
        most = max(0, most - budgets["host"])
    backend.limit(most)
    ledger = Ledger(budgets, count, str(wish), most, from_host=from_host)
    return Tiers(backend, ledger, disk, own_folders=folders)


def _own_folders(config: Config, place: int) -> tuple[str, ...]:
    """This rank's, in each of them."""
    own = tuple(rank_folder(folder, place) for folder in config.ssd.folder)
    for folder in own:
        if folder.parent.is_dir():
            folder.mkdir(exist_ok=True)
    return tuple(map(str, own))


def shared_tiers(
    config: Config, ranks: Ranks | None = None, companions: ModelParallel | None = None
) -> Tiers:
    """The process's tiers for this kind of device: a second engine shares the first one's budgets."""
    kind = config.device.kind
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    tiers = _shared.get(kind)
    if tiers is not None and tiers.rooms:
        gc.collect()  # an engine that nobody holds any more gives its memory back
    if tiers is None or not tiers.rooms:
        if tiers is not None:
            tiers.close()
        tiers = _shared[kind] = open_tiers(config, ranks, companions)
        return tiers
    asked_of = {"device": config.device.memory, "host": config.host.memory, "ssd": config.ssd.memory}
    for tier, asked in asked_of.items():
        sharers = 1 if tier == "device" else tiers.ledger.sharers
        if tier == "device" and (tiers.ledger.wish or asked in ("least", "half")):
            if asked in ("auto", tiers.ledger.wish):
                continue
            there: int | str = tiers.ledger.wish or tiers.ledger.budgets[tier]
            raise ConfigError(_another(tier, there, asked))
        if asked != "auto" and int(asked) // sharers != tiers.ledger.set[tier]:
            there = tiers.ledger.set[tier] * sharers
            raise ConfigError(_another(tier, f"{there} bytes", asked))
    return tiers


def _another(tier: str, there: int | str, asked: int | str) -> str:
    return (
        f"{tier}.memory: another engine in this process has {there}, this one asks for {asked}. Most likely the "
        "other is left from an earlier cell of a notebook: engine.close() ends it. Engines that train together share a "
        "budget: give both one value, or 'auto'"
    )
