"""What a checkpoint holds, and where: a file in JSON with a checksum of its own.

A range of a tensor is one piece of a file or, with masters that are split, two: the upper halves of its numbers and the
lower ones (`Kernels.join`), as they lie in memory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ebbtide.errors import IntegrityError
from ebbtide.state.folders import INDEX

FORMAT, BEFORE = 3, 2
"""The one before had no ranges in two pieces."""


@dataclass(frozen=True)
class Piece:
    """Where some bytes of a checkpoint are."""

    file: str
    offset: int
    nbytes: int
    checksum: int


def index_of(metadata: Metadata, pieces: Mapping[Any, Sequence[Piece]]) -> bytes:
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            others[key] = _row(pieces[key, None])
            continue
        rows = [[c.offsets[0], c.sizes[0], *_row(pieces[key, c.offsets])] for c in stored.chunks]
        tensors[key] = {"dtype": _name(stored.properties.dtype), "size": stored.size[0], "pieces": rows}
    body = json.dumps({"format": FORMAT, "tensors": tensors, "bytes": others})
    return json.dumps({"checksum": zlib.crc32(body.encode()), "body": body}).encode()


def _row(pieces: Sequence[Piece]) -> list[Any]:
    return [fact for piece in pieces for fact in astuple(piece)]


def _pieces(row: Sequence[Any]) -> tuple[Piece, ...]:
    facts = len(fields(Piece))
    return tuple(Piece(*row[first : first + facts]) for first in range(0, len(row), facts))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_index(folder: Path) -> Metadata:
    """What a checkpoint holds, and where."""
    path = folder / INDEX
    try:
        whole = json.loads(path.read_bytes())
        if zlib.crc32(whole["body"].encode()) != whole["checksum"]:
            raise ValueError("its checksum is another")
        body = json.loads(whole["body"])
        if body["format"] not in (BEFORE, FORMAT):
            raise IntegrityError(
                f"{path}: expected a checkpoint of format {FORMAT}, found {body['format']}; load it with the version "
                "of ebbtide that wrote it"
            )
        return _metadata(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise IntegrityError(f"{path}: is damaged ({error}); load another checkpoint") from error


def _metadata(body: Mapping[str, Any]) -> Metadata:
    known: dict[str, Any] = {}
    pieces: dict[Any, tuple[Piece, ...]] = {}
    for key, stored in body["tensors"].items():
        chunks = [
            ChunkStorageMetadata(torch.Size([row[0]]), torch.Size([row[1]])) for row in stored["pieces"]
        ]
        properties = TensorProperties(getattr(torch, stored["dtype"]))
        known[key] = TensorStorageMetadata(properties, torch.Size([stored["size"]]), chunks)
        for row in stored["pieces"]:
            pieces[MetadataIndex(key, [row[0]])] = _pieces(row[2:])
    for key, row in body["bytes"].items():
        known[key] = BytesStorageMetadata()
        pieces[MetadataIndex(key)] = _pieces(row)
    return Metadata(known, storage_data=pieces)
