"""Weights from safetensors files, one tensor at a time: all names, shapes and files are checked before any is read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ebbtide.checkpoint import values
from ebbtide.errors import ConfigError, UnsupportedError, nearest
from ebbtide.runtime.session import Session

INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
COMPLEX = {"C64"}
INTEGERS = {"I64", "I32", "I16", "I8", "U8", "BOOL"}


@dataclass(frozen=True, slots=True)
class Entry:
    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of a folder as `save_pretrained` writes it (or of one file), under a module's names."""

    def __init__(
        self, place: str | Path, module: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """`shapes`: whole ones, of parameters that the module may have in part (experts)."""
        self.place = Path(place)
        self._shapes = shapes or {}
        self._entries = self._match(_entries(self.place), module)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str) -> torch.Tensor:
        """Opened anew each time, so that pages of the file that were read do not stay in memory."""
        entry = self._entries[name]
        try:
            with safe_open(entry.file, "pt") as file:
                return file.get_tensor(entry.key)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{entry.file} cannot be read: {error}") from error

    def load(self, session: Session, skip: Iterable[str] = ()) -> None:
        """Streams parameters and buffers into a session; `skip` names what is there already."""
        done = set(skip)
        for name in values.names(session):
            if name not in done:
                values.save(session, name, self.tensor(name))
        for name, buffer in values.persistent_buffers(session.module):
            if name not in done:
                buffer.copy_(self.tensor(name))

    def _match(self, found: list[Entry], module: nn.Module) -> dict[str, Entry]:
        """The entry of each parameter (under its first name) and persistent buffer."""
        first = {id(p): name for name, p in module.named_parameters()}
        owner = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        once = {id(buffer): key for key, buffer in values.persistent_buffers(module)}
        for key, buffer in values.persistent_buffers(module, under_every_name=True):
            owner[key], tensors[key] = once[id(buffer)], buffer
        ignored = {name for name, _ in module.named_buffers()} - set(tensors)
        translate = _translation(module, tensors)
        matched: dict[str, Entry] = {}
        sources: dict[str, Entry] = {}
        for entry in found:
            name = translate(entry.key)
            if name is None:
                if not _may_be_ignored(entry.key, module, ignored):
                    hint = nearest(entry.key, tensors) or ": the module has no such tensor"
                    raise ConfigError(f"{entry.file}: unknown key {entry.key!r}{hint}")
                continue
            self._check(entry, name, tensors[name], self._shapes.get(owner[name], tuple(tensors[name].shape)))
            if name in sources:
                raise ConfigError(
                    f"{entry.file}: key {entry.key!r} is in {sources[name].file.name} too, as {sources[name].key!r}"
                )
            sources[name] = entry
            earlier = matched.setdefault(owner[name], entry)
            if earlier is not entry:
                self._check_tied(earlier, entry)
        missing = [name for name in dict.fromkeys(owner.values()) if name not in matched]
        if missing:
            raise ConfigError(
                f"{self.place}: {len(missing)} of the module's tensors are missing, the first is {missing[0]!r}"
                f"{nearest(missing[0], [entry.key for entry in found])}"
            )
        return matched

    @staticmethod
    def _check(entry: Entry, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if entry.shape != shape:
            raise ConfigError(
                f"{entry.file}: {entry.key!r} has shape {entry.shape}, the module's {name} {shape}"
            )
        fitting = COMPLEX if tensor.is_complex() else FLOATS if tensor.is_floating_point() else INTEGERS
        if entry.dtype not in fitting:
            raise ConfigError(
                f"{entry.file}: {entry.key!r} is {entry.dtype}, the module's {name} {tensor.dtype}"
            )

    @staticmethod
    def _check_tied(one: Entry, other: Entry) -> None:
        with safe_open(one.file, "pt") as first, safe_open(other.file, "pt") as second:
            same = torch.equal(first.get_tensor(one.key), second.get_tensor(other.key))
        if not same:
            raise ConfigError(
                f"{other.file}: {one.key!r} and {other.key!r} differ, but are one tensor in the module; "
                "untie them in the model's config"
            )


def _entries(place: Path) -> list[Entry]:
    if place.is_file():
        files, listed = [place], None
    elif (place / INDEX).is_file():
        listed = _read_index(place / INDEX)
        files = [place / name for name in dict.fromkeys(listed.values())]
    elif (place / "model.safetensors").is_file():
        files, listed = [place / "model.safetensors"], None
    else:
        files, listed = sorted(place.glob("*.safetensors")), None
    if not files:
        what = "has no safetensors file" if place.is_dir() else "does not exist"
        raise ConfigError(f"weights: {place} {what}; expected a folder as save_pretrained() writes it")
    entries = [entry for file in files for entry in _read_header(file)]
    if listed is not None:
        _check_listed(place / INDEX, listed, entries)
    return entries


def _read_index(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path} is damaged: expected a JSON object with weight_map ({error})") from error
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ConfigError(f"{path} is damaged: weight_map is not an object of file names")
    return listed


def _check_listed(index: Path, listed: dict[str, str], entries: list[Entry]) -> None:
    there = {(entry.file.name, entry.key) for entry in entries}
    for key, name in listed.items():
        if (name, key) not in there:
            raise ConfigError(f"{index.parent / name}: lacks {key!r}, which {index.name} says it holds")


def _read_header(path: Path) -> list[Entry]:
    try:
        with safe_open(path, "pt") as file:
            slices = [(key, file.get_slice(key)) for key in file.keys()]  # noqa: SIM118
            return [Entry(path, key, tuple(s.get_shape()), s.get_dtype()) for key, s in slices]
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is missing or damaged, or not a safetensors file: {error}; fetch or save it again"
        ) from error


def _translation(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Callable[[str], str | None]:
    """From a key in a file to the module's name: as it is, with or without the base model's prefix, or as the
    module's library renamed it since."""
    prefix = getattr(module, "base_model_prefix", "")
    rename: Callable[[str], str] | None = None

    def fit(key: str) -> str | None:
        candidates = [key]
        if isinstance(prefix, str) and prefix:
            candidates += [f"{prefix}.{key}", key.removeprefix(f"{prefix}.")]
        return next((name for name in candidates if name in tensors), None)

    def translate(key: str) -> str | None:
        nonlocal rename
        if (name := fit(key)) is not None:
            return name
        rename = rename or _renaming(module)
        return fit(rename(key))

    return translate


def _renaming(module: nn.Module) -> Callable[[str], str]:
    """Hugging Face models are saved under the names of their first version."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return lambda key: key
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        return lambda key: key
    transforms = get_model_conversion_mapping(module)

    def rename(key: str) -> str:
        for transform in transforms:
            if isinstance(transform, WeightRenaming):
                key, _ = transform.rename_source_key(key)
        for transform in transforms:
            if isinstance(transform, WeightConverter) and transform.rename_source_key(key)[1] is not None:
                raise UnsupportedError(
                    f"{key!r} is stored in another form than {type(module).__name__} keeps it; load the model with "
                    "from_pretrained() and give that to initialize()"
                )
        return key

    return rename


def _may_be_ignored(key: str, module: nn.Module, ignored: set[str]) -> bool:
    """Buffers that files of earlier versions hold, and the module makes itself."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    prefix = getattr(module, "base_model_prefix", "")
    names = {key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")}
    return bool(names & ignored) or any(re.search(pattern, key) for pattern in patterns)
