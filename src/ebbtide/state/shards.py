"""The bytes of a checkpoint: one file for each rank, written past the page cache, and an index in JSON.

A rank's file holds its pieces one after the other, each from a block on and with a checksum. Two buffers are in turn:
one is filled (from wherever the values are) while the other is written. What is read is verified before it is
used. torch.distributed.checkpoint says who writes what; this is its storage.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ebbtide.backend.base import Event, wait_for_all
from ebbtide.backend.cpu import Stream
from ebbtide.backend.slabs import map_memory
from ebbtide.disk.extents import BLOCK
from ebbtide.disk.files import SystemIO
from ebbtide.disk.vectors import view
from ebbtide.errors import IntegrityError
from ebbtide.kernels.crc import crc32
from ebbtide.state.folders import INDEX, write_synced
from ebbtide.units import round_up

FORMAT = 2
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
BUFFERS = 2
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
            self.number = io.open(str(path), flags | _DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self.number = io.open(str(path), flags)

    def allocate(self, nbytes: int) -> None:
        """What does not fit is found now; and blocks that a file has already are written faster."""
        self._io.fallocate(self.number, nbytes)

    def write(self, memory: torch.Tensor, offset: int) -> None:
        done = 0
        while done < memory.numel():
            done += self._move(self._io.pwritev, memory, done, offset)

    def read(self, memory: torch.Tensor, offset: int) -> int:
        """How many bytes there were."""
        done = 0
        while done < memory.numel():
            count = self._move(self._io.preadv, memory, done, offset)
            if not count:
                break
            done += count
        return done

    def _move(self, act: Callable[[int, Any, int], int], memory: torch.Tensor, done: int, offset: int) -> int:
        part = view(memory.data_ptr() + done, memory.numel() - done)
        try:
            return act(self.number, [part], offset + done)
        except OSError as error:
            # Some file systems take the flag and refuse the transfers; a short one leaves the rest off the blocks.
            flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
            if error.errno not in _NO_DIRECT or not flags & _DIRECT:
                raise
            fcntl.fcntl(self.number, fcntl.F_SETFL, flags & ~_DIRECT)
            return act(self.number, [part], offset + done)

    def close(self) -> None:
        self._io.close(self.number)


@runtime_checkable
class Filling(Protocol):
    """A planner that puts values straight into the buffer that is written."""

    def nbytes(self, item: WriteItem) -> int: ...

    def fill(self, item: WriteItem, memory: torch.Tensor) -> None: ...


class ShardWriter(StorageWriter):
    """Into a folder that gets its name later."""

    def __init__(self, folder: Path, system: SystemIO | None = None, rank: int = 0) -> None:
        self._folder, self._io, self._rank = folder, system or SystemIO(), rank

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, Filling), f"expected a planner that fills buffers, found {planner}"
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

    def _write(self, plan: SavePlan, planner: Filling, file: _File, name: str) -> list[WriteResult]:
        results: list[WriteResult] = []
        file.allocate(sum(round_up(planner.nbytes(item), BLOCK) for item in plan.items))
        with _Queue(file) as queue:
            for item in plan.items:
                nbytes = planner.nbytes(item)
                memory, offset = queue.take(round_up(nbytes, BLOCK))
                planner.fill(item, memory[:nbytes])
                memory[nbytes:].zero_()
                piece = Piece(name, offset, nbytes, checksum(memory[:nbytes]))
                results.append(WriteResult(item.index, nbytes, piece))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {(one.index.fqn, one.index.offset): one.storage_data for rank in results for one in rank}
        write_synced(self._folder / INDEX, _index_of(metadata, pieces))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


class _Queue:
    """A file's bytes, one after the other, through buffers: small pieces share one, and are written together."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._stream = Stream("ebbtide-checkpoint")
        self._buffers = [map_memory(PIECE + BLOCK) for _ in range(BUFFERS)]
        self._under_way: list[Event | None] = [None] * BUFFERS
        self._turn = self._used = self._offset = 0

    def take(self, count: int) -> tuple[torch.Tensor, int]:
        """Memory for the next bytes, and where in the file they will be. It is full when the next is taken."""
        if self._used and self._used + count > self._buffers[self._turn].numel():
            self._send()
        if count > self._buffers[self._turn].numel():
            self._buffers[self._turn] = map_memory(count)
        start, self._used = self._used, self._used + count
        return self._buffers[self._turn][start : self._used], self._offset + start

    def _send(self) -> None:
        memory = self._buffers[self._turn][: self._used]
        self._under_way[self._turn] = self._stream.submit(partial(self._file.write, memory, self._offset))
        self._offset, self._used = self._offset + self._used, 0
        self._turn = (self._turn + 1) % BUFFERS
        if (event := self._under_way[self._turn]) is not None:
            event.wait()

    def __enter__(self) -> _Queue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._send()
            failed = wait_for_all([event for event in self._under_way if event is not None])
        finally:
            self._stream.close()
        if kind is None and failed is not None:
            raise failed


def checksum(content: torch.Tensor) -> int:
    return crc32(content.data_ptr(), content.numel())


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
                if item.type is LoadItemType.BYTE_IO:
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
