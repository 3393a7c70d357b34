"""Hugging Face Accelerate, with the model in an ebbtide engine.

    from ebbtide.integrations.accelerate import Accelerator

    accelerator = Accelerator(ebbtide={"device": {"memory": "20GB"}})
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

The loop stays as it is. `prepare` takes a module together with its torch.optim.AdamW or Adam; a module without one is
frozen, and evaluates within the same budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ebbtide.config import Config
from ebbtide.engine import Engine
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.integrations import _transformers as private
from ebbtide.integrations._models import give_back, holder, take

REFUSED = {
    "deepspeed_plugin": "ebbtide takes DeepSpeed's place: leave it out",
    "deepspeed_plugins": "ebbtide takes DeepSpeed's place: leave it out",
    "fsdp_plugin": "ebbtide shards the model itself: leave it out",
    "megatron_lm_plugin": "ebbtide shards the model itself: leave it out",
    "dynamo_backend": "a compiled module hides its parts from the engine: leave it out",
    "dynamo_plugin": "a compiled module hides its parts from the engine: leave it out",
}


class _Steps(AcceleratedOptimizer):
    """The engine's optimizer as Accelerate has them: it steps where gradients are complete."""

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.step_was_skipped)


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator; `ebbtide=` has the engine's settings."""

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(
        self, *args: Any, ebbtide: Config | Mapping[str, Any] | str | Path | None = None, **kwargs: Any
    ) -> None:
        for name, why in REFUSED.items():
            if kwargs.get(name):
                raise UnsupportedError(f"Accelerator({name}=...): {why}")
        precision = kwargs.pop("mixed_precision", None) or "no"
        if precision not in ("no", "bf16", "fp16"):
            raise UnsupportedError(
                f"Accelerator(mixed_precision={precision!r}): the engine computes in fp32 ('no'), bf16 or fp16"
            )
        settings = Config.read(ebbtide)
        if settings.accumulate != 1 or settings.clip is not None:
            raise ConfigError(
                "ebbtide['accumulate'] and ['clip']: Accelerate does that, with gradient_accumulation_steps and "
                "accelerator.clip_grad_norm_()"
            )
        self._settings = settings.with_({"precision": "fp32" if precision == "no" else precision})
        self.engines: list[Engine] = []
        super().__init__(*args, mixed_precision="no", **kwargs)

    # -- what is prepared -----------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        made: dict[int, Any] = {}
        for module in (one for one in args if isinstance(one, nn.Module)):
            if getattr(module, private.PREPARED, False) and holder(module) in (None, *self.engines):
                continue
            optimizer = _of(module, (one for one in args if isinstance(one, torch.optim.Optimizer)))
            engine = self._take(module, optimizer)
            if optimizer is not None:
                made[id(optimizer)] = _Steps(engine.optimizer, device_placement=False)
                private.mark_prepared(made[id(optimizer)])
        for one in args:
            if isinstance(one, torch.optim.Optimizer) and id(one) not in made and not isinstance(one, _Steps):
                raise ConfigError(
                    f"prepare: a {type(one).__name__} without the module whose parameters it has; give prepare both at "
                    "once, for the engine needs them together"
                )
        return super().prepare(*(made.get(id(one), one) for one in args), device_placement=device_placement)

    def _take(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
        if getattr(module, "hf_device_map", None) is not None:
            raise UnsupportedError(
                "prepare: the model was loaded with device_map; load it without, on the CPU: the engine places it"
            )
        engine = take(module, self._settings, optimizer, frozen=optimizer is None)
        self.engines.append(engine)
        private.mark_prepared(module)
        return engine

    def engine_of(self, model: nn.Module) -> Engine:
        """The one that has a prepared model."""
        return next(engine for engine in self.engines if engine.module is model)

    def free_memory(self, *objects: Any) -> Any:
        """Models keep their weights, in RAM."""
        for engine in self.engines:
            give_back(engine.module)
        self.engines = []
        return super().free_memory(*objects)

    # -- steps ----------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        trained = [engine for engine in self.engines if any(p.requires_grad for p in engine.parameters())]
        scaled = loss / self.gradient_accumulation_steps
        if len(trained) == 1:
            trained[0].backward(scaled, **kwargs)
        else:
            scaled.backward(**kwargs)  # the outputs that it comes from say which of them

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        if norm_type != 2:
            raise UnsupportedError(
                f"clip_grad_norm_(norm_type={norm_type}): the engine has the 2-norm of all gradients"
            )
        first = next(iter(parameters), None)
        for engine in self.engines:
            if any(first is parameter for parameter in engine.parameters()):
                return engine.clip_grad_norm_(max_norm)
        raise ConfigError("clip_grad_norm_: expected the parameters of a prepared model")

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise UnsupportedError("clip_grad_value_: the engine clips by the global norm; use clip_grad_norm_")

    # -- state ----------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Of a prepared model, in fp32 whatever it computes in."""
        for engine in self.engines:
            if engine.module is model:
                return engine.state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Schedules, loaders, random numbers and registered objects as ever; each engine in a folder of its own."""
        with self._without_models():
            folder = super().save_state(output_dir, *args, **kwargs)
        for number, engine in enumerate(self.engines):
            engine.save(Path(folder) / f"ebbtide-{number}")
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(input_dir) if input_dir is not None else self._latest()
        for number, engine in enumerate(self.engines):
            if not (folder / f"ebbtide-{number}").is_dir():
                raise ConfigError(
                    f"load_state: {folder} has no ebbtide-{number}; expected one that this Accelerator saved"
                )
            engine.load(folder / f"ebbtide-{number}")
        with self._without_models():
            return super().load_state(str(folder), *args, **kwargs)

    def _latest(self) -> Path:
        """With automatic names."""
        found = Path(self.project_dir) / "checkpoints"
        return max(found.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        models, optimizers = self._models, self._optimizers
        ours = [engine.module for engine in self.engines]
        self._models = [one for one in models if not any(one is module for module in ours)]
        self._optimizers = [one for one in optimizers if not isinstance(one, _Steps)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def _of(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """The optimizer that has parameters of a module's."""
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    return None
