"""Checkpoints and exports of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ebbtide.checkpoint import resume, shared_folders
from ebbtide.checkpoint.export import export
from ebbtide.checkpoint.folders import is_run, step_of
from ebbtide.checkpoint.saving import Saver, checkpoints
from ebbtide.checkpoint.weight_files import WeightFiles
from ebbtide.engine.average import Average
from ebbtide.engine.held import EngineCore
from ebbtide.engine.optimizer import EngineOptimizer
from ebbtide.errors import ConfigError, DiskError, StateError, UnsupportedError
from ebbtide.runtime.distributed.agreement import LOAD, SAVE
from ebbtide.runtime.distributed.model_parallel import others_too
from ebbtide.runtime.movement.plan_cursor import IDLE
from ebbtide.runtime.updates.loss_scale import LossScaler


class Checkpointing(EngineCore):
    optimizer: EngineOptimizer
    _scaler: LossScaler | None
    _saver: Saver

    def save(
        self, path: str | Path, state: Any = None, *, keep: int | None = None, background: bool = False
    ) -> Path:
        """Writes a checkpoint into the folder `path` of a run, and returns its own folder: all that this engine needs to
        go on, random numbers included. `state` is whatever else the run needs (a scheduler's state_dict, the place in
        the data): numbers, strings, tensors, lists and dicts; `load` returns it. With `keep`, only the newest so many
        stay. In the `background` it is written while training goes on, and is there later: what the budget leaves room
        for is copied, the rest is written first."""
        self._check()
        if keep is not None and keep < 1:
            raise ConfigError(f"save: keep is expected to be at least 1, found {keep}")
        session = self._session
        session.refuse_swapped()
        if session.micro:
            raise StateError(
                "engine.save() in the middle of a step: its gradients would be lost; call it after step()"
            )
        session.meet(SAVE, self.steps)
        session.reclaim()
        session.queue.drain()
        facts = resume.facts_of(session, self.optimizer.param_groups, self._scaler, self.steps)
        content = {"user": state, "random": resume.random_state()}
        return self._saver.save(self._of_part(Path(path)), self.steps, facts, content, keep, background)

    def _of_part(self, path: Path) -> Path:
        """Where a process has a part of the model, that has a folder of its own in the run's."""
        return path if self._companions is None else path / self._companions.label

    def wait_for_save(self) -> None:
        """Until a checkpoint that is written in the background is there; raises where it could not be written."""
        self._saver.settle(warn=False)
        if self._saver.failed:
            raise DiskError(self._saver.failed)

    def load(self, path: str | Path) -> Any:
        """Takes over a checkpoint: one, or the latest of a run's folder. Returns the `state` that was saved with it. The
        model and the param groups are to be the same; budgets, layout, master and device may be others."""
        session = self._open()
        self._saver.settle()
        session.meet(LOAD, self.steps)
        groups = self.optimizer.param_groups
        facts, state = self._read(path, lambda facts: resume.check(session, groups, facts))
        self.steps = resume.restore(session, groups, self._scaler, facts)
        session.updates.regroup(groups)
        ranks = session.ranks
        if facts["ranks"] == (1 if ranks is None else ranks.size):
            resume.restore_random(state["random"])  # else each rank would draw the same
        self._mend()
        for average in session.averages:
            average.loaded(list(facts["tensors"]))
        return state["user"]

    def _read(
        self, path: str | Path, check: Callable[[Mapping[str, Any]], None], weights_alone: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """A checkpoint's values; until they are all there the engine is not to be trained."""
        session, companions, own = self._session, self._companions, self._of_part(Path(path))
        session.refuse_swapped()
        with others_too(companions):
            folder = shared_folders.find(own if own.is_dir() else path, session.ranks)
        if companions is not None:
            companions.require_same_step(step_of(folder))

        def begin(facts: Mapping[str, Any]) -> None:
            check(facts)
            self._end_pending()
            if session.course.phase != IDLE:
                session.abandon()
            self._clear()
            session.queue.drain()
            self._broken = f"loading '{folder}' ended half-way"

        with others_too(companions):
            return checkpoints().read(session, folder, begin, weights_alone)

    def load_weights(self, folder: str | Path) -> None:
        """Takes weights in from a folder of safetensors files, as `save_pretrained` writes them, or from an engine's
        checkpoint: weights and buffers alone, no moments, steps or random numbers. Nothing is changed until names and
        shapes are found right."""
        session = self._open()
        session.refuse_swapped()
        path = Path(folder)
        if is_run(path) or is_run(self._of_part(path)):
            session.meet(LOAD, self.steps)
            session.catch_up_averages()
            self._read(path, lambda facts: None, weights_alone=True)
            self._mend()
            return
        if self._companions is not None and self._companions.split:
            raise UnsupportedError(
                "load_weights: tensor parallelism has split the module; load_state_dict() takes whole tensors, too"
            )
        files = WeightFiles(folder, self.module, {place.name: place.shape for place in session.data.places})
        session.catch_up_averages()
        self._end_pending()
        self._clear()
        files.load(session)
        self._mend()

    def _take_moments(self, state_dict: Mapping[str, Any]) -> None:
        """What `optimizer.load_state_dict` is given of a torch optimizer's state."""
        session = self._open()
        session.refuse_swapped()
        found = resume.by_name(session, self.optimizer.param_groups, state_dict)
        self._end_pending()
        self._clear()
        session.queue.drain()
        self.steps = resume.take(session, found)

    def ema(self, decay: float) -> Average:
        """An average of the weights from now on: at every step `decay` of what it was, and the rest of what they are. It
        is saved with the rest, takes 4 bytes a parameter, and changes places with the weights in `swapped_in()`."""
        session = self._open()
        if session.lock_free is not None:
            raise UnsupportedError(
                'ema: with updates = "lock-free" nobody knows which step\'s weights are there; use updates = "exact"'
            )
        session.refuse_swapped()
        session.reclaim()
        made = Average(session, decay)
        session.averages.append(made)
        return made

    def export(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Writes the weights as `save_pretrained` does: safetensors and their index, with the module's config, for
        `from_pretrained`. `dtype`: of floating tensors; left out, that of the module."""
        session = self._open()
        if self._companions is not None and self._companions.stages is not None:
            raise UnsupportedError(
                "export: this engine has one stage of a model, and the file format knows whole ones; use save(), or "
                "state_dict() of each stage"
            )
        session.meet(SAVE, self.steps)
        session.reclaim()
        session.queue.drain()
        export(session, Path(path), dtype)
