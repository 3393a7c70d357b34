"""PyTorch Lightning, with the module in an ebbtide engine.

    from ebbtide.integrations.lightning import EbbtideStrategy

    trainer = Trainer(strategy=EbbtideStrategy({"device": {"memory": "20GB"}}), gradient_clip_val=1.0)

One optimizer (torch.optim.AdamW, Adam or SGD). `training_step` and the other steps are the passes; with manual
optimization a call of the module, `self(batch)`, is one. A checkpoint is Lightning's file, for
`load_from_checkpoint` anywhere, and a folder beside it with the rest. With several devices, or under torchrun, ranks
share the chunks.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from ebbtide.checkpoint.folders import RunFolder
from ebbtide.config import Config
from ebbtide.errors import ConfigError, StateError, UnsupportedError, warn_user
from ebbtide.integrations import _lightning as private
from ebbtide.integrations._lightning_ranks import LightningRanks
from ebbtide.integrations._models import HeldEngine, holder, take
from ebbtide.integrations._recording import RecordedRun
from ebbtide.integrations._refused import refuse_placed
from ebbtide.integrations._settings import Given, with_precision
from ebbtide.integrations._versions import require

require("lightning", private.OLDEST, private.NEWEST)

BESIDE = ".ebbtide"
"""After a checkpoint's file name: the folder with the engine's own state."""
NAMED = "ebbtide"
"""In a checkpoint's file: which of the folder's it belongs to."""


class EbbtidePrecision(Precision):
    """The engine has the precision, goes backward and clips."""

    def __init__(self, strategy: EbbtideStrategy) -> None:
        self._strategy = strategy

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """A module's own `backward` goes as it is written: the outputs of its pass tell the engine."""
        if type(model).backward is LightningModule.backward:
            self._strategy.engine_there.backward(tensor, *args, **kwargs)
            return
        if self._strategy.engine_there.config.precision == "fp16":
            raise UnsupportedError(
                f"{type(model).__name__}.backward in fp16: the engine scales the losses that it is given; leave the "
                "method out, or train with precision='bf16-mixed'"
            )
        model.backward(tensor, *args, **kwargs)

    @property
    def _went(self) -> bool:
        """Whether a backward pass, the Trainer's or the module's own, has brought gradients for the next step."""
        engine = self._strategy.engine
        return engine is not None and engine.gradients_held

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        """A training_step that gives no loss leaves a batch out: without gradients nothing is updated."""
        found = self._wrap_closure(model, optimizer, closure)
        if self._went:
            self._strategy.engine_there.optimizer.step(**kwargs)
        return found

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        if self._went:
            self._strategy.engine_there.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        raise UnsupportedError(
            "gradient_clip_algorithm='value': the engine clips by value while it updates: leave gradient_clip_val out, "
            "and give EbbtideStrategy({'clip_value': ...})"
        )


class RecordFit(Callback):
    """`Trainer(strategy=EbbtideStrategy(...), callbacks=[RecordFit("run")])`: the run describes itself in a folder, for
    `ebbtide report run`."""

    def __init__(self, folder: str | Path) -> None:
        self._run = RecordedRun(folder)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        self._run.begin(strategy.engine if isinstance(strategy, EbbtideStrategy) else None, "EbbtideStrategy")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.evaluated(trainer.callback_metrics)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._run.saved(str(trainer.default_root_dir))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.end()


