"""The engine: all that a user can do with a module that was taken over. Each part of it has a file of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from ebbtide.checkpoint.module_guard import guard, hand_back, own_values, retire
from ebbtide.config import Config
from ebbtide.engine.average import Average
from ebbtide.engine.by_name import ValuesByName
from ebbtide.engine.core import EngineCore, alone
from ebbtide.engine.explanation import Explanation, explanation
from ebbtide.engine.fit import Fit, fit
from ebbtide.engine.foreign import refuse_foreign_steps
from ebbtide.engine.opening import open_session
from ebbtide.engine.optimizer import EngineOptimizer, OptimizerCalls
from ebbtide.engine.passes import Passes
from ebbtide.engine.recording import Recording, record
from ebbtide.engine.saved import Checkpointing
from ebbtide.engine.stepping import Stepping, StepResult
from ebbtide.engine.tracebacks import show_users_lines
from ebbtide.errors import ConfigError
from ebbtide.nn.head_loss import LossInPieces
from ebbtide.runtime.process_tiers import Tiers
from ebbtide.runtime.stats import facts
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


def explain(engine: Engine) -> Explanation:
    """What `engine.explain()` gives: where the bytes are, what the plan does, and why."""
    return engine.explain()


class Engine:
    """A module that trains within memory budgets. `initialize` makes it."""

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
        calls = OptimizerCalls(
            update=self._update,
            clear=lambda set_to_none: self._core.zero_grad(set_to_none),
            take=lambda state_dict: self._checkpoints.take_moments(state_dict),
        )
        opened = open_session(module, config, param_groups, calls, tiers, weights, group, stages)
        self._tiers, self._session = opened.tiers, opened.session
        session = self._session
        session.regroup(opened.optimizer.param_groups)
        self._core = core = EngineCore(session, opened.optimizer)
        self._passes = Passes(core)
        self._checkpoints = Checkpointing(core)
        self._stepping = Stepping(core, self._checkpoints.saver)
        self._values = ValuesByName(core)
        self._closed_whole = False
        self._recording: Recording | None = None
        self._own: dict[str, torch.Tensor] | None = None
        """The weights that the module keeps when the engine is closed."""
        refuse_foreign_steps()
        guard(session, core.zero_grad)
        session.data.end_pass()
        session.interceptor.watch_gradients()
        session.interceptor.keep(RootCalls(module, self.__call__, self._passes.under_way))
        if core.config.loss == "pieces":
            session.interceptor.keep(LossInPieces(module))
        if session.sharing is not None:
            session.interceptor.keep(InStep(module, session.places.all_reside))

    @property
    def module(self) -> nn.Module:
        """The module that was taken over."""
        return self._core.module

    @property
    def config(self) -> Config:
        """Its settings; those of an optimizer that was handed over are among them."""
        return self._core.config

    @property
    def optimizer(self) -> EngineOptimizer:
        """Has the param groups, for schedulers; its `step` is the engine's."""
        return self._core.optimizer

    # -- training -------------------------------------------------------------------------------------

    @alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With gradients enabled it is a training pass, traced and planned."""
        if self._recording is not None and torch.is_grad_enabled():
            self._recording.saw(args, kwargs)
        return self._passes.run(self.module, args, kwargs)

    @alone
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A pass that runs `function(*args, **kwargs)` in place of the module's forward: a method of the module, or
        anything else that works with it (`engine.run(model.encode, x)`). It is traced and planned like forward."""
        if self._recording is not None and torch.is_grad_enabled():
            self._recording.saw(args, kwargs)
        return self._passes.run(function, args, kwargs)

    @alone
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backpropagates; gradients are held until `step` (or consumed at once: `updates = "in-backward"`)."""
        self._passes.backward(loss, retain_graph)

    @alone
    def step(self) -> StepResult:
        """Updates the weights, on every `accumulate`-th call."""
        recording = self._recording
        if recording is None:
            return self._stepping.step()
        recording.before_step()
        found = self._stepping.step()
        recording.after_step(found)
        return found

    def _update(self) -> bool:
        """What `optimizer.step()` does: by the user's code it is called in place of `step`. Whether it was skipped."""
        if self._stepping.own_call:
            return self._stepping.update()
        with self._stepping.called_by_optimizer():
            return self.step().skipped

    @alone
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The global norm of the gradients that are held; `step` scales them down to `max_norm` where it is larger. In
        place of torch.nn.utils.clip_grad_norm_, between backward and `step`."""
        return self._stepping.clip_grad_norm_(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that are held."""
        self.module.zero_grad(set_to_none)

    @property
    def steps(self) -> int:
        """Updates of the weights so far, those before a checkpoint that was loaded among them."""
        return self._core.steps

    @property
    def gradients_held(self) -> bool:
        """Whether a backward pass has brought gradients that no step has applied."""
        return self._session.micro > 0

    @property
    def last_step(self) -> StepResult | None:
        """What the last step gave, whether the loop called `step` or `optimizer.step()`."""
        return self._stepping.last

    @property
    def loss_scale(self) -> float:
        """What fp16 losses are multiplied with; 1 in other precisions."""
        return self._stepping.loss_scale

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
        if self._recording is not None:
            self._recording.saw(args, kwargs)
        return self._passes.forward_of_pass(*args, **kwargs)

    def abandon_pass(self) -> None:
        """A pass in pieces that will not be ended: what it held goes."""
        self._passes.abandon_pass()

    def backpropagating(self, last: bool = True) -> AbstractContextManager[None]:
        """Around a backward that a pipeline's schedule starts; `last`: of the pass."""
        return self._passes.backpropagating(last)

    @property
    def pieces(self) -> int:
        """Of how many losses the gradients are the sum, beside `accumulate`; 1 again after the step."""
        return self._session.pieces

    @pieces.setter
    def pieces(self, count: int) -> None:
        self._session.pieces = count

    # -- values by name -------------------------------------------------------------------------------

    def weights(self, *patterns: str, write: bool = False) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Values by name in master precision (fp32), on the host; with `write` they are stored at the end."""
        return self._values.weights(patterns, write)

    def gradients(self, *patterns: str) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Held gradients by name, between backward and step; parameters without one are left out."""
        return self._values.gradients(patterns)

    def resident(self, write: bool = False) -> AbstractContextManager[None]:
        """All parameters stay on the device: for generate() and evaluation. With `write` they may be changed there, in
        whatever way: merged, averaged, through `.data`. What was changed counts, bit by bit, and nothing else."""
        return self._values.resident(write)

    @alone
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights (master precision) and buffers under the module's own keys, on the host."""
        return self._values.state_dict()

    @alone
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        """Takes weights and buffers by name; every key must be there and no other, unless `strict` is False. Returns
        what was missing and what was not known, as torch's own does."""
        return self._values.load_state_dict(state, strict)

    @alone
    def weights_sha256(self) -> str:
        """Hash of the fp32 master weights in name order."""
        return self._values.weights_sha256()

    # -- checkpoints ----------------------------------------------------------------------------------

    @alone
    def save(
        self, path: str | Path, state: Any = None, *, keep: int | None = None, background: bool = False
    ) -> Path:
        """Writes a checkpoint into the folder `path` of a run, and returns its own folder: all that this engine needs to
        go on, random numbers included. `state` is whatever else the run needs (a scheduler's state_dict, the place in
        the data): numbers, strings, tensors, lists and dicts; `load` returns it. With `keep`, only the newest so many
        stay. In the `background` it is written while training goes on, and is there later: what the budget leaves room
        for is copied, the rest is written first."""
        return self._checkpoints.save(path, state, keep, background)

    def wait_for_save(self) -> None:
        """Until a checkpoint that is written in the background is there; raises where it could not be written."""
        self._checkpoints.wait_for_save()

    @alone
    def load(self, path: str | Path) -> Any:
        """Takes over a checkpoint: one, or the latest of a run's folder. Returns the `state` that was saved with it. The
        model and the param groups are to be the same; budgets, layout, master and device may be others."""
        return self._checkpoints.load(path)

    @alone
    def load_weights(self, folder: str | Path) -> None:
        """Takes weights in from a folder of safetensors files, as `save_pretrained` writes them, or from an engine's
        checkpoint: weights and buffers alone, no moments, steps or random numbers. Nothing is changed until names and
        shapes are found right."""
        self._checkpoints.load_weights(folder)

    @alone
    def ema(self, decay: float) -> Average:
        """An average of the weights from now on: at every step `decay` of what it was, and the rest of what they are. It
        is saved with the rest, takes 4 bytes a parameter, and changes places with the weights in `swapped_in()`."""
        return self._checkpoints.ema(decay)

    @alone
    def export(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Writes the weights as `save_pretrained` does: safetensors and their index, with the module's config, for
        `from_pretrained`. `dtype`: of floating tensors; left out, that of the module."""
        self._checkpoints.export(path, dtype)

    # -- facts ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the module computes: batches belong there."""
        return self._tiers.backend.device

    @alone
    def record(self, folder: str | Path) -> Recording:
        """Has the run describe itself in a folder, for `ebbtide report FOLDER`: settings, machine, a line for each step
        (loss, seconds by cause, bytes by link), a few steps in full. On several ranks all of them call it. What comes
        back takes what only the loop knows: `recording.add(accuracy=...)`, `recording.mark("evaluated", loss=...)`."""
        self._recording = record(self._core, folder, self._recording)
        return self._recording

    def stats(self) -> dict[str, Any]:
        """Bytes moved, evictions, peaks by tier and tag, traces, the plan in force."""
        return facts(self._session, self._tiers.disk)

    def explain(self) -> Explanation:
        """Where the bytes are, what the plan does, and why: to print, or as a notebook's cell shows it."""
        return explanation(self._core.open())

    def synchronize(self) -> None:
        """Waits for updates and moves that go on beside the computation: for measuring, never for right numbers."""
        self._core.check()
        self._session.queue.drain()
        self._tiers.backend.synchronize()

    def check_integrity(self) -> None:
        """Raises unless the books of every tier add up."""
        self._session.parts.check_integrity()

    # -- what loops ask of a model --------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """`module.train()`."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """`module.eval()`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """`module.training`."""
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """`module.parameters()`: for param groups and counts; values are in `weights` and `resident`."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """`module.named_parameters()`."""
        return self.module.named_parameters(*args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        """`module.modules()`."""
        return self.module.modules()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """`module.named_modules()`."""
        return self.module.named_modules(*args, **kwargs)

    # -- the end --------------------------------------------------------------------------------------

    def release(self) -> nn.Module:
        """Closes the engine and returns its module as an ordinary one: its weights are in RAM, in the dtypes that they
        came in, and another engine may take it. Moments, and gradients without a step, are gone. All ranks call it."""
        session = self._core.open()
        session.refuse_swapped()
        session.reclaim()
        self._own = own_values(session)
        self.close()
        return self.module

    @property
    def closed(self) -> bool:
        """Whether `close()` or `release()` was called."""
        return self._core.closed

    def close(self) -> None:
        """Gives all memory back. The module cannot be used afterwards; `release()` leaves it its weights. What was
        interrupted can be called again."""
        if self._closed_whole:
            return
        self._core.closed = True
        if os.getpid() != self._core.process:
            return  # memory and files are the parent's to give back
        if self._recording is not None:
            self._recording.end()
        self._checkpoints.saver.close()
        self._core.optimizer.leave()
        self._session.swapped = ""
        for average in list(self._session.averages):
            average.close()
        self._session.parts.close()
        if self._own is None:
            retire(self.module)
        else:
            hand_back(self._session, self._own)
        self._tiers.close_unused()
        self._closed_whole = True
        self._own = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
