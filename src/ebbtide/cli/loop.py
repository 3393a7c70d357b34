"""A training run from its settings: model, text and engine put together, then step after step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ebbtide.cli.data import Text, load_text
from ebbtide.cli.doing import doing
from ebbtide.cli.output import say
from ebbtide.cli.settings import TrainTask
from ebbtide.cli.signals import waiting
from ebbtide.cli.world import World
from ebbtide.config import Config
from ebbtide.devices.job_memory import job_memory
from ebbtide.engine import initialize, tune_memory
from ebbtide.engine.recording import Recording
from ebbtide.errors import ConfigError
from ebbtide.forecasting.forecaster import Forecaster, Workload
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.models import Batches, ModelSpec, find_model
from ebbtide.models.recompute import checkpoint_activations
from ebbtide.nn.head_loss import best_loss
from ebbtide.planner.activation_trips import OFF
from ebbtide.planner.sizes import days_left
from ebbtide.units import format_size

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALONE = World()
WARM_UP = 2
"""Steps that are traced and planned, and count in no rate."""
VALID_BATCHES = 4


@dataclass(frozen=True)
class Step:
    """One update."""

    number: int
    loss: float
    seconds: float
    lr: float
    grad_norm: float | None
    skipped: bool
    valid_loss: float | None = None

    def said(self) -> dict[str, Any]:
        """What the metrics have of it beside the engine's own numbers."""
        found = {"loss": self.loss, "lr": self.lr, "skipped": self.skipped}
        return found if self.grad_norm is None else {**found, "grad_norm": self.grad_norm}

    def plain(self) -> dict[str, Any]:
        """As a line."""
        return {"step": self.number, **self.said()}


