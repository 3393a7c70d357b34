"""Hugging Face's Trainer, with the model in an ebbtide engine.

    from ebbtide.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=data, ebbtide={"device": {"memory": "20GB"}})

`Mixin` does the same for any subclass: `class MyTrainer(Mixin, SFTTrainer)`. Learning rates, schedules, accumulation,
clipping and precision come from TrainingArguments; `ebbtide=` has budgets and everything else that the engine knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from ebbtide.checkpoint.resume import as_drawn
from ebbtide.config import Config
from ebbtide.errors import ConfigError, UnsupportedError, warn_user
from ebbtide.integrations import _transformers as private
from ebbtide.integrations._models import HeldEngine, give_back, holder, mark_prepared, take
from ebbtide.integrations._recording import RecordedRun
from ebbtide.integrations._refused import refuse_launched, refuse_placed
from ebbtide.integrations._settings import Given, mixed_precision, named_in, with_precision
from ebbtide.integrations._state_dicts import answering, loading_into
from ebbtide.integrations._versions import require
from ebbtide.nn.head_loss import best_loss

FOLDER = "ebbtide"
"""Of a checkpoint: where the engine's own state lies, beside the weights."""

require("transformers", private.OLDEST, private.NEWEST)


class MomentsAreInTheFolderEbbtide:
    """What `optimizer.pt` holds beside the engine's folder: without it a stock Trainer would go on from there with fresh
    moments and say nothing. It cannot read this, and names it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return MomentsAreInTheFolderEbbtide, ()


_Base: Any = transformers.Trainer if TYPE_CHECKING else object


class Mixin(_Base):
    """Before a Trainer class: `class MyTrainer(Mixin, SFTTrainer)`."""

    optimizer: Any
    engine: HeldEngine | None = None
    """Has the model from the first `train`, `evaluate` or `predict` on."""

    def __init__(self, *args: Any, ebbtide: Given = None, **kwargs: Any) -> None:
        """`ebbtide`: the engine's settings, as `ebbtide.initialize` takes them."""
        self.references: list[HeldEngine] = []
        """Of frozen models that are trained against, in the same budgets."""
        self._given = ebbtide
        self._settings = Config.read(ebbtide)
        super().__init__(*args, **kwargs)

    # -- what Trainer builds --------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        self._settings = _settings_for(self.args, self._settings, self._given)
        _refuse_model(self.model)
        if getattr(self.args, private.GPUS, 1) > 1:
            setattr(self.args, private.GPUS, 1)  # the engine has one device a process
        super().create_accelerator_and_postprocess()
        self.accelerator.backward = self._backward
        self.accelerator.prepare_model = self._prepare_model

    def _prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """In place of Accelerator.prepare_model: the model is in an engine, and so is a frozen reference beside it."""
        if model is not self.model and not getattr(model, private.PREPARED, False):
            self.references.append(take(model.eval(), self._settings, frozen=True))
        mark_prepared(model)
        if model not in self.accelerator._models:
            self.accelerator._models.append(model)
        return model

    def close(self) -> None:
        """Closes the engine of the model, and those of its references."""
        for engine in (*self.references, *([self.engine] if self.engine is not None else ())):
            engine.close()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The engine has the precision: autocast and a GradScaler would do it twice."""
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return {**found, "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine moves it, as much as its budget holds."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        module = self.model if model is None else model
        if self.engine is not None and self.engine.module is not module:
            self.engine.close()  # hyperparameter search builds another model
        if self.engine is not None and self.engine.closed:
            if holder(module) is not None and self.engine.steps:
                warn_user(
                    "another Trainer took the model from this one, whose moments begin anew; a checkpoint keeps them"
                )
            self.engine = self.optimizer = None
        if self.engine is None:
            _refuse_model(module)
            give_back(module)  # in the dtypes that it came in
            made = super().create_optimizer(module)
            self._dtypes = {name: value.dtype for name, value in module.state_dict(keep_vars=True).items()}
            self.engine = take(module, self._settings.with_({"loss": self._loss_of(module)}), made)
            self.optimizer = self.engine.optimizer
        mark_prepared(module, self.optimizer)
        return self.optimizer

    def _loss_of(self, module: nn.Module) -> str:
        """Trainer's own loss reads no logits of a training pass; a smoothed one, or a subclass's, may."""
        own = type(self).compute_loss is transformers.Trainer.compute_loss
        reads_none = own and self.compute_loss_func is None and self.label_smoother is None
        if self._settings.loss == "auto" and not reads_none:
            return "whole"
        return best_loss(self._settings.loss, module)

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """In place of Accelerator.backward. Trainer has divided the loss already."""
        assert self.engine is not None
        self.engine.backward(loss)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        assert self.engine is not None
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        assert self.engine is not None
        if grad_norm is None and self._settings.updates != "in-backward":
            return self.engine.clip_grad_norm_(float("inf"))
        return grad_norm

    # -- evaluation -----------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Also of `predict`. Without training before it, the engine is built now."""
        if self.engine is None or self.engine.closed or self.engine.module is not self.model:
            self.create_optimizer()
        mark_prepared(self.model)
        return super().evaluation_loop(*args, **kwargs)

    # -- checkpoints ----------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """All ranks have a part of the weights, so all take part; the first one writes."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        self._weights = self._state_dict()
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            del self._weights

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self.engine is not None:
            found: dict[str, Any] | None = getattr(self, "_weights", None)
            state_dict = self._state_dict() if found is None else found
        with answering(self.model, state_dict or {}):
            super()._save(output_dir, state_dict)
        if isinstance(self.model, transformers.PreTrainedModel) and self.engine is not None:
            # It has just been told the dtype that the engine computes in.
            own = next((dtype for dtype in self._dtypes.values() if dtype.is_floating_point), torch.float32)
            if self.model.config.dtype != own:
                self.model.config.dtype = own
                self.model.config.save_pretrained(output_dir or self.args.output_dir)

    def _state_dict(self) -> dict[str, torch.Tensor]:
        """In the dtype that the model came in, whatever the engine computes in: stock Trainer has its weights so."""
        assert self.engine is not None
        found = self.engine.state_dict()
        return {name: value.to(self._dtypes.get(name, value.dtype)) for name, value in found.items()}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_as_stock(Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(MomentsAreInTheFolderEbbtide(), Path(output_dir) / private.OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / private.SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None
        folder = Path(checkpoint)
        if (folder / FOLDER).is_dir():
            # Trainer has random numbers of its own, and takes them up once its sampler has drawn.
            with as_drawn():
                self.engine.load(folder / FOLDER)
        elif (folder / private.OPTIMIZER).is_file():
            state = torch.load(folder / private.OPTIMIZER, map_location="cpu", weights_only=True)
            self.engine.optimizer.load_state_dict(state)
        else:
            return  # weights alone: a fresh start from them, as stock Trainer has it
        file = folder / private.SCHEDULER
        if file.is_file():
            self.lr_scheduler.load_state_dict(torch.load(file, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        module = self.model if model is None else model
        if self.engine is None or self.engine.closed or self.engine.module is not module:  # of `model_init`
            give_back(module)  # another Trainer may have it
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(Path(resume_from_checkpoint), super()._load_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._load_weights(Path(best), lambda _: super(Mixin, self)._load_best_model())

    def _load_weights(self, folder: Path, of_trainer: Any) -> None:
        """PEFT knows the names of an adapter's weights, and loads them into the module it has; the rest is by name. The
        engine's own have the module's names; some models are stored in another form."""
        assert self.engine is not None
        if (folder / FOLDER).is_dir() and not list(folder.glob("adapter_*")):
            self.engine.load_weights(folder / FOLDER)
            return
        if list(folder.glob("*.safetensors")) and not list(folder.glob("adapter_*")):
            self.engine.load_weights(folder)
            return
        with loading_into(self.engine):
            of_trainer(str(folder))


class Trainer(Mixin, transformers.Trainer):
    """transformers.Trainer; `ebbtide=` has the engine's settings."""


class Seq2SeqTrainer(Mixin, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, likewise."""


class RecordRun(transformers.TrainerCallback):
    """`Trainer(..., callbacks=[RecordRun("run")])`: the run describes itself in a folder, for `ebbtide report run`."""

    def __init__(self, folder: str | Path) -> None:
        self._run = RecordedRun(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._run.begin(None if model is None else holder(model), "Trainer")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._run.evaluated(metrics or {})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run.saved(str(Path(args.output_dir) / f"checkpoint-{state.global_step}"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run.end()


def _settings_for(args: Any, settings: Config, given: Given) -> Config:
    """What TrainingArguments say goes into the config; where both say something they are to agree."""
    _refuse_arguments(args)
    for key, other, off in (
        ("accumulate", "gradient_accumulation_steps", 1),
        ("clip", "max_grad_norm", None),
    ):
        if getattr(settings, key) != off:
            raise ConfigError(
                f"ebbtide[{key!r}] = {getattr(settings, key)!r}: Trainer does that, set {other} in TrainingArguments"
            )
    if "optimizer" in named_in(given):
        raise ConfigError(
            "ebbtide['optimizer']: Trainer builds the optimizer, set learning_rate, weight_decay, adam_beta1 and the "
            "like in TrainingArguments, or pass optimizers=(torch.optim.AdamW(...), scheduler)"
        )
    if settings.clip_value is not None and args.max_grad_norm:
        raise ConfigError(
            f"ebbtide['clip_value'] = {settings.clip_value} beside max_grad_norm={args.max_grad_norm} (1.0 if you set "
            "none): gradients are clipped in one way; set max_grad_norm=0 in TrainingArguments"
        )
    told = "bf16" if args.bf16 else "fp16" if args.fp16 else mixed_precision()
    settings = with_precision(settings, given, told, "TrainingArguments (or accelerate launch)")
    if settings.updates == "in-backward":
        if args.max_grad_norm:
            raise ConfigError(
                f"ebbtide['updates'] = 'in-backward' knows no norm of all gradients: expected max_grad_norm=0 in "
                f"TrainingArguments, found {args.max_grad_norm}"
            )
        if args.gradient_accumulation_steps > 1:
            raise ConfigError(
                "ebbtide['updates'] = 'in-backward' updates in every backward pass: expected "
                f"gradient_accumulation_steps=1, found {args.gradient_accumulation_steps}"
            )
    return settings


def _refuse_arguments(args: Any) -> None:
    refuse_launched()
    name = getattr(args.optim, "value", args.optim)
    bad = {
        "deepspeed": (bool(args.deepspeed), "ebbtide takes DeepSpeed's place: leave deepspeed out"),
        "fsdp": (bool(args.fsdp), "ebbtide shards the model itself: leave fsdp out, and start with torchrun"),
        "torch_compile": (
            bool(args.torch_compile),
            "a model that is compiled as a whole hides its parts from the engine: leave it out, and compile blocks with "
            'ebbtide={"compile": "blocks"}',
        ),
        "bf16_full_eval": (
            bool(args.bf16_full_eval),
            "the engine evaluates in the precision it trains in: leave it out",
        ),
        "fp16_full_eval": (
            bool(args.fp16_full_eval),
            "the engine evaluates in the precision it trains in: leave it out",
        ),
        f"optim={name!r}": (
            name not in private.ADAMW,
            f"the engine's rule is AdamW: {' or '.join(private.ADAMW)}",
        ),
    }
    for what, (found, why) in bad.items():
        if found:
            raise UnsupportedError(f"TrainingArguments({what}): {why}")


def _refuse_model(model: Any) -> None:
    if model is None:
        return  # model_init builds it later
    refuse_placed(model)
    if getattr(model, private.PREPARED, False) and holder(model) is None:
        raise UnsupportedError("the model was prepared by an Accelerator: give Trainer the bare model")
