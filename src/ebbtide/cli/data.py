"""Text to train on, as bytes: a file, a folder, or the sources of the Python standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError, nearest
from ebbtide.units import format_size

if TYPE_CHECKING:
    import torch

MOST = 64 * 2**20
"""Bytes read of any data; what comes after them is not used."""
VALID_SHARE = 16
"""One file in so many is for validation; of a single file, its end."""
_LOOK = 4096
_LIBRARY_LEAVES_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo"}


@dataclass(frozen=True)
class Text:
    """Two streams of bytes, as tensors of uint8."""

    source: str
    train: torch.Tensor
    valid: torch.Tensor

    @cached_property
    def digest(self) -> str:
        """Another one, another text."""
        found = hashlib.blake2b(digest_size=16)
        for part in (self.train, self.valid):
            found.update(part.numel().to_bytes(8, "little"))
            found.update(part.numpy().data)
        return found.hexdigest()


def load_text(path: str | None, out: Path | None = None) -> Text:
    """`out`: what the run itself writes, which is no text to train on where that folder holds it."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _split("the Python standard library", _read(_library(root), root))
    root = check_text(path)
    if root.is_dir():
        return _split(str(root), _read(_files(root, written=out), root))
    return _split(str(root), _read([root], root.parent))


def check_text(path: str) -> Path:
    """What is told at once: whether there is such a text. Without torch."""
    root = Path(path)
    if not root.exists():
        close = (
            nearest(root.name, sorted(one.name for one in root.parent.iterdir()))
            if root.parent.is_dir()
            else ""
        )
        raise ConfigError(f"--data: {root} does not exist{close}")
    if not root.is_dir() and not _is_text(_start(root, _LOOK)):
        raise ConfigError(f"--data: {root} is not a text file")
    return root


def _library(root: Path) -> Iterator[Path]:
    return (path for path in _files(root, _LIBRARY_LEAVES_OUT) if path.suffix == ".py")


def _files(root: Path, left_out: Collection[str] = (), written: Path | None = None) -> Iterator[Path]:
    """All files below a folder but hidden ones, always in the same order."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in left_out
            and (written is None or Path(folder, name).resolve() != written.resolve())
        )
        paths = (Path(folder) / name for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _is_text(content: bytes) -> bool:
    return b"\0" not in content[:_LOOK]


def _start(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _read(paths: Iterable[Path], root: Path) -> list[tuple[str, bytes]]:
    files, total = [], 0
    for path in paths:
        content = _start(path, MOST - total)
        if content and _is_text(content):
            files.append((path.relative_to(root).as_posix(), content))
            total += len(content)
        if total >= MOST:
            break
    return files


def _for_validation(name: str) -> bool:
    return hashlib.blake2b(name.encode(errors="surrogateescape")).digest()[0] % VALID_SHARE == 0


def _split(source: str, files: list[tuple[str, bytes]]) -> Text:
    if not files:
        raise ConfigError(f"--data: {source} has no text in it")
    train = b"".join(content for name, content in files if not _for_validation(name))
    valid = b"".join(content for name, content in files if _for_validation(name))
    if not train or not valid:
        whole = train + valid
        cut = len(whole) - len(whole) // VALID_SHARE
        train, valid = whole[:cut], whole[cut:]
    return Text(f"{source}, {format_size(len(train) + len(valid))}", _tensor(train), _tensor(valid))


def _tensor(content: bytes) -> torch.Tensor:
    import torch

    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
