"""The bytes of a checkpoint: one file for each rank, written past the page cache, and an index in JSON.

A rank's file holds its pieces one after the other, each with a checksum. Large ones are written from where they lie in
memory, at places that agree with their addresses; so are the two halves of split masters, each a piece. The others go
through buffers in turn, one being filled while the others are written. What is read is verified before it is used.
torch.distributed.checkpoint says who writes what; this is its storage.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
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

from ebbtide.checkpoint.folders import INDEX, write_synced
from ebbtide.checkpoint.index import TABLE, Piece, Row, index_of, name_of, table_of
from ebbtide.checkpoint.rank_files import PIECE, File, FileCopy, Queue, Snapshot
from ebbtide.devices.cpu_device import Stream
from ebbtide.devices.device import Event
from ebbtide.devices.pool import map_memory
from ebbtide.errors import IntegrityError
from ebbtide.kernels import cpu_kernels
from ebbtide.kernels.crc import crc32
from ebbtide.memory.disk.data_files import SystemIO
from ebbtide.memory.disk.extents import BLOCK
from ebbtide.memory.disk.vectors import view
from ebbtide.units import round_up

READING = 3
"""Buffers: for two halves, and for what is read next."""
LENT = 1 << 20
"""Bytes from which on it is worth writing them from where they lie."""


@runtime_checkable
class Filling(Protocol):
    """A planner that puts values straight into the buffer that is written, or says where they lie."""

    def nbytes(self, item: WriteItem) -> int: ...

    def lend(self, item: WriteItem) -> list[torch.Tensor] | None: ...

    def fill(self, item: WriteItem, memory: torch.Tensor) -> None: ...


class ShardWriter(StorageWriter):
    """Into a folder that gets its name later."""

    def __init__(
        self,
        folder: Path,
        system: SystemIO | None = None,
        rank: int = 0,
        snapshot: Snapshot | None = None,
        shapes: Mapping[str, Any] | None = None,
    ) -> None:
        """`snapshot`: takes what is to be written later. `shapes`: shape and strides by tensor, on the first rank."""
        self._shapes = shapes or {}
        self._folder, self._io, self._rank = folder, system or SystemIO(), rank
        self._snapshot = snapshot

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
        path = self._folder / name
        with suppress(FileNotFoundError):  # of a spare, perhaps
            if path.stat().st_nlink > 1:
                path.unlink()  # somebody keeps its content under another name
        file = File(path, os.O_RDWR | os.O_CREAT, self._io)
        later = self._snapshot
        try:
            results, length = self._write(plan, planner, file, name)
            if later is None:
                file.end(length)
        except BaseException:
            file.close()
            raise
        if later is None:
            file.close()
        else:
            later.own(file, length)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(
        self, plan: SavePlan, planner: Filling, file: File, name: str
    ) -> tuple[list[WriteResult], int]:
        """What was written, and the file's length."""
        results: list[WriteResult] = []
        lent = [planner.lend(item) for item in plan.items]
        sizes = [planner.nbytes(item) for item in plan.items]
        file.allocate(
            sum(
                round_up(nbytes, BLOCK)
                if stretches is None
                else sum(round_up(one.numel() + one.data_ptr() % BLOCK, BLOCK) for one in stretches)
                for nbytes, stretches in zip(sizes, lent, strict=True)
            )
        )
        rows: list[Row] = []
        copies = [] if self._snapshot is None else self._snapshot.take(sizes)
        with Queue(file, 0 if self._snapshot is None else self._snapshot.nbytes) as queue:
            for number in _mixed(sizes, [one is not None for one in lent], len(copies)):
                item, nbytes, stretches = plan.items[number], sizes[number], lent[number]
                if number < len(copies):
                    contents = _copied(copies[number], stretches)
                    if stretches is None:
                        planner.fill(item, copies[number].memory)
                elif stretches is not None:
                    contents = [(one, queue.lend(one)) for one in stretches]
                else:
                    memory, offset = queue.take(round_up(nbytes, BLOCK))
                    contents = [(memory[:nbytes], offset)]
                    planner.fill(item, memory[:nbytes])
                    memory[nbytes:].zero_()
                pieces = tuple(Piece(name, place, one.numel(), checksum(one)) for one, place in contents)
                results.append(WriteResult(item.index, nbytes, pieces))
                rows += _rows(item, pieces)
            results.append(self._write_table(queue, name, table_of(rows)))
        return results, queue.length

    def _write_table(self, queue: Queue, name: str, content: bytes) -> WriteResult:
        """What the file holds, said in the file: an index that says something else is damaged."""
        memory, offset = queue.take(round_up(len(content), BLOCK))
        memory[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        memory[len(content) :].zero_()
        piece = Piece(name, offset, len(content), checksum(memory[: len(content)]))
        return WriteResult(MetadataIndex(f"{TABLE}/{self._rank}"), len(content), (piece,))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {(one.index.fqn, one.index.offset): one.storage_data for rank in results for one in rank}
        written = {piece.file for several in pieces.values() for piece in several}
        for path in self._folder.glob("rank-*.bin"):
            if path.name not in written:
                path.unlink()  # of a spare that more ranks wrote
        write_synced(self._folder / INDEX, index_of(metadata, pieces, self._shapes))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


def _rows(item: WriteItem, pieces: Sequence[Piece]) -> list[Row]:
    data, key = item.tensor_data, item.index.fqn
    if data is None:
        return [
            (key, 0, piece.nbytes, "bytes", piece.offset, piece.nbytes, piece.checksum) for piece in pieces
        ]
    first, count, dtype = data.chunk.offsets[0], data.chunk.sizes[0], name_of(data.properties.dtype)
    return [(key, first, count, dtype, piece.offset, piece.nbytes, piece.checksum) for piece in pieces]


def _copied(copy: FileCopy, stretches: Sequence[torch.Tensor] | None) -> list[tuple[torch.Tensor, int]]:
    """What lies in memory, one after the other in a copy of it."""
    if stretches is None:
        return [copy]
    found, at = [], 0
    for one in stretches:
        memory = copy.memory[at : at + one.numel()].copy_(one)
        found.append((memory, copy.offset + at))
        at += one.numel()
    return found


def _mixed(sizes: Sequence[int], lent: Sequence[bool], first: int) -> list[int]:
    """An order in which what has to be filled is spread over all, a buffer of it at a time: it is filled while the
    rest is written from where it lies. The `first` ones stay first."""
    order = list(range(first))
    filled, straight = (
        deque(i for i in range(first, len(sizes)) if lent[i] is kind) for kind in (False, True)
    )
    to_fill, to_lend = (max(1, sum(sizes[i] for i in part)) for part in (filled, straight))
    done = given = 0
    while filled or straight:
        goal = done + PIECE
        while filled and (done < goal or not straight):
            order.append(filled.popleft())
            done += sizes[order[-1]]
        while straight and (given * to_fill < done * to_lend or not filled):
            order.append(straight.popleft())
            given += sizes[order[-1]]
    return order


def checksum(content: torch.Tensor) -> int:
    return crc32(content.data_ptr(), content.numel())


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
                    planner.load_bytes(item, io.BytesIO(view(content.data_ptr(), content.numel())))
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
        """The bytes of each range, verified; what comes next is read meanwhile. Good until the next one is asked for."""
        pieces: list[tuple[Piece, ...]] = [self._metadata.storage_data[index] for index in wanted]
        found = self._verified([piece for several in pieces for piece in several])
        with closing(found):
            for several in pieces:
                contents = [next(found) for _ in several]
                yield contents[0] if len(contents) == 1 else _joined(*contents)

    def _verified(self, pieces: Sequence[Piece]) -> Generator[torch.Tensor, None, None]:
        """The bytes of each piece. Good until the next but one is asked for."""
        files: dict[str, File] = {}
        buffers = [map_memory(PIECE + BLOCK) for _ in range(READING)]
        stream = Stream("ebbtide-checkpoint")

        def start(number: int) -> Event:
            piece = pieces[number]
            if piece.file not in files:
                files[piece.file] = self._open(piece.file)
            length = round_up(piece.offset % BLOCK + piece.nbytes, BLOCK)
            turn = number % READING
            if length > buffers[turn].numel():
                buffers[turn] = map_memory(length)
            return stream.submit(_reading(files[piece.file], buffers[turn][:length], piece, self._folder))

        try:
            coming = start(0) if pieces else None
            for number, piece in enumerate(pieces):
                assert coming is not None
                coming.wait()
                coming = start(number + 1) if number + 1 < len(pieces) else None
                yield _within(buffers[number % READING], piece)
        finally:
            stream.close()
            for file in files.values():
                file.close()

    def _open(self, name: str) -> File:
        try:
            return File(self._folder / name, os.O_RDONLY, self._io)
        except OSError as error:
            raise IntegrityError(
                f"{self._folder / name}: cannot be opened ({error.strerror}); load another checkpoint"
            ) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Masters of which the halves were written apart."""
    whole = cpu_kernels().join(upper.view(torch.bfloat16), lower.view(torch.int16))
    return whole.view(torch.uint8)


def _within(blocks: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece in the blocks that it is read with."""
    begin = piece.offset % BLOCK
    return blocks[begin : begin + piece.nbytes]


def _reading(file: File, memory: torch.Tensor, piece: Piece, folder: Path) -> Any:
    def read() -> None:
        where = f"{folder / piece.file}: bytes {piece.offset} to {piece.offset + piece.nbytes}"
        try:
            ahead = piece.offset % BLOCK
            found = file.read(memory, piece.offset - ahead) - ahead
        except OSError as error:
            raise IntegrityError(
                f"{where} cannot be read ({error.strerror}); load another checkpoint"
            ) from error
        if found < piece.nbytes:
            raise IntegrityError(
                f"{where} are expected, {found} of {piece.nbytes} are there; load another checkpoint"
            )
        if checksum(_within(memory, piece)) != piece.checksum:
            raise IntegrityError(
                f"{where} were changed since they were written (checksum); load another checkpoint"
            )

    return read


__all__ = ["LENT", "ShardReader", "ShardWriter"]