class EbbtideStrategy(LightningRanks):
    """`config`: the engine's settings, as `ebbtide.initialize` takes them; precision is fp32 unless it names another."""

    strategy_name = "ebbtide"

    def __init__(self, config: Given = None, **kwargs: Any) -> None:
        settings = Config.read(config)
        if settings.accumulate != 1 or settings.clip is not None:
            raise ConfigError(
                "EbbtideStrategy: accumulate and clip are the Trainer's, accumulate_grad_batches and gradient_clip_val"
            )
        self._given, self._settings = config, settings
        self.engine: HeldEngine | None = None
        self._resumed: Path | None = None
        self._predicted: tuple[Any, ...] = ()
        """What the last predict_step was given, on several ranks."""
        self._precision = EbbtidePrecision(self)
        super().__init__(**kwargs)

    @property
    def engine_there(self) -> HeldEngine:
        if self.engine is None:
            raise StateError("EbbtideStrategy: there is no engine before the Trainer has set the module up")
        return self.engine

    @property
    def precision_plugin(self) -> EbbtidePrecision:
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """The Trainer sets what it was told; the engine computes so."""
        told = "32-true" if plugin is None else str(plugin.precision)
        precision = private.PRECISIONS.get(told)
        if precision is None or (plugin is not None and type(plugin).__name__ not in private.PLUGINS):
            raise UnsupportedError(
                f"Trainer(precision={told!r}) by {type(plugin).__name__}: the engine computes in fp32 ('32-true'), bf16 "
                "('bf16-mixed') or fp16 ('16-mixed')"
            )
        self._settings = with_precision(
            self._settings, self._given, precision, f"Trainer(precision={told!r})"
        )
        self._precision.precision = private.NAMES[self._settings.precision]

    def close(self) -> None:
        """Gives the engine's memory back; the module has no weights after that."""
        if self.engine is not None:
            self.engine.close()

    # -- set-up ---------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """The engine moves it, as much as its budget holds."""

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        _refuse_callbacks(trainer.callbacks)
        if self._layer_sync is not None:
            raise UnsupportedError(
                "Trainer(sync_batchnorm=True): ranks would talk in the midst of a pass that is imagined: leave it out"
            )
        refuse_placed(module)
        _warn_of_requeue(trainer)
        super().setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING  # with optimizers that have just been made, as in stock
        if not fits and holder(module) is not None and holder(module) is self.engine:
            return
        if len(self.optimizers) > 1:
            raise UnsupportedError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers: the engine has one, with param_groups"
            )
        if not any(parameter.numel() for parameter in module.parameters()):
            return  # there is nothing to manage
        given = self.optimizers[0] if fits and self.optimizers else None
        self.engine = take(module, self._settings_here(), given, frozen=not fits)

    def _settings_here(self) -> Config:
        """The Trainer chooses the devices."""
        asked, found = self._settings.device.kind, self.root_device.type
        if asked not in ("auto", found):
            raise ConfigError(
                f"EbbtideStrategy: ebbtide's device.kind is {asked!r}, the Trainer has chosen {found!r}: say "
                f"Trainer(accelerator={asked!r})"
            )
        return self._settings.with_({"device.kind": found})

    def teardown(self) -> None:
        """The module stays in its engine, for whatever is done with it next."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.checkpoint_io.teardown()

    # -- passes ---------------------------------------------------------------------------------------

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.lightning_module, name)
        return step(*args, **kwargs) if self.engine is None else self.engine.run(step, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            # It goes backward within itself, and so is no pass; its calls of the module are.
            return module.training_step(*args, **kwargs)
        return self._step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """No batch is repeated here, so that ranks may have one more or less; the others go through it, too."""
        if self.is_distributed:
            self._predicted = args
            self._any_has_a_batch(True)
        return self._step("predict_step", *args, **kwargs)

    def on_predict_end(self) -> None:
        while self.is_distributed and self._any_has_a_batch(False):
            self._step("predict_step", *self._predicted)
        self._predicted = ()

    def _any_has_a_batch(self, this_one: bool) -> bool:
        """All ranks say so together, and whether they had one to repeat."""
        said = torch.tensor([this_one, not self._predicted], dtype=torch.int64, device=self.root_device)
        more, empty = self.reduce(said, reduce_op="sum").tolist()
        if more and empty:
            raise StateError(
                f"predict: {empty} of {self.world_size} ranks have no batch: give each one, or use one device"
            )
        return more > 0

    # -- checkpoints ----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Moments are in the folder beside the file."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return super().lightning_module_state_dict() if self.engine is None else self.engine.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {"moments": f"in the folder beside this file that ends in {BESIDE}"}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """First the engine's part, then the file that names it. A process that ends between them leaves the file from
        before, which may have the same path, with its own part."""
        if "optimizer_states" not in checkpoint or self.engine is None:  # weights alone are wanted
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = _beside(filepath)
        part = self.engine.save_as_stock(folder, keep=2)
        super().save_checkpoint({**checkpoint, NAMED: part.name}, filepath, storage_options)
        if self.is_global_zero:
            RunFolder(folder).keep(1)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed = _beside(Path(checkpoint_path).resolve())  # `save_last="link"` gives a link
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Who does not train takes the weights alone, as in stock: its engine has other groups than were saved."""
        module, states = self.lightning_module, checkpoint.get("optimizer_states", ())[:1]
        assert module is not None
        if module.trainer.state.fn != TrainerFn.FITTING:
            self.engine_there.load_state_dict(checkpoint["state_dict"], strict=strict)
        elif states and "moments" in states[0]:
            self.engine_there.load(self._own_part(checkpoint))
        else:
            self.engine_there.load_state_dict(checkpoint["state_dict"], strict=strict)
            for state in states:  # of a stock checkpoint
                self.engine_there.optimizer.load_state_dict(state)

    def _own_part(self, checkpoint: Mapping[str, Any]) -> Path:
        """Of a file that was saved under this strategy. Older ones do not name it: it is the folder's latest."""
        folder, name = self._resumed, checkpoint.get(NAMED, "")
        if folder is None or not (folder / name).is_dir():
            raise ConfigError(
                f"ckpt_path: expected '{name or 'a checkpoint'}' in the folder {folder}, which belongs to the file and "
                "has moments and steps, found none: move both together; or train on from the weights alone, with "
                "Learner.load_from_checkpoint(file)"
            )
        return folder / name


def _refuse_callbacks(callbacks: list[Any]) -> None:
    for one in callbacks:
        for kind in type(one).__mro__:
            if kind.__name__ in private.REFUSED and kind.__module__.startswith("lightning"):
                raise UnsupportedError(f"{type(one).__name__} {private.REFUSED[kind.__name__]}")


def _beside(file: Any) -> Path:
    path = Path(file)
    return path.with_name(path.name + BESIDE)


def _warn_of_requeue(trainer: Any) -> None:
    environment = trainer._accelerator_connector.cluster_environment
    if trainer.state.fn == TrainerFn.FITTING and getattr(environment, "auto_requeue", False):
        warn_user(
            "SLURM's auto-requeue saves from a signal handler, which mostly comes in the middle of a pass, where the "
            "engine refuses to save: expected SLURMEnvironment(auto_requeue=False) among the Trainer's plugins, and "
            'ModelCheckpoint(every_n_train_steps=...) with ckpt_path="last" for a job that is started again'
        )
