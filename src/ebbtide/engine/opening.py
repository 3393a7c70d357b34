"""What `initialize` does before there is an engine: looks at what it was given, then takes the module over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ebbtide.checkpoint.first_values import Start
from ebbtide.checkpoint.module_guard import refuse_held
from ebbtide.checkpoint.weight_files import WeightFiles
from ebbtide.config import Config
from ebbtide.engine.foreign import handed_over
from ebbtide.engine.optimizer import EngineOptimizer, OptimizerCalls, make_optimizer, training
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.kernels import Kernels, cpu_kernels, gpu_kernels
from ebbtide.nn.head_loss import obstacle
from ebbtide.runtime.budgets import alike, refuse_nowhere, refuse_unbuilt, warn_of_slow_products
from ebbtide.runtime.build import build
from ebbtide.runtime.distributed.launch import join_if_launched
from ebbtide.runtime.distributed.model_parallel import ModelParallel, find_model_parallel, others_too
from ebbtide.runtime.distributed.ranks import Ranks, all_or_none, open_ranks
from ebbtide.runtime.parameters.selection import Choice, choose
from ebbtide.runtime.process_tiers import Tiers, shared_tiers
from ebbtide.runtime.session import Session


@dataclass(frozen=True)
class Opened:
    tiers: Tiers
    session: Session
    optimizer: EngineOptimizer


def open_session(
    module: nn.Module,
    config: Config,
    param_groups: torch.optim.Optimizer | Iterable[Any] | None,
    calls: OptimizerCalls,
    tiers: Tiers | None,
    weights: str | Path | None,
    group: dist.ProcessGroup | None,
    stages: dist.ProcessGroup | None,
) -> Opened:
    """All of it, or nothing: where it raises the module is as it was."""
    config, groups, handed = handed_over(config, param_groups)
    join_if_launched(config.device.kind)
    ranks = open_ranks(group)
    is_module = isinstance(module, nn.Module)
    companions = find_model_parallel(module, group, stages, ranks) if is_module else None
    with others_too(companions), all_or_none(ranks):
        _refuse(module, config)
        choice = choose(module, config)
        if companions is not None and companions.split and weights is not None:
            raise UnsupportedError(
                "weights: the module is split by tensor parallelism already; load them before parallelize_module()"
            )
        files = WeightFiles(weights, module) if weights is not None else None
    if ranks is not None:
        ranks.require_same(alike(config, choice))
    if companions is not None:
        companions.require_alike(config)
    if config.threads != "auto":
        torch.set_num_threads(int(config.threads))
    tiers = tiers or shared_tiers(config, ranks, companions)
    try:
        with all_or_none(ranks):
            refuse_nowhere(config, tiers.ledger.budgets)
            if ranks is None or ranks.rank == 0:
                warn_of_slow_products(choice, tiers.backend.kind)
            optimizer = make_optimizer(module, config.optimizer, groups, calls)
        session = _take_over(module, config, choice, tiers, files, ranks, companions)
        training.add(optimizer)
        if handed is not None:
            optimizer.join(handed)
    except BaseException:
        tiers.close_unused()
        raise
    return Opened(tiers, session, optimizer)


def _refuse(module: nn.Module, config: Config) -> None:
    refuse_unbuilt(config)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"initialize takes an nn.Module, found {type(module).__name__}")
    refuse_held(module)
    if config.loss == "pieces" and (why := obstacle(module)):
        raise ConfigError(
            f'loss = "pieces": {why}; use loss = "whole", or ebbtide.nn.linear_cross_entropy in forward'
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise UnsupportedError("the module has lazy parameters; run one forward pass before initialize()")


def _take_over(
    module: nn.Module,
    config: Config,
    choice: Choice,
    tiers: Tiers,
    files: WeightFiles | None,
    ranks: Ranks | None,
    companions: ModelParallel | None,
) -> Session:
    start = Start(module, files)
    parts = build(module, choice, config, tiers, _kernels(tiers), ranks, companions)
    session = Session(parts, tiers, choice, start)
    try:
        start.finish()
        if files is not None:
            files.load(session, start.given)
    except BaseException:
        parts.undo(start)
        raise
    return session


def _kernels(tiers: Tiers) -> dict[str, Kernels]:
    on_host = cpu_kernels()
    return {"host": on_host, "device": gpu_kernels() if tiers.backend.kind == "cuda" else on_host}
