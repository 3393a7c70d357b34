"""Training: an engine takes a module over, runs its passes, and takes steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ebbtide.checkpoint.first_values import Start
from ebbtide.checkpoint.module_guard import guard, hand_back, own_values, refuse_held, retire
from ebbtide.checkpoint.saving import Saver
from ebbtide.checkpoint.values import names
from ebbtide.checkpoint.weight_files import WeightFiles
from ebbtide.config import Config
from ebbtide.engine.backward import Backpropagation
from ebbtide.engine.by_name import ValuesByName
from ebbtide.engine.face import ModuleFace
from ebbtide.engine.fit import Fit, fit
from ebbtide.engine.foreign import Schedulers, handed_over, refuse_foreign_steps
from ebbtide.engine.held import alone
from ebbtide.engine.optimizer import make_optimizer
from ebbtide.engine.own_backward import OwnBackward
from ebbtide.engine.saved import Checkpointing
from ebbtide.engine.stepping import Stepping, StepResult
from ebbtide.engine.tracebacks import show_users_lines
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.kernels import Kernels, cpu_kernels, gpu_kernels
from ebbtide.runtime.budgets import alike, refuse_nowhere, refuse_unbuilt, warn_of_slow_products
from ebbtide.runtime.build import build
from ebbtide.runtime.distributed.launch import join_if_launched
from ebbtide.runtime.distributed.model_parallel import ModelParallel, find_model_parallel, others_too
from ebbtide.runtime.distributed.ranks import Ranks, all_or_none, open_ranks
from ebbtide.runtime.movement.plan_cursor import IDLE
from ebbtide.runtime.parameters.selection import Choice, choose
from ebbtide.runtime.planning.calls import call_of
from ebbtide.runtime.planning.earlier_passes import ways_back
from ebbtide.runtime.process_tiers import Tiers, shared_tiers
from ebbtide.runtime.session import Session
from ebbtide.runtime.stats import facts
from ebbtide.runtime.updates.loss_scale import LossScaler
from ebbtide.tracing.hooks.root_calls import InStep, RootCalls


def initialize(
    module: nn.Module,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    param_groups: torch.optim.Optimizer | Iterable[Any] | None = None,
    *,
    weights: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
    stages: dist.ProcessGroup | None = None,
) -> Engine:
    """Takes over a module's parameters and returns the engine that trains it.

    `config` is a Config, a dict of its keys, or a TOML or JSON file. `param_groups` are those of torch.optim.AdamW,
    or a torch.optim.AdamW, Adam or SGD itself, whose settings and schedulers then count; left out, all parameters
    that require gradients form one group. A module on the meta device gets the values that building it on the CPU
    now would give it, or those of `weights`, a folder of safetensors files as `save_pretrained` writes it. `group`:
    the processes that share the model's chunks, each with batches of its own; left out, all that torch.distributed
    knows of, or that torchrun started. `stages`: where `module` is one stage of a pipeline, the processes that have
    the others (see `ebbtide.pipelining`); tensor parallelism is seen by itself.
    """
    show_users_lines()
    return Engine(module, Config.read(config), param_groups, weights=weights, group=group, stages=stages)


def _refuse(module: nn.Module, config: Config) -> None:
    refuse_unbuilt(config)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"initialize takes an nn.Module, found {type(module).__name__}")
    refuse_held(module)
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise UnsupportedError("the module has lazy parameters; run one forward pass before initialize()")


class Engine(ValuesByName, Checkpointing, Backpropagation, Stepping, ModuleFace):
    def __init__(
        self,
        module: nn.Module,
        config: Config,
        param_groups: torch.optim.Optimizer | Iterable[Any] | None = None,
        tiers: Tiers | None = None,
        weights: str | Path | None = None,
        group: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`tiers`: memory of its own instead of the process's, as comparisons in one process need it."""
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
        self.config = config
        self.module = module
        self.steps = 0
        self._tiers = tiers = tiers or shared_tiers(config, ranks, companions)
        on_host = cpu_kernels()
        kernels = {"host": on_host, "device": gpu_kernels() if tiers.backend.kind == "cuda" else on_host}
        try:
            with all_or_none(ranks):
                refuse_nowhere(config, tiers.ledger.budgets)
                self.optimizer = make_optimizer(
                    module, config.optimizer, groups, self._update, self._zero_grad, self._take_moments
                )
                if handed is not None:
                    self.optimizer.join(handed)
            self._session = self._take_over(choice, kernels, files, ranks, companions)
        except BaseException:
            tiers.close_unused()
            raise
        self._session.updates.regroup(self.optimizer.param_groups)
        self._schedulers = Schedulers(self.optimizer)
        refuse_foreign_steps()
        guard(self._session, self._zero_grad)
        if ranks is None or ranks.rank == 0:
            warn_of_slow_products(choice, tiers.backend.kind)
        self._scaler = LossScaler() if config.precision == "fp16" else None
        self._broken = ""
        self._closed = self._gone = False
        self._own: dict[str, torch.Tensor] | None = None
        """The weights that the module keeps when the engine is closed."""
        self._process = os.getpid()
        self._turn = threading.RLock()
        self._losses: list[torch.Tensor] = []
        self._stepping = False
        self._clip_once: float | None = None
        self.last_step: StepResult | None = None
        self._saver = Saver(self._session)
        self._session.data.end_pass()
        self._own_backward = OwnBackward(self._session, self._reversing, self._accumulating)
        self._session.interceptor.keep(RootCalls(module, self.__call__, self._under_way))
        if self._session.sharing is not None:
            self._session.interceptor.keep(InStep(module, self._session.places.all_reside))

    def _take_over(
        self,
        choice: Choice,
        kernels: Mapping[str, Kernels],
        files: WeightFiles | None,
        ranks: Ranks | None,
        companions: ModelParallel | None,
    ) -> Session:
        tiers, start = self._tiers, Start(self.module, files)
        parts = build(self.module, choice, self.config, tiers, kernels, ranks, companions)
        session = Session(parts, tiers, choice, start)
        try:
            start.finish()
            if files is not None:
                files.load(session, start.given)
        except BaseException:
            parts.undo(start)
            raise
        return session

    # -- training -------------------------------------------------------------------------------------

    @alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With gradients enabled it is a training pass, traced and planned."""
        return self._pass(self.module, args, kwargs)

    @alone
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A pass that runs `function(*args, **kwargs)` in place of the module's forward: a method of the module, or
        anything else that works with it (`engine.run(model.encode, x)`). It is traced and planned like forward."""
        return self._pass(function, args, kwargs)

    def _pass(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        if torch._C._current_graph_task_id() >= 0 and session.interceptor.scopes:
            return function(*args, **kwargs)  # a checkpoint around the engine's call computes it again
        idle = session.idle
        found = self._forward(function, args, kwargs)
        if not session.planning.roomy:
            session.outputs.add(found)
        if not session.idle and torch.is_grad_enabled():
            ways = ways_back(found)
            if idle and ways == []:
                session.abandon()  # nobody can go back from it, so it would never end
            session.waiting.made(ways)
            self._own_backward.watch(found)
        return found

    def _forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured: chunks move between replays, which a graph cannot follow. Run the "
                'engine outside torch.cuda.graph(), and torch.compile without mode="reduce-overhead"'
            )
        session = self._session
        session.reclaim()
        call = call_of(self.module, function, args, kwargs)
        if function is not self.module:
            call = replace(call, function=partial(session.interceptor.around, function))
        if not torch.is_grad_enabled():
            with session.evaluating(call):
                return call.run()
        session.refuse_swapped()
        if session.interceptor.changed:
            names(session)
            session.interceptor.changed = False
        session.begin_training(call)
        with session.running():
            return call.run()

    @alone
    def fit(
        self,
        *batches: Any,
        loss: Callable[[Any], torch.Tensor] | None = None,
        run: Callable[..., Any] | None = None,
        evaluate: Iterable[Any] = (),
    ) -> Fit:
        """What `device.memory` is enough for these batches, found by planning: nothing runs. Each is what forward takes:
        keyword arguments as a mapping, positional ones as a tuple, or one tensor. `loss`: what the loop computes from
        forward's output, where that is outside of the module; `run`: what is called in forward's place, as in
        `engine.run`, and all that comes before one backward; `evaluate`: batches that pass without gradients. The sum of
        two engines' is enough for both in one loop."""
        if not batches and not evaluate:
            raise ConfigError("fit: expected at least one batch, as forward takes it, found none")
        return fit(self._session, self.module, batches, loss, run, evaluate)

    # -- passes in pieces -----------------------------------------------------------------------------

    def forward_of_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of a micro-batch, of which several are one pass: `backpropagating` says when it ends."""
        self._session.imagining.obstacle = "a pipeline's schedule runs the pass, in an order of its own"
        try:
            return self._forward(self.module, args, kwargs)
        except BaseException:
            self._clear()
            raise

    def abandon_pass(self) -> None:
        """A pass in pieces that will not be ended: what it held goes."""
        if self._session.course.phase != IDLE:
            self._session.abandon()
            self._clear()

    @contextmanager
    def backpropagating(self, last: bool = True) -> Iterator[None]:
        """Around a backward that somebody else starts, as a pipeline's schedule does; `last`: of the pass."""
        self._check()
        if self.config.updates == "in-backward" or self._scaler is not None:
            raise UnsupportedError(
                "a backward that somebody else starts brings gradients whose loss the engine does not see: expected "
                f'updates = "exact" and no loss scaling, found updates = "{self.config.updates}" and precision = '
                f'"{self.config.precision}"'
            )
        session = self._session
        session.updates.regroup(self.optimizer.param_groups)
        try:
            with session.reversing(last):
                yield
        except BaseException:
            self._clear()
            raise

    @property
    def pieces(self) -> int:
        """Of how many losses the gradients are the sum, beside `accumulate`; 1 again after the step."""
        return self._session.pieces

    @pieces.setter
    def pieces(self, count: int) -> None:
        self._session.pieces = count

    # -- beside the passes ----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for updates and moves that go on beside the computation: for measuring, never for right numbers."""
        self._check()
        self._session.queue.drain()
        self._tiers.backend.synchronize()

    @property
    def device(self) -> torch.device:
        """Where the module computes: batches belong there."""
        return self._tiers.backend.device

    # -- facts ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Bytes moved, evictions, peaks by tier and tag, traces, the plan in force."""
        return facts(self._session, self._tiers.disk)

    def check_integrity(self) -> None:
        """Raises unless the books of every tier add up."""
        self._session.parts.check_integrity()

    def release(self) -> nn.Module:
        """Closes the engine and returns its module as an ordinary one: its weights are in RAM, in the dtypes that they
        came in, and another engine may take it. Moments, and gradients without a step, are gone. All ranks call it."""
        session = self._open()
        session.refuse_swapped()
        session.reclaim()
        self._own = own_values(session)
        self.close()
        return self.module

    @property
    def closed(self) -> bool:
        """Whether `close()` or `release()` was called."""
        return self._closed

    def close(self) -> None:
        """Gives all memory back. The module cannot be used afterwards; `release()` leaves it its weights. What was
        interrupted can be called again."""
        if self._gone:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # memory and files are the parent's to give back
        self._saver.close()
        self._session.swapped = ""
        for average in list(self._session.averages):
            average.close()
        self._session.parts.close()
        if self._own is None:
            retire(self.module)
        else:
            hand_back(self._session, self._own)
        self._tiers.close_unused()
        self._gone = True
        self._own = None
