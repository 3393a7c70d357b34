"""What a checkpoint holds, and where: a file in JSON with a checksum of its own.

A range of a tensor is one piece of a file or, with masters that are split, two: the upper halves of its numbers and the
lower ones (`Kernels.join`), as they lie in memory. Each rank's file ends with a table of its own pieces. An index is
read as a whole and held against the files' tables before anything is believed: see `look_at_index`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from math import prod
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

from ebbtide.checkpoint.facts import PlainData
from ebbtide.checkpoint.folders import INDEX, SHARD
from ebbtide.errors import IntegrityError

FORMAT, BEFORE = 4, (2, 3)
"""The ones before had no ranges in two pieces, and no tables in the files."""
TABLE = "table"
CRC = (1 << 32) - 1

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
"""By the names that they have in an index."""


@dataclass(frozen=True)
class Piece:
    """Where some bytes of a checkpoint are."""

    file: str
    offset: int
    nbytes: int
    checksum: int


Row = tuple[str, int, int, str, int, int, int]
"""A piece in the table of its file: key, first element, how many, dtype, offset, bytes, checksum."""


@dataclass(frozen=True)
class Index:
    """A checkpoint's index that has been looked at."""

    metadata: Metadata
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """By tensor, shape and strides; empty in the formats before."""


def index_of(metadata: Metadata, pieces: Mapping[Any, Sequence[Piece]], shapes: Mapping[str, Any]) -> bytes:
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            others[key] = _row(pieces[key, None])
            continue
        rows = [[c.offsets[0], c.sizes[0], *_row(pieces[key, c.offsets])] for c in stored.chunks]
        shape, stride = shapes[key]
        tensors[key] = {
            "dtype": name_of(stored.properties.dtype),
            "size": stored.size[0],
            "shape": list(shape),
            "stride": list(stride),
            "pieces": rows,
        }
    for (key, _), found in pieces.items():
        if key.startswith(f"{TABLE}/"):
            tables[found[0].file] = list(astuple(found[0]))[1:]
    body = json.dumps({"format": FORMAT, "tensors": tensors, "bytes": others, "files": tables})
    return json.dumps({"checksum": zlib.crc32(body.encode()), "body": body}).encode()


def table_of(rows: Iterable[Row]) -> bytes:
    """Of one file's pieces."""
    return json.dumps(sorted(rows, key=lambda row: row[4])).encode()


def _row(pieces: Sequence[Piece]) -> list[Any]:
    return [fact for piece in pieces for fact in astuple(piece)]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading -------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Metadata:
    """What a checkpoint holds, and where."""
    return look_at_index(folder).metadata


def look_at_index(folder: Path) -> Index:
    """The index, if all of it holds: types and ranges, every element of a tensor exactly once, files that are there and
    long enough, bytes that belong to one piece, and files whose own tables say the same."""
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path}: cannot be read ({error.strerror}); load another checkpoint") from error
    whole = PlainData.parse(content, str(path))
    checksum, text = whole.fields("checksum", "body")
    if zlib.crc32(text.text().encode()) != checksum.number(0, CRC):
        text.wrong("what the checksum says", found="another content")
    body = PlainData.parse(text.value.encode(), str(path))
    found = body.items().get("format", PlainData(None, str(path))).number()
    if found != FORMAT and found not in BEFORE:
        raise IntegrityError(
            f"{path}: expected a checkpoint of format {FORMAT}, found {found}; load it with the version of ebbtide that "
            "wrote it"
        )
    return _IndexReading(folder, found).read(body)


