"""From a name or a path to a model: what it is first, its weights when they are asked for.

Nothing here touches the network: configs and weights come from presets and from files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ebbtide.errors import ConfigError, UnsupportedError, nearest
from ebbtide.models import depth
from ebbtide.models.lookup import look_up
from ebbtide.models.presets import MARK

Objective = Literal["causal", "masked", "seq2seq", "image"]

AUTO_CLASSES: dict[Objective, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
}
_SUFFIXES: dict[str, Objective] = {
    "LMHeadModel": "causal",
    "ForCausalLM": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "seq2seq",
    "ForImageClassification": "image",
}


FEW_EXPERTS = 4


@dataclass(frozen=True)
class ModelSpec:
    """A model before it is built."""

    name: str
    config: Any
    objective: Objective
    weights: Path | None
    """The folder to take weights from; None: they are drawn."""
    scored: int = 0
    """Experts that routers choose among, where a layer holds only a share of them."""

    @property
    def vocabulary(self) -> int:
        return int(getattr(self.config, "vocab_size", 0))

    @property
    def context(self) -> int | None:
        """The longest sequence; None where positions have no end."""
        found = getattr(self.config, "max_position_embeddings", None)
        return None if self.objective == "image" or found is None else int(found)

    @property
    def layers(self) -> int:
        """Of one stack, where there are an encoder and a decoder."""
        return int(getattr(self.config, "num_hidden_layers", 0))

    @property
    def experts(self) -> int:
        """Experts that a sparse layer holds; 0: there are none."""
        return depth.experts(self.config)

    @cached_property
    def parameters(self) -> int:
        """Elements of the real module's parameters, tied ones once."""
        if self.experts <= FEW_EXPERTS:
            return count_parameters(self.on_meta())
        # One more expert is as large as any other; building thousands would take half a minute.
        few, more = (
            count_parameters(replace(self, config=depth.with_experts(self.config, n)).on_meta())
            for n in (FEW_EXPERTS - 1, FEW_EXPERTS)
        )
        return few + (self.experts - FEW_EXPERTS + 1) * (more - few)

    def with_layers(self, count: int) -> ModelSpec:
        """The same model with other layers; encoder and decoder alike, sparse layers in the same pattern."""
        if count == self.layers:
            return self
        if count < 1 or not self.layers:
            raise ConfigError(f"{self.name}: cannot make it {count} layers deep; it has {self.layers}")
        name = f"{self.name} with {count} layers"
        return replace(self, name=name, config=depth.with_layers(self.config, count), weights=None)

    def share_of_experts(self, ranks: int) -> ModelSpec:
        """What one of `ranks` holds where experts are spread over them: experts // ranks in each sparse layer, at
        least one. Routers go on choosing among all (those of SwitchTransformers and Mixtral; others choose among
        the share, which makes them a little smaller). To plan with, not to train."""
        if ranks < 1:
            raise ConfigError(
                f"{self.name}: experts: expected to spread them over 1 rank or more, found {ranks}"
            )
        if ranks == 1 or not self.experts:
            return self
        share = depth.with_experts(self.config, max(1, self.experts // ranks))
        return replace(self, config=share, weights=None, scored=self.scored or self.experts)

    def on_meta(self) -> nn.Module:
        """The module on the meta device, in training mode: no memory, no random numbers, no weights read."""
        with torch.device("meta"):
            module = self._made(lambda auto: auto.from_config(self.config, dtype=torch.float32))
            if self.scored:
                depth.widen_routers(module, self.scored)
        return module

    def build(self, seed: int) -> nn.Module:
        """The module in fp32, in training mode; `seed` draws the weights that are not read."""
        if self.scored:
            raise ConfigError(f"{self.name}: a share of the experts is to plan with, not to train")
        torch.manual_seed(seed)
        folder = self.weights
        if folder is None:
            return self._made(lambda auto: auto.from_config(self.config, dtype=torch.float32))
        return self._made(lambda auto: self._load(auto, folder))

    def _made(self, make: Callable[[Any], nn.Module]) -> nn.Module:
        auto = getattr(_transformers(), AUTO_CLASSES[self.objective])
        try:
            module = make(auto)
        except (ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: cannot build the model: {_line(error)}") from None
        return module.train()

    # -- what it is given -----------------------------------------------------------------------------

    def check_length(self, seq: int) -> None:
        if self.context is not None and seq > self.context:
            raise ConfigError(f"--seq: {seq} is longer than the context of {self.name}, {self.context}")

    def tokens(self, batch: int, seq: int) -> int:
        """Positions that a batch trains: those that every parameter's multiplications are done for."""
        if self.objective == "image":
            self.pixels()
            return batch * ((self.config.image_size // self.config.patch_size) ** 2 + 1)
        return batch * (seq // 2 if self.objective == "seq2seq" else seq)

    def pixels(self) -> int:
        """Numbers in an image."""
        config = self.config
        names = ("image_size", "num_channels", "patch_size")
        if not all(isinstance(getattr(config, name, None), int) for name in names):
            raise ConfigError(
                f"{self.name}: expected one image_size, num_channels and patch_size in its config"
            )
        return int(config.num_channels * config.image_size**2)

    def example(self, batch: int, seq: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The forward's keyword arguments as `Batches` makes them, on the meta device; pixels in `dtype`."""
        self.check_length(seq)

        def ids(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int64, device="meta")

        if self.objective == "image":
            self.pixels()
            side, channels = self.config.image_size, self.config.num_channels
            pixels = torch.empty(batch, channels, side, side, dtype=dtype or torch.float32, device="meta")
            return {"pixel_values": pixels, "labels": ids(batch)}
        if self.objective == "causal":
            tokens = ids(batch, seq)
            return {"input_ids": tokens, "labels": tokens}
        length = seq // 2 if self.objective == "seq2seq" else seq
        return {"input_ids": ids(batch, length), "labels": ids(batch, length)}

    def _load(self, auto: Any, folder: Path) -> nn.Module:
        from safetensors import SafetensorError

        try:
            module, found = auto.from_pretrained(
                folder,
                config=self.config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder}: cannot read the weights: {_line(error)}") from None
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"{folder}: {len(missing)} weights are missing, the first is {missing[0]!r}")
        return module


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def build_model(name_or_path: str, seed: int = 0) -> tuple[nn.Module, ModelSpec]:
    spec = find_model(name_or_path)
    return spec.build(seed), spec


def find_model(name_or_path: str) -> ModelSpec:
    """A preset, a name that says the shape (`names`), the path of a Hugging Face config.json, or a folder that holds
    one beside weights."""
    fields, weights = look_up(name_or_path)
    return spec_of(name_or_path, fields, weights)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            "models by name and from files need Hugging Face transformers: pip install 'ebbtide[transformers]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _line(error: Exception) -> str:
    """The part of a library's message that says what is wrong: its first line, and what a colon there announces."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    count = next((i for i, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count]) if lines else type(error).__name__


def spec_of(name: str, fields: dict[str, Any], weights: Path | None = None) -> ModelSpec:
    """From the fields of a Hugging Face config.json."""
    kinds = _transformers().models.auto.configuration_auto.CONFIG_MAPPING
    kind = fields["model_type"]
    if kind not in kinds:
        raise ConfigError(f"{name}: unknown model_type {kind!r}{nearest(kind, list(kinds))}")
    try:
        config = kinds[kind].from_dict({**fields, "use_cache": False})
    except Exception as error:  # each config class has checks, and exceptions, of its own
        raise ConfigError(f"{name}: not a valid {kind} config: {_line(error)}") from None
    spec = ModelSpec(name, config, _objective(name, config), weights)
    least = {"image": 0, "masked": MARK + 1}.get(spec.objective, MARK)
    if spec.vocabulary < least:
        raise ConfigError(f"{name}: text is read as bytes, which needs a vocabulary of {least} or more; "
                          f"it has {spec.vocabulary}")  # fmt: skip
    return spec


def _objective(name: str, config: Any) -> Objective:
    """What the architecture says, else the head that a model of this type has."""
    for architecture in config.architectures or []:
        for suffix, objective in _SUFFIXES.items():
            if architecture.endswith(suffix):
                return objective
        raise ConfigError(
            f"{name}: {architecture} has no objective here; expected a name that ends in {', '.join(_SUFFIXES)}"
        )
    order: tuple[Objective, ...] = ("seq2seq", "image", "masked", "causal")
    for objective in order:
        if type(config) in getattr(_transformers(), AUTO_CLASSES[objective])._model_mapping:
            return objective
    raise ConfigError(f"{name}: a {config.model_type} model has no head to train here")
