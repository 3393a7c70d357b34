"""Settings read strictly: tables as frozen dataclasses whose fields carry their own checks.

A misspelt key is an error that names the nearest one, and not a default. The checks run wherever a table is
made and bring values into their final form (`"24GB"` becomes bytes), so a table that exists is valid.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

from ebbtide.errors import ConfigError, nearest
from ebbtide.units import nearest_size, parse_flops, parse_rate, parse_size

Auto = Literal["auto"]


class Key(NamedTuple):
    """What a message calls a setting."""

    noun: str
    path: str

    def __str__(self) -> str:
        return f"{self.noun} '{self.path}'"

    def at(self, place: int) -> Key:
        return Key(self.noun, f"{self.path}[{place}]")


Check = Callable[[Key, Any], Any]


def refuse(key: Key, found: object, allowed: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{key}: expected {allowed}, found {found!r}{hint}")


def choice(*choices: str) -> Check:
    def check(key: Key, value: Any) -> str:
        if value in choices and isinstance(value, str):
            return value
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise refuse(key, value, "one of " + ", ".join(f"'{choice}'" for choice in choices), hint)

    return check


def flag(key: Key, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse(key, value, "true or false")


def text(key: Key, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise refuse(key, value, "a string")


def patterns(key: Key, value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(pattern, str) for pattern in value):
        return tuple(value)
    raise refuse(key, value, "a list of name patterns, such as ['lm_head.*']")


def folders(key: Key, value: Any) -> tuple[str, ...]:
    """One folder or several; an empty string is none."""
    listed = () if value == "" else (value,) if isinstance(value, str | PurePath) else value
    if isinstance(listed, list | tuple) and all(isinstance(one, str | PurePath) and one for one in listed):
        return tuple(map(str, listed))
    raise refuse(key, value, "a folder or a list of folders, such as '/scratch' or ['/disk0', '/disk1']")


def number(allowed: str, holds: Callable[[float], bool]) -> Check:
    def check(key: Key, value: Any) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                found = float(value)
            except OverflowError:
                found = math.inf
            if math.isfinite(found) and holds(found):
                return found
        raise refuse(key, value, allowed)

    return check


def whole(least: int = 1, auto: bool = False, most: int | None = None) -> Check:
    allowed = ("'auto' or " if auto else "") + f"a whole number of at least {least}"

    def check(key: Key, value: Any) -> int | Auto:
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            if most is not None and value > most:
                raise refuse(key, value, f"a whole number of at most {most:,}")
            return value
        if value == "auto" and auto:
            return "auto"
        raise refuse(key, value, allowed)

    return check


def optional(check: Check) -> Check:
    return lambda key, value: None if value is None else check(key, value)


def size(least: int, auto: bool = True, words: tuple[str, ...] = ()) -> Check:
    """Bytes, or one of the words that stand for some."""
    words = ("auto", *words) if auto else words
    allowed = "a size such as '24GB' or '512MiB'" + (" above zero" if least else "")
    allowed = " or ".join([", ".join(map(repr, words)), allowed]) if words else allowed

    def check(key: Key, value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        hint = ""
        try:
            if least <= (found := parse_size(value)) < 1 << 63:
                return found
        except ConfigError:
            near = nearest(value.lower(), list(words)) if isinstance(value, str) and words else ""
            hint = near or nearest_size(value)
        raise refuse(key, value, allowed, hint)

    return check


def _quantity(parse: Callable[[Any], float], allowed: str) -> Check:
    def check(key: Key, value: Any) -> float:
        try:
            return parse(value)
        except ConfigError:
            raise refuse(key, value, allowed) from None

    return check


rate = _quantity(parse_rate, "a rate above zero such as '12GB/s'")
flops = _quantity(parse_flops, "operations a second above zero such as '125T'")


def pair(each: Check, other: Check | None = None) -> Check:
    def check(key: Key, value: Any) -> tuple[Any, Any]:
        if isinstance(value, list | tuple) and len(value) == 2:
            return each(key.at(0), value[0]), (other or each)(key.at(1), value[1])
        raise refuse(key, value, "a pair of numbers")

    return check


def several(each: Check) -> Check:
    def check(key: Key, value: Any) -> tuple[Any, ...]:
        if isinstance(value, list | tuple):
            return tuple(each(key.at(place), one) for place, one in enumerate(value))
        raise refuse(key, value, "a list")

    return check


@dataclass(frozen=True)
class Section:
    """A table of settings. `path` is its name inside the file, `noun` what a message calls one of its keys."""

    path: ClassVar[str] = ""
    noun: ClassVar[str] = "config key"

    def __post_init__(self) -> None:
        for name, check in checks(type(self)).items():
            object.__setattr__(self, name, check(self.key(name), getattr(self, name)))

    @classmethod
    def key(cls, name: str) -> Key:
        return Key(cls.noun, _join(cls.path, name))


S = TypeVar("S", bound=Section)


def build(kind: type[S], values: Mapping[str, object], root: type[Section] | None = None) -> S:
    """A table from plain values; `root` is the whole file's, where near names are looked for, too."""
    known = checks(kind, root)
    for key in values:
        if key not in known:
            raise unknown(root or kind, _join(kind.path, str(key)), dotted="." in str(key))
    for one in fields(kind):
        if one.default is MISSING and one.default_factory is MISSING and one.name not in values:
            hint = "a table" if isinstance(get_type_hints(kind)[one.name], type(Section)) else "a value"
            raise ConfigError(f"{kind.key(one.name)} is missing: expected {hint}")
    return kind(**{key: known[key](kind.key(key), value) for key, value in values.items()})


