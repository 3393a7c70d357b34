"""What a user asks for in `ebbtide=`, and what the framework is told beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.config import Config
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.integrations import _accelerate
from ebbtide.strict import read_file

Given = Config | Mapping[str, Any] | str | Path | None
"""What `ebbtide.initialize` takes."""


def named_in(given: Given) -> set[str]:
    """The settings that the user has named."""
    if isinstance(given, Config):
        return {key for key, value in given.to_dict().items() if value != Config().to_dict()[key]}
    if isinstance(given, str | Path):
        given = read_file(Path(given), "config")
    return set(given or ())


def with_precision(settings: Config, given: Given, told: str, where: str) -> Config:
    """`told`: what the framework was told, in the engine's word; fp32 is what it says where it was told nothing. A
    `Config` always has a precision, named by the user or not."""
    if not isinstance(given, Config) and "precision" not in named_in(given):
        return settings.with_({"precision": told})
    if told not in (settings.precision, "fp32"):
        raise ConfigError(
            f"ebbtide['precision'] = {settings.precision!r}, {where} says {told!r}: name the same, or leave one out"
        )
    return settings


def mixed_precision(given: str | None = None, where: str = "") -> str:
    """The engine's, for what Accelerate calls so. A script that names none has what its launcher says."""
    if given is None:
        given = os.environ.get(_accelerate.PRECISION, "no").lower()
        where = f"accelerate launch --mixed_precision {given}"
    if given not in ("no", "bf16", "fp16"):
        raise UnsupportedError(f"{where}: the engine computes in fp32 ('no'), bf16 or fp16")
    return "fp32" if given == "no" else given