class _IndexReading:
    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._format = folder, number
        self._known: dict[str, Any] = {}
        self._pieces: dict[Any, tuple[Piece, ...]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._rows: dict[str, list[Row]] = {}
        """By file, its pieces as the index has them."""
        self._lengths: dict[str, int] = {}

    def read(self, body: PlainData) -> Index:
        with_tables = self._format == FORMAT
        _, tensors, others, *tables = body.fields(
            "format", "tensors", "bytes", *(("files",) if with_tables else ())
        )
        for key, stored in tensors.items().items():
            self._tensor(key, stored)
        for key, row in others.items().items():
            pieces = self._of_row(row.entries(), row)
            if len(pieces) != 1:
                row.wrong("one piece")
            self._add(key, 0, pieces[0].nbytes, "bytes", pieces)
            self._known[key] = BytesStorageMetadata()
            self._pieces[MetadataIndex(key)] = pieces
        tabled = (
            {name: self._table(name, row) for name, row in tables[0].items().items()} if with_tables else {}
        )
        self._refuse_overlaps(tabled)
        if with_tables:
            self._compare(tabled, body)
        return Index(Metadata(self._known, storage_data=self._pieces), self._shapes)

    def _tensor(self, key: str, stored: PlainData) -> None:
        described = ("shape", "stride") if self._format == FORMAT else ()
        dtype, size, *form, rows = stored.fields("dtype", "size", *described, "pieces")
        if dtype.text() not in DTYPES:
            dtype.wrong("a dtype of torch")
        if form:
            shape, stride = form[0].numbers(), form[1].numbers()
            if prod(shape) != size.number() or len(shape) != len(stride):
                stored.wrong(f"a shape of {size.value} elements", found=f"{shape}, strides {stride}")
            self._shapes[key] = shape, stride
        chunks = []
        for row in rows.entries():
            facts = row.entries()
            if len(facts) < 2:
                row.wrong("a range and its pieces")
            first, count = facts[0].number(0, size.number()), facts[1].number(1)
            pieces = self._of_row(facts[2:], row)
            self._refuse_sizes(row, count, dtype.value, pieces)
            self._add(key, first, count, dtype.value, pieces)
            chunks.append(ChunkStorageMetadata(torch.Size([first]), torch.Size([count])))
            self._pieces[MetadataIndex(key, [first])] = pieces
        at = 0
        for chunk in sorted(chunks, key=lambda one: one.offsets[0]):
            if chunk.offsets[0] != at:
                rows.wrong(f"element {at} next", found=chunk.offsets[0])
            at += chunk.sizes[0]
        if at != size.number():
            rows.wrong(f"{size.value} elements", found=at)
        self._known[key] = TensorStorageMetadata(
            TensorProperties(DTYPES[dtype.value]), torch.Size([size.value]), chunks
        )

    def _refuse_sizes(self, row: PlainData, count: int, dtype: str, pieces: tuple[Piece, ...]) -> None:
        """As many bytes as the elements have: in one piece, or in two halves of fp32 numbers."""
        expected = count * DTYPES[dtype].itemsize
        sizes = [piece.nbytes for piece in pieces]
        halves = self._format > 2 and dtype == "float32" and sizes == [expected // 2] * 2
        if sizes != [expected] and not halves:
            row.wrong(f"{expected} bytes of {count} elements", found=sizes)

    def _of_row(self, facts: list[PlainData], row: PlainData) -> tuple[Piece, ...]:
        width = len(fields(Piece))
        if not facts or len(facts) % width or len(facts) > 2 * width:
            row.wrong("one piece or two")
        return tuple(self._piece(facts[at : at + width]) for at in range(0, len(facts), width))

    def _piece(self, facts: list[PlainData]) -> Piece:
        file, offset, nbytes, checksum = facts
        if not SHARD.fullmatch(file.text()):
            file.wrong("the file of a rank")
        piece = Piece(file.value, offset.number(), nbytes.number(1), checksum.number(0, CRC))
        if piece.file not in self._lengths:
            self._lengths[piece.file] = self._length(piece.file)
        if piece.offset + piece.nbytes > self._lengths[piece.file]:
            raise IntegrityError(
                f"{self._folder / piece.file}: bytes {piece.offset} to {piece.offset + piece.nbytes} are expected, it "
                f"has {self._lengths[piece.file]}; load another checkpoint"
            )
        return piece

    def _length(self, name: str) -> int:
        path = self._folder / name
        try:
            return path.stat().st_size
        except OSError as error:
            raise IntegrityError(
                f"{path}: cannot be opened ({error.strerror}); load another checkpoint"
            ) from error

    def _add(self, key: str, first: int, count: int, dtype: str, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            row = (key, first, count, dtype, piece.offset, piece.nbytes, piece.checksum)
            self._rows.setdefault(piece.file, []).append(row)

    def _refuse_overlaps(self, tables: Mapping[str, Piece]) -> None:
        for file, rows in self._rows.items():
            ranges = [(row[4], row[5], row[0]) for row in rows]
            if file in tables:
                ranges.append((tables[file].offset, tables[file].nbytes, TABLE))
            ranges.sort()
            for (first, nbytes, key), (after, _, other) in pairwise(ranges):
                if first + nbytes > after:
                    raise IntegrityError(
                        f"{self._folder / INDEX}: is damaged: in {file}, {key} and {other} have bytes in common; load "
                        "another checkpoint"
                    )

    def _table(self, name: str, row: PlainData) -> Piece:
        return self._piece([PlainData(name, row.place), *row.entries(len(fields(Piece)) - 1)])

    def _compare(self, tables: Mapping[str, Piece], body: PlainData) -> None:
        """What the files say of themselves."""
        if set(tables) != set(self._rows):
            body.wrong(f"tables of {', '.join(sorted(self._rows))}", found=", ".join(sorted(tables)))
        for name, piece in tables.items():
            path = self._folder / name
            with path.open("rb") as file:
                file.seek(piece.offset)
                content = file.read(piece.nbytes)
            if zlib.crc32(content) != piece.checksum:
                raise IntegrityError(
                    f"{path}: its table was changed since (checksum); load another checkpoint"
                )
            if content != table_of(self._rows[name]):
                raise IntegrityError(
                    f"{self._folder / INDEX}: is damaged: it says something else of {name} than the file itself; load "
                    "another checkpoint"
                )