def plain(section: Section) -> dict[str, Any]:
    """Plain values that JSON and TOML can hold; `build` gives an equal table back."""
    values: dict[str, Any] = {}
    for one in fields(section):
        value = getattr(section, one.name)
        if isinstance(value, Section):
            values[one.name] = plain(value)
        elif value is not None:
            values[one.name] = _listed(value)
    return values


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def unknown(root: type[Section], key: str, dotted: bool = False) -> ConfigError:
    """Names the nearest key of the same table, else the same name in another table, else all there are. `dotted`: who
    wrote it means a table by what is before the dot."""
    table, _, name = key.rpartition(".")
    split = [known.rpartition(".") for known in _keys(root)]
    siblings = [leaf for path, _, leaf in split if path == table]
    close = [_join(table, leaf) for leaf in difflib.get_close_matches(name, siblings, n=1)]
    close += [_join(path, leaf) for path, _, leaf in split if leaf == name]
    path, _, leaf = close[0].rpartition(".") if close else ("", "", "")
    if dotted and path:
        return ConfigError(f"unknown {root.noun} '{key}'; did you mean {leaf!r} in the table {path!r}?")
    hint = f"; did you mean '{close[0]}'?" if close else f"; known here: {', '.join(siblings)}"
    return ConfigError(f"unknown {root.noun} '{key}'{hint}")


def read_file(path: Path, noun: str) -> Mapping[str, object]:
    """The table in a TOML or JSON file."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"expected a {noun} file that ends in .toml or .json")
    try:
        content = path.read_text(encoding="utf-8")
        values = tomllib.loads(content) if path.suffix == ".toml" else json.loads(content)
    except OSError as error:
        raise ConfigError(f"cannot read the {noun} file: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"expected a table of settings, found a {type(values).__name__}")
    return values


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def checks(kind: type[Section], root: type[Section] | None = None) -> dict[str, Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: _check_of(hints[one.name], root or kind) for one in fields(kind)}


def _check_of(hint: Any, root: type[Section]) -> Check:
    return _section(hint, root) if isinstance(hint, type) else hint.__metadata__[0]


def _section(kind: type[Section], root: type[Section]) -> Check:
    def check(key: Key, value: Any) -> Section:
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping):
            return build(kind, value, root)
        raise refuse(key, value, f"a table of settings ([{key.path}])")

    return check


def _keys(kind: type[Section]) -> Iterator[str]:
    hints = get_type_hints(kind)
    for one in fields(kind):
        if isinstance(hints[one.name], type) and issubclass(hints[one.name], Section):
            yield from _keys(hints[one.name])
        yield _join(kind.path, one.name)
