"""From a name or a path to a model: what it is first, its weights when they are asked for.

Nothing here touches the network: configs and weights come from presets and from files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ebbtide.errors import ConfigError, UnsupportedError, nearest
from ebbtide.models.presets import MARK, PRESETS

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


@dataclass(frozen=True)
class ModelSpec:
    """A model before it is built."""

    name: str
    config: Any
    objective: Objective
    weights: Path | None
    """The folder to take weights from; None: they are drawn."""

    @property
    def vocabulary(self) -> int:
        return int(getattr(self.config, "vocab_size", 0))

    @property
    def context(self) -> int | None:
        """The longest sequence; None where positions have no end."""
        found = getattr(self.config, "max_position_embeddings", None)
        return None if self.objective == "image" or found is None else int(found)

    def build(self, seed: int) -> nn.Module:
        """The module in fp32, in training mode; `seed` draws the weights that are not read."""
        transformers = _transformers()
        auto = getattr(transformers, AUTO_CLASSES[self.objective])
        torch.manual_seed(seed)
        try:
            if self.weights is None:
                module = auto.from_config(self.config, dtype=torch.float32)
            else:
                module = self._load(auto, self.weights)
        except (ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: cannot build the model: {_line(error)}") from None
        return module.train()

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


def build_model(name_or_path: str, seed: int = 0) -> tuple[nn.Module, ModelSpec]:
    spec = find_model(name_or_path)
    return spec.build(seed), spec


def find_model(name_or_path: str) -> ModelSpec:
    """A preset, the path of a Hugging Face config.json, or a folder that holds one beside weights."""
    if name_or_path in PRESETS:
        return spec_of(name_or_path, PRESETS[name_or_path])
    path = Path(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path}: expected a model folder with a config.json; there is none")
        if not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"{path}: no *.safetensors files to start from; for drawn weights give {path / 'config.json'}"
            )
        return spec_of(name_or_path, _read(path / "config.json"), path)
    if path.exists():
        return spec_of(name_or_path, _read(path))
    if len(path.parts) > 1 or path.suffix:
        raise ConfigError(f"{path}: there is no such model config or folder{nearest(name_or_path, PRESETS)}")
    hint = nearest(name_or_path, PRESETS) or f"; presets: {', '.join(PRESETS)}"
    raise ConfigError(f"unknown model {name_or_path!r}{hint}")


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
    """The part of a library's message that says what is wrong."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the model config: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: expected a model's config.json: not valid JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{path}: expected a model's config.json; it has no 'model_type'")
    return fields


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
