"""Hugging Face Accelerate, with the model in an ebbtide engine.

    from ebbtide.integrations.accelerate import Accelerator

    accelerator = Accelerator(ebbtide={"device": {"memory": "20GB"}})
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

The loop stays as it is. `prepare` takes a module with its torch.optim.AdamW, Adam or SGD, at once or one after the
other; a module without one evaluates within the same budgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ebbtide.checkpoint.folders import make_folder, write_synced
from ebbtide.config import Config
from ebbtide.errors import ConfigError, StateError, UnsupportedError, warn_user
from ebbtide.integrations import _accelerate as private
from ebbtide.integrations._models import FirstCall, HeldEngine, give_back, holder, mark_prepared, take
from ebbtide.integrations._refused import refuse_launched, refuse_placed
from ebbtide.integrations._settings import Given, mixed_precision, with_precision
from ebbtide.integrations._state_dicts import answering, loading_into
from ebbtide.integrations._versions import require

require("accelerate", private.OLDEST, private.NEWEST)

UNFINISHED = "ebbtide-unfinished"
"""In a folder while it is saved to."""
WHOLE = (
    "a model that is compiled as a whole hides its parts from the engine: leave it out, and compile blocks "
    'with ebbtide={"compile": "blocks"}'
)
REFUSED = {
    "deepspeed_plugin": "ebbtide takes DeepSpeed's place: leave it out",
    "deepspeed_plugins": "ebbtide takes DeepSpeed's place: leave it out",
    "fsdp_plugin": "ebbtide shards the model itself: leave it out",
    "megatron_lm_plugin": "ebbtide shards the model itself: leave it out",
    "dynamo_backend": WHOLE,
    "dynamo_plugin": WHOLE,
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
    _save_model_state_pre_hook: OrderedDict[Any, Any]
    _load_model_state_pre_hook: OrderedDict[Any, Any]

    def __init__(self, *args: Any, ebbtide: Given = None, **kwargs: Any) -> None:
        for name, why in REFUSED.items():
            if kwargs.get(name):
                raise UnsupportedError(f"Accelerator({name}=...): {why}")
        refuse_launched()
        asked = kwargs.pop("mixed_precision", None)
        where = f"Accelerator(mixed_precision={asked!r})"
        told = mixed_precision(asked, where)
        settings = Config.read(ebbtide)
        if settings.accumulate != 1 or settings.clip is not None:
            raise ConfigError(
                "ebbtide['accumulate'] and ['clip']: Accelerate does that, with gradient_accumulation_steps and "
                "accelerator.clip_grad_norm_()"
            )
        self._settings = with_precision(settings, ebbtide, told, where if asked else "accelerate launch")
        self.engines: list[HeldEngine] = []
        super().__init__(*args, mixed_precision="no", **kwargs)

    @property
    def mixed_precision(self) -> str:
        """As stock says it, though it is the engine that computes so."""
        return "no" if self._settings.precision == "fp32" else self._settings.precision

    # -- what is prepared -----------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        modules = [one for one in args if isinstance(one, nn.Module)]
        made: dict[int, Any] = {}
        taken: list[nn.Module] = []
        for optimizer in (one for one in args if isinstance(one, torch.optim.Optimizer)):
            if not isinstance(optimizer, _Steps):
                module = self._of(optimizer, modules)
                if any(module is one for one in taken):
                    raise UnsupportedError(
                        "prepare: several optimizers of one model: the engine has one, with param_groups"
                    )
                taken.append(module)
                engine = self._take(module, optimizer)
                made[id(optimizer)] = _Steps(engine.optimizer, device_placement=False)
                mark_prepared(made[id(optimizer)])
        for module in modules:
            if not getattr(module, private.PREPARED, False) or holder(module) not in (None, *self.engines):
                self._await(module)
        return super().prepare(*(made.get(id(one), one) for one in args), device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stock would move a model to the device, and on several ranks wrap it."""
        if not getattr(model, private.PREPARED, False):
            return super().prepare_model(model, *args, **kwargs)
        if model not in self._models:
            self._models.append(model)
        return model

    def _of(self, optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> nn.Module:
        """The module whose parameters the optimizer has: one of these, or one that was prepared before."""
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known = {one: set(map(id, one.parameters())) for one in (*modules, *self._models)}
        found = [one for one, parameters in known.items() if parameters & trained]
        for one in found:
            if trained <= known[one]:
                return one
        if len(found) > 1:
            raise UnsupportedError(
                f"prepare: one {type(optimizer).__name__} for {len(found)} models, an engine has one: give each an "
                "optimizer, or put them into one module whose forward calls them"
            )
        if found:
            return found[0]
        raise ConfigError(
            f"prepare: a {type(optimizer).__name__} without the module whose parameters it has; give prepare the "
            "module first, or both at once, for the engine needs them together"
        )

    def _take(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> HeldEngine:
        refuse_placed(module)
        engine = take(module, self._settings, optimizer, frozen=optimizer is None)
        self.engines = [one for one in self.engines if not one.closed]
        self.engines.append(engine)
        mark_prepared(module)
        return engine

    def _await(self, module: nn.Module) -> None:
        """Its optimizer may come in a later `prepare`; the first call tells whether it came for evaluation alone."""
        refuse_placed(module)
        if _is_trained(module):
            give_back(module)
            FirstCall(module, self._begin)
            mark_prepared(module)
        else:
            self._take(module, None)

    def _begin(self, module: nn.Module) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self._take(module, None)
            return
        if self.num_processes > 1:
            raise ConfigError(
                "a model that was prepared without its optimizer is called to be trained, on several ranks: give "
                "prepare its optimizer, too"
            )
        warn_user(
            "a model that was prepared without its optimizer is called to be trained: PyTorch runs it, outside the "
            "budgets. Give prepare its optimizer, too; if it only evaluates, call eval() on it"
        )
        module.to(self.device)

    def engine_of(self, model: nn.Module) -> HeldEngine:
        """The one that has a prepared model."""
        engine = self._engine_with(model.parameters())
        if engine is None:
            raise StateError(
                f"engine_of: no engine has this {type(model).__name__}: prepare it with its optimizer; one that only "
                "evaluates is in an engine from its first call on"
            )
        return engine

    def _engine_with(self, parameters: Iterable[torch.Tensor]) -> HeldEngine | None:
        first = next(iter(parameters), None)
        for engine in self.engines:
            if any(first is parameter for parameter in engine.parameters()):
                return engine
        return None

    def free_memory(self, *objects: Any) -> Any:
        """Models keep their weights, in RAM."""
        for module in self._models:
            give_back(module)
            vars(module).pop(private.PREPARED, None)
        self.engines = []
        return super().free_memory(*objects)

    # -- steps ----------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        scaled = loss / self.gradient_accumulation_steps
        trained = [engine for engine in self.engines if _is_trained(engine.module)]
        called = (model for model in self._outside() if not FirstCall.awaited(model))
        if len(trained) == 1 and not any(map(_is_trained, called)):
            trained[0].backward(scaled, **kwargs)
        else:
            scaled.backward(**kwargs)  # the outputs that it comes from say which of them

    def _outside(self) -> list[nn.Module]:
        """Prepared models that no engine has."""
        return [model for model in self._models if holder(model) not in self.engines]

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        engine = self._engine_with(given)
        if engine is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        if norm_type != 2:
            raise UnsupportedError(
                f"clip_grad_norm_(norm_type={norm_type}): the engine has the 2-norm of all gradients"
            )
        own = {id(one) for one in engine.parameters() if one.requires_grad}
        asked = {id(one) for one in given if one.requires_grad}
        if own != asked:
            short = len(own - asked)
            found = f"{short} of them are missing" if short else f"there are {len(asked - own)} others"
            raise UnsupportedError(
                "clip_grad_norm_: the engine has the norm of all gradients of a model, and is to clip them together: "
                f"expected all its parameters that are trained and no others, but {found}. Give it model.parameters(), "
                "one model at a time"
            )
        return engine.clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise UnsupportedError(
            "clip_grad_value_: the engine clips by value while it updates: leave the call out, and give "
            "ebbtide={'clip_value': ...}"
        )

    # -- state ----------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Of a model in an engine, in fp32 whatever it computes in."""
        engine = self._engine_with(model.parameters())
        return super().get_state_dict(model, unwrap) if engine is None else engine.state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Schedules, loaders, random numbers and registered objects as ever; each engine in a folder of its own."""
        named = not self.project_configuration.automatic_checkpoint_naming
        with self._marked(Path(output_dir) if named and output_dir is not None else None):
            return self._save_state(output_dir, *args, **kwargs)

    def _save_state(self, output_dir: str | None, *args: Any, **kwargs: Any) -> Any:
        hooks = list(self._save_model_state_pre_hook.values())
        with self._without_engines():
            folder = super().save_state(output_dir, *args, **kwargs)
        if hooks:
            models = list(self._models)
            states = [self.get_state_dict(model, unwrap=False) for model in models]
            with ExitStack() as answers:
                for model, state in zip(models, states, strict=True):
                    answers.enter_context(answering(model, state))
                for hook in hooks:
                    hook(models, states, folder)
        for name, engine in self._by_folder():
            engine.save_as_stock(Path(folder) / name)
        return folder

    @contextmanager
    def _marked(self, folder: Path | None) -> Iterator[None]:
        """A folder that is saved to again has files of two steps where this does not come to its end."""
        marker = None if folder is None or not self.is_main_process else folder / UNFINISHED
        if marker is not None:
            make_folder(marker.parent, "save_state")
            write_synced(marker, b"")
        yield
        if marker is not None:
            marker.unlink()

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(input_dir) if input_dir is not None else self._latest()
        if (folder / UNFINISHED).exists():
            raise ConfigError(
                f"load_state: the last save_state into {folder} did not come to its end, so its files are of two steps; "
                "load another folder"
            )
        for number, model in enumerate(self._models):
            if FirstCall.awaited(model) and (folder / f"ebbtide-{number}").is_dir():
                self._take(model, None)  # it was in an engine, without an optimizer
        engines = self._by_folder()
        for name, _ in engines:
            if not (folder / name).is_dir():
                raise ConfigError(
                    f"load_state: {folder} has no {name}; expected one that this Accelerator saved"
                )
        hooks = list(self._load_model_state_pre_hook.values())
        with self._without_engines():
            super().load_state(str(folder), *args, **kwargs)
        with ExitStack() as loads:
            for _, engine in engines:
                loads.enter_context(loading_into(engine))
            models = list(self._models)
            for hook in hooks:
                hook(models, str(folder))
        for name, engine in engines:
            if _is_trained(engine.module):
                engine.load(folder / name)
            else:  # it has no groups like those that may have been saved
                engine.load_weights(folder / name)

    def _by_folder(self) -> list[tuple[str, HeldEngine]]:
        """In the order in which models were prepared, as stock has them."""
        found = ((f"ebbtide-{number}", holder(model)) for number, model in enumerate(self._models))
        return [(name, engine) for name, engine in found if engine is not None and engine in self.engines]

    def _latest(self) -> Path:
        """With automatic names."""
        found = Path(self.project_dir) / private.CHECKPOINTS
        return max(found.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))

    @contextmanager
    def _without_engines(self) -> Iterator[None]:
        """Stock sees the models and optimizers that no engine has, and none of the user's hooks, who see all."""
        kept = {name: getattr(self, name) for name in private.SEEN}
        self._models = self._outside()
        self._optimizers = [one for one in self._optimizers if not isinstance(one, _Steps)]
        self._save_model_state_pre_hook = OrderedDict()
        self._load_model_state_pre_hook = OrderedDict()
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
