"""Checkpoints and exports of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ebbtide.checkpoint import resume, shared_folders, values
from ebbtide.checkpoint.export import export
from ebbtide.checkpoint.folders import is_run, step_of
from ebbtide.checkpoint.saving import Saver, checkpoints
from ebbtide.checkpoint.weight_files import WeightFiles
from ebbtide.engine.average import BEGINS, Average, warn_of_lost
from ebbtide.engine.core import EngineCore
from ebbtide.errors import ConfigError, DiskError, StateError, UnsupportedError
from ebbtide.memory.journal import SAVING
from ebbtide.runtime.distributed.agreement import LOAD, SAVE
from ebbtide.runtime.distributed.model_parallel import others_too
from ebbtide.runtime.movement.plan_cursor import IDLE


class Checkpointing:
    def __init__(self, core: EngineCore) -> None:
        self._core, self._session = core, core.session
        self.saver = Saver(core.session)

    def save(
        self,
        path: str | Path,
        state: Any,
        keep: int | None,
        background: bool,
        within_step: bool = False,
    ) -> Path:
        """`within_step`: also where gradients wait for their step, which are in no checkpoint. Weights and moments are
        those of the last step until it comes, unless updates are made in backward."""
        self._core.check()
        self._core.require_whole("save")
        if keep is not None and keep < 1:
            raise ConfigError(f"save: keep is expected to be at least 1, found {keep}")
        session = self._session
        session.refuse_swapped()
        if session.micro and not (within_step and self._core.config.updates == "exact"):
            raise StateError(
                "engine.save() in the middle of a step: its gradients would be lost; call it after step()"
            )
        with session.journal.apart(SAVING):
            return self._save(Path(path), state, keep, background)

    def _save(self, path: Path, state: Any, keep: int | None, background: bool) -> Path:
        session = self._session
        session.meet(SAVE, self._core.steps)
        session.reclaim()
        session.queue.drain()
        values.warn_of_extra_state(session.module)
        facts = resume.facts_of(
            session, self._core.optimizer.param_groups, self._core.scaler, self._core.steps
        )
        content = {"user": state, "random": resume.random_state()}
        return self.saver.save(self._of_part(path), self._core.steps, facts, content, keep, background)

    def _of_part(self, path: Path) -> Path:
        """Where a process has a part of the model, that has a folder of its own in the run's."""
        return path if self._session.companions is None else path / self._session.companions.label

    def wait_for_save(self) -> None:
        self.saver.settle(warn=False)
        self.saver.hear_first()
        if self.saver.failed:
            raise DiskError(self.saver.failed)

    def load(self, path: str | Path) -> Any:
        session = self._core.open()
        self._core.require_whole("load")
        self.saver.settle()
        session.meet(LOAD, self._core.steps)
        groups = self._core.optimizer.param_groups
        facts, state = self._read(path, lambda facts: resume.check(session, groups, facts))
        self._core.steps = resume.restore(session, groups, self._core.scaler, facts)
        session.regroup(groups)
        ranks = session.ranks
        if facts["ranks"] == (1 if ranks is None else ranks.size):
            resume.restore_random(state["random"])  # else each rank would draw the same
        self._core.mend()
        stored = set(facts["tensors"])
        for average in session.averages:
            average.loaded(stored)
        warn_of_lost(stored, session.averages)
        return state["user"]

    def _read(
        self, path: str | Path, check: Callable[[Mapping[str, Any]], None], weights_alone: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """A checkpoint's values; until they are all there the engine is not to be trained."""
        session, companions, own = self._session, self._session.companions, self._of_part(Path(path))
        session.refuse_swapped()
        with others_too(companions):
            folder = shared_folders.find(own if own.is_dir() else path, session.ranks)
        if companions is not None:
            companions.require_same_step(step_of(folder))

        def begin(facts: Mapping[str, Any]) -> None:
            check(facts)
            self._core.end_pending()
            if session.cursor.phase != IDLE:
                session.abandon()
            self._core.clear()
            session.queue.drain()
            self._core.broken = f"loading '{folder}' ended half-way"

        with others_too(companions):
            return checkpoints().read(session, folder, begin, weights_alone)

    def load_weights(self, folder: str | Path) -> None:
        session = self._core.open()
        self._core.require_whole("load_weights")
        session.refuse_swapped()
        path = Path(folder)
        if is_run(path) or is_run(self._of_part(path)):
            session.meet(LOAD, self._core.steps)
            session.catch_up_averages()
            self._read(path, lambda facts: None, weights_alone=True)
            self._core.mend()
            return
        if self._session.companions is not None and self._session.companions.split:
            raise UnsupportedError(
                "load_weights: tensor parallelism has split the module; load_state_dict() takes whole tensors, too"
            )
        files = WeightFiles(
            folder, self._core.module, {place.name: place.shape for place in session.data.places}
        )
        session.catch_up_averages()
        self._core.end_pending()
        self._core.clear()
        files.load(session)
        self._core.mend()

    def take_moments(self, state_dict: Mapping[str, Any]) -> None:
        """What `optimizer.load_state_dict` is given of a torch optimizer's state."""
        session = self._core.open()
        session.refuse_swapped()
        found = resume.by_name(session, self._core.optimizer.param_groups, state_dict)
        self._core.end_pending()
        self._core.clear()
        session.queue.drain()
        self._core.steps = resume.take(session, found)

    def ema(self, decay: float) -> Average:
        session = self._core.open()
        if session.lock_free is not None:
            raise UnsupportedError(
                'ema: with updates = "lock-free" nobody knows which step\'s weights are there; use updates = "exact"'
            )
        session.refuse_swapped()
        if f"{BEGINS}{decay}" in [average.label for average in session.averages]:
            raise ConfigError(
                f"ema: there is an average with decay {decay} already, and a checkpoint knows averages by their decay; "
                "use that one, or close() it first"
            )
        session.reclaim()
        made = Average(session, decay)
        session.averages.append(made)
        return made

    def export(self, path: str | Path, dtype: torch.dtype | None) -> None:
        session = self._core.open()
        self._core.require_whole("export")
        if self._session.companions is not None and self._session.companions.stages is not None:
            raise UnsupportedError(
                "export: this engine has one stage of a model, and the file format knows whole ones; use save(), or "
                "state_dict() of each stage"
            )
        session.meet(SAVE, self._core.steps)
        session.reclaim()
        session.queue.drain()
        export(session, Path(path), dtype)