class Training:
    """Holds the engine; `close` gives its memory back."""

    def __init__(
        self,
        task: TrainTask,
        config: Config,
        text: Text | None = None,
        spec: ModelSpec | None = None,
        world: World = ALONE,
    ) -> None:
        """`text` and `spec`, where they are at hand, go before the task's data and model. `world`: the processes that
        share each batch."""
        self.task, self.config, self.world = task, config, world
        world.share(task.batch)
        self.spec = spec or find_model(task.model)
        self.text = text or load_text(task.data)
        self.spec.check_length(task.seq)
        _check_size(task)
        self._train = Batches(self.spec, self.text.train, task.batch, task.seq, task.seed)
        self._valid = self._validation() if task.eval_every else None
        module = self.spec.build(task.seed)
        if task.checkpoint_activations:
            checkpoint_activations(module, task.model)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.engine = initialize(module, config.with_({"loss": best_loss(config.loss, module)}))
        tune_memory(self.engine)
        self.recording: Recording | None = None
        """Where the run has a folder."""
        self.history: list[Step] = []
        self.seconds = {"forward_backward": 0.0, "update": 0.0}
        self.ended = ""
        """The signal that training was told to end by."""
        self.resumed = 0
        """Steps of the history that another process took."""

    def _validation(self) -> Batches:
        try:
            return Batches(self.spec, self.text.valid, self.task.batch, self.task.seq, seed=0)
        except ConfigError as error:
            raise ConfigError(f"--eval-every: nothing to evaluate on: {error}") from None

    def close(self) -> None:
        self.engine.close()

    def record(self, folder: Path) -> None:
        """Has the run describe itself there from now on, with the steps that it has behind it."""
        self.recording = self.engine.record(folder)
        self.recording.add_earlier(step.plain() for step in self.history)
        self.recording.describe(task=asdict(self.task), params=self.parameters)
        if self.config.machine and self.world.first:
            with doing("forecasting the run, to hold it against what comes"):
                self._foretell()

    def _foretell(self) -> None:
        """What cannot be foretold keeps no run from training."""
        assert self.recording is not None
        try:
            self.recording.describe(forecast=self._forecast())
        except Exception as error:
            say(f"no forecast was made of this run: {error}")

    def _forecast(self) -> dict[str, Any]:
        """What the described machine would do with this model, within this run's budgets."""
        task, budgets = self.task, self.engine.stats()["budget_bytes"]
        machine = Machine.read(self.config.machine).with_devices(self.world.size)
        offload = self.config.offload_activations != OFF
        work = Workload(self.world.share(task.batch), task.seq, task.checkpoint_activations, offload)
        answer = Forecaster(self.spec, self.config).answer(
            machine.with_memory(**budgets), work, explain=False
        )
        keys = (
            "machine",
            "fits",
            "step_seconds",
            "tokens_per_second",
            "moved_bytes",
            "peak_bytes",
            "bound_seconds",
        )
        found = answer.to_dict()
        return {key: found[key] for key in keys}

    # -- steps ----------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Trains, from where the history ends; what is yielded has been updated (and evaluated, where it was its
        turn)."""
        for number in range(len(self.history) + 1, self.task.steps + 1):
            with waiting():
                step = self._step(number)
                self.history.append(step)
                if self.recording is not None:
                    self.recording.add(**step.said())
                    if step.valid_loss is not None:
                        self.recording.mark("evaluated", valid_loss=step.valid_loss)
            yield step
            signals = self.world.all(self.ended)
            if any(signals):
                self.ended = next(filter(None, signals))
                return

    def end(self, why: str) -> None:
        """After the step that is under way."""
        self.ended = why

    def _step(self, number: int) -> Step:
        begin = time.perf_counter()
        accumulate = self.config.accumulate
        lr = self.config.optimizer.lr * _factor(self.task.schedule, (number - 1) / self.task.steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        losses = []
        for micro in range(accumulate):
            batch = self._on_device(self.world.rows(self._train.at((number - 1) * accumulate + micro)))
            start = time.perf_counter()
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            losses.append(loss.detach())
            middle = time.perf_counter()
            result = self.engine.step()
            self.seconds["forward_backward"] += middle - start
            self.seconds["update"] += time.perf_counter() - middle
        mean = self.world.mean([float(loss) for loss in losses])
        seconds = time.perf_counter() - begin
        due = self.task.eval_every and (number % self.task.eval_every == 0 or number == self.task.steps)
        valid = self.evaluate() if due else None
        return Step(number, mean, seconds, lr, result.grad_norm, result.skipped, valid)

    def _on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs where, and in the precision that, the model computes."""
        device = next(self.engine.module.parameters()).device
        dtype = DTYPES[self.config.precision]
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in batch.items()
        }

    def evaluate(self) -> float:
        """The mean loss over the same few batches of the text that is not trained on."""
        assert self._valid is not None
        module = self.engine.module
        module.eval()
        with torch.no_grad():
            batches = [self._on_device(self.world.rows(self._valid.at(i))) for i in range(VALID_BATCHES)]
            losses = [self.engine(**batch).loss for batch in batches]
        module.train()
        return self.world.mean([float(loss) for loss in losses])

    # -- what came of it ------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """The median, without the steps that are traced."""
        taken = [step.seconds for step in self.history]
        return median(taken[WARM_UP:] or taken)

    @property
    def tokens_per_second(self) -> float:
        return self._train.tokens * self.config.accumulate / self.step_seconds

    def flops_per_token(self) -> float:
        """Forward and backward: six for each parameter, and what attention multiplies besides."""
        config = self.spec.config
        length = self._train.tokens / self.task.batch
        attention = 12 * getattr(config, "num_hidden_layers", 0) * getattr(config, "hidden_size", 0) * length
        return 6 * self.parameters + attention

    def summary(self) -> dict[str, Any]:
        weights = self.engine.weights_sha256()  # nothing is pending after it
        stats = self.engine.stats()
        evaluated = [step.valid_loss for step in self.history if step.valid_loss is not None]
        return {
            "model": self.task.model,
            "ranks": self.world.size,
            "params": self.parameters,
            "precision": self.config.precision,
            "steps": len(self.history),
            "losses": [step.loss for step in self.history],
            "final_loss": self.history[-1].loss,
            **({"valid_loss": evaluated[-1]} if evaluated else {}),
            "weights_sha256": weights,
            "tokens_per_second": self.tokens_per_second,
            "tflops": self.tokens_per_second * self.flops_per_token() / 1e12,
            "step_seconds": self.step_seconds,
            "seconds": {**self.seconds, **stats.get("seconds", {})},
            "peak_bytes": stats.get("peak_bytes", {}),
            "moved_bytes": stats.get("moved_bytes", {}),
            "offloaded_bytes": stats.get("offloaded_bytes", 0),
            "budget_bytes": stats.get("budget_bytes", {}),
            **self._wear(stats),
            **({"lock_free": stats["lock_free"]} if stats.get("lock_free") else {}),
            "bound_seconds": stats.get("bound_seconds"),
            "achieved_over_bound": stats.get("achieved_over_bound"),
            "evictions": stats.get("evictions", 0),
            **({"stopped": self.ended} if self.ended and len(self.history) < self.task.steps else {}),
            "skipped_steps": sum(step.skipped for step in self.history),
        }

    def _wear(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """What was written to SSD in a step, and how long the disks last at that."""
        if not stats.get("ssd"):
            return {}
        written = stats["ssd"]["write_bytes"] / max(1, len(self.history) - self.resumed)
        days = days_left(self.config.ssd.endurance, written, self.step_seconds)
        return {"ssd_write_bytes_per_step": round(written), **({"endurance_days": days} if days else {})}


def _check_size(task: TrainTask) -> None:
    """Token ids alone, eight bytes each."""
    needed, total = 8 * task.batch * task.seq, job_memory().total
    if needed > total:
        raise ConfigError(
            f"--batch: {task.batch} sequences of {task.seq} take {format_size(needed)} as token ids alone, and the "
            f"machine has {format_size(total)}; take fewer, and --accumulate to average over more"
        )


def _factor(schedule: str, done: float) -> float:
    """What the learning rate is multiplied by when that share of the steps is done."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0 - done if schedule == "linear" else 1.0
