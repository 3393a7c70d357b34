"""What a model's name or path stands for: the fields of its config. Without torch: a wrong name is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbtide.errors import ConfigError, nearest
from ebbtide.models import names
from ebbtide.models.presets import PRESETS


def look_up(name_or_path: str) -> tuple[dict[str, Any], Path | None]:
    """The fields of a Hugging Face config.json, and the folder of weights where there is one."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path], None
    if name_or_path in names.NAMES:
        return names.fields_of(name_or_path) or {}, None
    path = Path(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path}: expected a model folder with a config.json; there is none{_beside(path / 'config.json')}"
            )
        if not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"{path}: no *.safetensors files to start from; for drawn weights give {path / 'config.json'}"
            )
        return _read(path / "config.json"), path
    if path.exists():
        return _read(path), None
    fields = names.fields_of(name_or_path)
    if fields is not None:
        return fields, None
    close = nearest(name_or_path, [*PRESETS, *names.NAMES])
    if len(path.parts) > 1 or (path.suffix and not close):
        raise ConfigError(f"{path}: there is no such model config or folder{close or _beside(path)}")
    hint = close or f"; presets: {', '.join(PRESETS)}; for plans also {names.SUMMARY}"
    raise ConfigError(f"unknown model {name_or_path!r}{hint}")


def _beside(path: Path) -> str:
    """A file or folder of nearly that name."""
    try:
        return nearest(path.name, sorted(one.name for one in path.parent.iterdir()))
    except OSError:
        return ""


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
