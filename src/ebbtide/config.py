"""The settings of a run: read strictly, so that a misspelt key is an error and not a default.

Every field carries its own check, which also brings the value into its final form (`"24GB"` becomes bytes).
The checks run wherever a config is made, so a `Config` that exists is valid. Which of the settings an engine
can carry out is the engine's to say: names are stable, features arrive one by one.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from ebbtide.errors import ConfigError, nearest
from ebbtide.units import nearest_size, parse_size

Auto = Literal["auto"]
Check = Callable[[str, Any], Any]


def _refuse(key: str, found: object, allowed: str, hint: str = "") -> ConfigError:
    return ConfigError(f"config key '{key}': expected {allowed}, found {found!r}{hint}")


def _choice(*choices: str) -> Check:
    def check(key: str, value: Any) -> str:
        if value in choices and isinstance(value, str):
            return value
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise _refuse(key, value, "one of " + ", ".join(f"'{choice}'" for choice in choices), hint)

    return check


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _refuse(key, value, "true or false")


def _text(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise _refuse(key, value, "a string")


def _patterns(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value):
        return tuple(value)
    raise _refuse(key, value, "a list of name patterns, such as ['lm_head.*']")


def _number(allowed: str, holds: Callable[[float], bool]) -> Check:
    def check(key: str, value: Any) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and holds(number):
                return number
        raise _refuse(key, value, allowed)

    return check


def _count(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise _refuse(key, value, "a whole number of at least 1")


def _optional(check: Check) -> Check:
    return lambda key, value: None if value is None else check(key, value)


def _size(least: int) -> Check:
    allowed = "'auto' or a size such as '24GB' or '512MiB'" + (" above zero" if least else "")

    def check(key: str, value: Any) -> int | Auto:
        if value == "auto":
            return "auto"
        hint = ""
        try:
            if (size := parse_size(value)) >= least:
                return size
        except ConfigError:
            hint = (nearest(value.lower(), ["auto"]) if isinstance(value, str) else "") or nearest_size(value)
        raise _refuse(key, value, allowed, hint)

    return check


def _threads(key: str, value: Any) -> int | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise _refuse(key, value, "'auto' or a whole number of at least 1")


def _pair(each: Check) -> Check:
    def check(key: str, value: Any) -> tuple[Any, Any]:
        if isinstance(value, list | tuple) and len(value) == 2:
            return each(f"{key}[0]", value[0]), each(f"{key}[1]", value[1])
        raise _refuse(key, value, "a pair of numbers")

    return check


@dataclass(frozen=True)
class _Section:
    """A table of settings. `path` is its name inside the config file."""

    path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, check in _checks(type(self)).items():
            object.__setattr__(self, name, check(_join(self.path, name), getattr(self, name)))


S = TypeVar("S", bound=_Section)

_fraction = _number("a number in [0, 1)", lambda x: 0 <= x < 1)
_positive = _number("a number above zero", lambda x: x > 0)
_not_negative = _number("a number of at least zero", lambda x: x >= 0)


@dataclass(frozen=True)
class OptimizerConfig(_Section):
    path: ClassVar[str] = "optimizer"

    name: Annotated[str, _choice("adamw", "adam")] = "adamw"
    lr: Annotated[float, _not_negative] = 1e-4
    betas: Annotated[tuple[float, float], _pair(_fraction)] = (0.9, 0.999)
    eps: Annotated[float, _positive] = 1e-8
    weight_decay: Annotated[float, _not_negative] = 0.01


@dataclass(frozen=True)
class DeviceConfig(_Section):
    path: ClassVar[str] = "device"

    kind: Annotated[str, _choice("auto", "cuda", "cpu")] = "auto"
    memory: Annotated[int | Auto, _size(least=1)] = "auto"
    """The whole budget: chunks and non-model data."""


@dataclass(frozen=True)
class HostConfig(_Section):
    path: ClassVar[str] = "host"

    memory: Annotated[int | Auto, _size(least=0)] = "auto"


@dataclass(frozen=True)
class SsdConfig(_Section):
    path: ClassVar[str] = "ssd"

    folder: Annotated[str, _text] = ""
    memory: Annotated[int | Auto, _size(least=0)] = 0


@dataclass(frozen=True)
class Config(_Section):
    precision: Annotated[str, _choice("bf16", "fp16", "fp32")] = "bf16"
    master: Annotated[str, _choice("auto", "split", "separate")] = "auto"
    layout: Annotated[str, _choice("chunk", "page", "tensor")] = "chunk"
    chunk_size: Annotated[int | Auto, _size(least=1)] = "auto"
    """Bytes at parameter precision; also the page."""
    placement: Annotated[str, _choice("auto", "host", "static")] = "auto"
    eviction: Annotated[str, _choice("farthest-next-use", "lru", "list-order")] = "farthest-next-use"
    prefetch: Annotated[bool, _flag] = True
    warmup_share: Annotated[float, _number("a share in (0, 1]", lambda x: 0 < x <= 1)] = 0.2
    nonfinite: Annotated[str, _choice("stop", "continue")] = "stop"
    updates: Annotated[str, _choice("exact", "in-backward", "lock-free")] = "exact"
    max_staleness: Annotated[int, _count] = 4
    accumulate: Annotated[int, _count] = 1
    clip: Annotated[float | None, _optional(_positive)] = None
    """Global norm; absent: no clipping."""
    unmanaged: Annotated[tuple[str, ...], _patterns] = ()
    host_modules: Annotated[tuple[str, ...], _patterns] = ()
    threads: Annotated[int | Auto, _threads] = "auto"
    """Intra-op threads, fixed for the whole run: their number changes gradients."""
    poison: Annotated[bool, _flag] = False
    """For tests: freed slots are filled with NaN."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    host: HostConfig = field(default_factory=HostConfig)
    ssd: SsdConfig = field(default_factory=SsdConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision == "fp16" and self.master == "split":
            raise _refuse(
                "master",
                "split",
                "'separate' or 'auto' with precision 'fp16': its bits are no half of fp32's",
            )
        if self.precision == "fp32" and self.master != "auto":
            raise _refuse("master", self.master, "'auto' with precision 'fp32': there is no master to keep")
        if self.updates == "in-backward" and self.clip is not None:
            raise _refuse(
                "clip",
                self.clip,
                "no clipping with updates 'in-backward': the norm is known only after backward",
            )
        if self.updates == "in-backward" and self.accumulate > 1:
            raise _refuse(
                "accumulate",
                self.accumulate,
                "1 with updates 'in-backward': every backward changes the weights",
            )

    @property
    def resolved_master(self) -> Literal["split", "separate", "none"]:
        if self.precision == "fp32":
            return "none"
        if self.master == "separate" or self.precision == "fp16":
            return "separate"
        return "split"

    @classmethod
    def read(cls, source: Config | Mapping[str, object] | str | Path | None = None) -> Config:
        """From a config, a dict, a TOML or JSON file; None gives the defaults."""
        if isinstance(source, Config):
            return source
        if source is None:
            return cls()
        if isinstance(source, str | Path):
            path = Path(source)
            try:
                return _build(cls, _load(path))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
        if isinstance(source, Mapping):
            return _build(cls, source)
        raise ConfigError(
            f"expected a Config, a dict or the path of a TOML or JSON file, found a {type(source).__name__}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and TOML can hold; `read` gives an equal config back."""
        return _plain(self)

    def with_(self, changes: Mapping[str, object]) -> Config:
        """A copy with some keys changed; keys inside tables are dotted: `{"device.memory": "1GB"}`."""
        changed = self.to_dict()
        for key, value in changes.items():
            *tables, last = key.split(".")
            table = changed
            for name in tables:
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    raise _unknown(key)
            table[last] = value
        return Config.read(changed)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _checks(kind: type[_Section]) -> dict[str, Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: _check_of(hints[one.name]) for one in fields(kind)}


def _check_of(hint: Any) -> Check:
    return _section(hint) if isinstance(hint, type) else hint.__metadata__[0]


def _section(kind: type[_Section]) -> Check:
    def check(key: str, value: Any) -> _Section:
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping):
            return _build(kind, value)
        raise _refuse(key, value, f"a table of settings ([{key}])")

    return check


def _build(kind: type[S], values: Mapping[str, object]) -> S:
    known = _checks(kind)
    for key in values:
        if key not in known:
            raise _unknown(_join(kind.path, str(key)))
    return kind(**values)


def _plain(section: _Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for one in fields(section):
        value = getattr(section, one.name)
        if isinstance(value, _Section):
            values[one.name] = _plain(value)
        elif value is not None:
            values[one.name] = list(value) if isinstance(value, tuple) else value
    return values


def _keys(section: _Section) -> Iterator[str]:
    for one in fields(section):
        value = getattr(section, one.name)
        if isinstance(value, _Section):
            yield from _keys(value)
        yield _join(section.path, one.name)


def _unknown(key: str) -> ConfigError:
    """Names the nearest key of the same table, else the same name in another table, else all there are."""
    table, _, name = key.rpartition(".")
    split = [known.rpartition(".") for known in _keys(Config())]
    siblings = [leaf for path, _, leaf in split if path == table]
    close = [_join(table, leaf) for leaf in difflib.get_close_matches(name, siblings, n=1)]
    close += [_join(path, leaf) for path, _, leaf in split if leaf == name]
    hint = f"; did you mean '{close[0]}'?" if close else f"; known here: {', '.join(siblings)}"
    return ConfigError(f"unknown config key '{key}'{hint}")


def _load(path: Path) -> Mapping[str, object]:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError("expected a config file that ends in .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the config file: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"expected a table of settings, found a {type(values).__name__}")
    return values
