"""The bytes of a checkpoint: one file for each rank, written past the page cache, and an index in JSON.

A rank's file holds its pieces one after the other, each from a block on and with a checksum. Two buffers are in turn:
one is filled (from wherever the values are) while the other is written. What is read is verified before it is
used. torch.distributed.checkpoint says who writes what; this is its storage.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ebbtide.backend.base import Event
from ebbtide.backend.cpu import Stream
from ebbtide.backend.slabs import map_memory
from ebbtide.disk.extents import BLOCK
from ebbtide.disk.files import SystemIO
from ebbtide.disk.vectors import view
from ebbtide.errors import IntegrityError
from ebbtide.state.folders import INDEX, write_synced
from ebbtide.units import round_up

FORMAT = 1
PIECE = 32 << 20
"""Bytes that are written at once, and checked at once: enough for any disk's full rate."""


@dataclass(frozen=True)
class Piece:
    """Where some bytes of a checkpoint are."""

    file: str
    offset: int
    nbytes: int
    checksum: int


class _File:
    """Opened for direct transfers where the file system has them."""

    def __init__(self, path: Path, flags: int, io: SystemIO) -> None:
        self._io = io
        try:
            self.number = io.open(str(path), flags | getattr(os, "O_DIRECT", 0))
        except OSError:
            self.number = io.open(str(path), flags)

    def write(self, memory: torch.Tensor, offset: int) -> None:
        done = 0
        while done < memory.numel():
            part = view(memory.data_ptr() + done, memory.numel() - done)
            done += self._io.pwritev(self.number, [part], offset + done)

    def read(self, memory: torch.Tensor, offset: int) -> int:
        done = 0
        while done < memory.numel():
            part = view(memory.data_ptr() + done, memory.numel() - done)
            count = self._io.preadv(self.number, [part], offset + done)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        self._io.close(self.number)


class ShardWriter(StorageWriter):
    """Into a folder that gets its name later."""

    def __init__(self, folder: Path, system: SystemIO | None = None) -> None:
        self._folder, self._io = folder, system or SystemIO()
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{self._rank:05d}.bin"
        file = _File(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._io)
        try:
            results = self._write(plan, planner, file, name)
            os.fsync(file.number)
        finally:
            file.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner, file: _File, name: str) -> list[WriteResult]:
        results: list[WriteResult] = []
        buffers = [map_memory(PIECE + BLOCK) for _ in range(2)]
        under_way: list[Event | None] = [None, None]
        stream = Stream("ebbtide-checkpoint")
        offset = 0
        try:
            for number, item in enumerate(plan.items):
                content = _bytes_of(planner.resolve_data(item))
                turn = number % 2
                if (event := under_way[turn]) is not None:
                    event.wait()
                if content.numel() > buffers[turn].numel():
                    buffers[turn] = map_memory(round_up(content.numel(), BLOCK))
                memory = buffers[turn][: round_up(content.numel(), BLOCK)]
                memory[: content.numel()].copy_(content)
                memory[content.numel() :].zero_()
                piece = Piece(name, offset, content.numel(), checksum(content))
                under_way[turn] = stream.submit(_writing(file, memory, offset))
                results.append(WriteResult(item.index, content.numel(), piece))
                offset += memory.numel()
            for event in under_way:
                if event is not None:
                    event.wait()
        finally:
            for event in under_way:
                if event is not None:
                    with suppress(BaseException):
                        event.wait()
            stream.close()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {(one.index.fqn, one.index.offset): one.storage_data for rank in results for one in rank}
        write_synced(self._folder / INDEX, _index_of(metadata, pieces))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


def _writing(file: _File, memory: torch.Tensor, offset: int) -> Any:
    return lambda: file.write(memory, offset)


def _bytes_of(content: torch.Tensor | io.BytesIO) -> torch.Tensor:
    if isinstance(content, io.BytesIO):
        found = content.getvalue()
        return (
            torch.frombuffer(bytearray(found), dtype=torch.uint8)
            if found
            else torch.empty(0, dtype=torch.uint8)
        )
    return content.contiguous().view(torch.uint8)


def checksum(content: torch.Tensor) -> int:
    return zlib.crc32(view(content.data_ptr(), content.numel())) if content.numel() else 0


# -- the index ----------------------------------------------------------------------------------------------


def _index_of(metadata: Metadata, pieces: Mapping[Any, Piece]) -> bytes:
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


class ShardReader(StorageReader):
    """Each piece is read once, verified, and given to whoever wants a part of it."""

    def __init__(self, folder: Path, metadata: Metadata, system: SystemIO | None = None) -> None:
        self._folder, self._metadata, self._io = folder, metadata, system or SystemIO()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The metadata is what this one gave."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for (index, items), content in zip(wanted.items(), self.contents(list(wanted)), strict=True):
            for item in items:
                if item.type.name == WriteItemType.BYTE_IO.name:
                    planner.load_bytes(item, io.BytesIO(content.numpy().tobytes()))
                    continue
                dtype = self._metadata.state_dict_metadata[index.fqn].properties.dtype  # type: ignore[union-attr]
                first, count = item.storage_offsets[0], item.lengths[0]
                target = planner.resolve_tensor(item)
                target.copy_(content.view(dtype)[first : first + count])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def contents(self, wanted: list[MetadataIndex]) -> Iterator[torch.Tensor]:
        """The bytes of each piece, verified; the next one is read meanwhile. Good until the next but one."""
        files: dict[str, _File] = {}
        buffers = [map_memory(PIECE + BLOCK) for _ in range(2)]
        stream = Stream("ebbtide-checkpoint")

        def start(number: int) -> Event:
            piece: Piece = self._metadata.storage_data[wanted[number]]
            if piece.file not in files:
                files[piece.file] = self._open(piece.file)
            length = round_up(piece.nbytes, BLOCK)
            if length > buffers[number % 2].numel():
                buffers[number % 2] = map_memory(length)
            return stream.submit(
                _reading(files[piece.file], buffers[number % 2][:length], piece, self._folder)
            )

        try:
            coming = start(0) if wanted else None
            for number, index in enumerate(wanted):
                assert coming is not None
                coming.wait()
                coming = start(number + 1) if number + 1 < len(wanted) else None
                yield buffers[number % 2][: self._metadata.storage_data[index].nbytes]
        finally:
            stream.close()
            for file in files.values():
                file.close()

    def _open(self, name: str) -> _File:
        if Path(name).name != name:
            raise IntegrityError(f"{self._folder / INDEX}: names a file {name!r} outside of its folder")
        try:
            return _File(self._folder / name, os.O_RDONLY, self._io)
        except OSError as error:
            raise IntegrityError(
                f"{self._folder / name}: cannot be opened ({error.strerror}); load another checkpoint"
            ) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _reading(file: _File, memory: torch.Tensor, piece: Piece, folder: Path) -> Any:
    def read() -> None:
        where = f"{folder / piece.file}: bytes {piece.offset} to {piece.offset + piece.nbytes}"
        try:
            found = file.read(memory, piece.offset)
        except OSError as error:
            raise IntegrityError(
                f"{where} cannot be read ({error.strerror}); load another checkpoint"
            ) from error
        if found < piece.nbytes:
            raise IntegrityError(
                f"{where} are expected, {found} of {piece.nbytes} are there; load another checkpoint"
            )
        if checksum(memory[: piece.nbytes]) != piece.checksum:
            raise IntegrityError(
                f"{where} were changed since they were written (checksum); load another checkpoint"
            )

    return read


__all__ = ["PIECE", "Piece", "ShardReader", "ShardWriter", "read_index"]
