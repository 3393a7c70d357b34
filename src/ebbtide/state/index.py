"""What a checkpoint holds, and where: a file in JSON with a checksum of its own."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
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

FORMAT = 2


@dataclass(frozen=True)
class Piece:
    """Where some bytes of a checkpoint are."""

    file: str
    offset: int
    nbytes: int
    checksum: int


def index_of(metadata: Metadata, pieces: Mapping[Any, Piece]) -> bytes:
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


def _row(piece: Piece) -> list[Any]:
    return [piece.file, piece.offset, piece.nbytes, piece.checksum]


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
        if body["format"] != FORMAT:
            raise IntegrityError(
                f"{path}: expected a checkpoint of format {FORMAT}, found {body['format']}; load it with the version "
                "of ebbtide that wrote it"
            )
        return _metadata(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise IntegrityError(f"{path}: is damaged ({error}); load another checkpoint") from error


def _metadata(body: Mapping[str, Any]) -> Metadata:
    known: dict[str, Any] = {}
    pieces: dict[Any, Piece] = {}
    for key, stored in body["tensors"].items():
        chunks = [
            ChunkStorageMetadata(torch.Size([row[0]]), torch.Size([row[1]])) for row in stored["pieces"]
        ]
        properties = TensorProperties(getattr(torch, stored["dtype"]))
        known[key] = TensorStorageMetadata(properties, torch.Size([stored["size"]]), chunks)
        for row in stored["pieces"]:
            pieces[MetadataIndex(key, [row[0]])] = Piece(*row[2:])
    for key, row in body["bytes"].items():
        known[key] = BytesStorageMetadata()
        pieces[MetadataIndex(key)] = Piece(*row)
    return Metadata(known, storage_data=pieces)
