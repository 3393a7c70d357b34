"""The bytes of a checkpoint: one file for each rank, written past the page cache, and an index in JSON.

A rank's file holds its pieces one after the other, each with a checksum. Large ones that lie in one stretch of memory
are written from there, at places that agree with their addresses; the others go through buffers in turn, one being
filled while the others are written. What is read is verified before it is used. torch.distributed.checkpoint says who
writes what; this is its storage.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

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

from ebbtide.backend.base import Event, wait_for_all
from ebbtide.backend.cpu import Stream
from ebbtide.backend.slabs import map_memory
from ebbtide.disk.extents import BLOCK
from ebbtide.disk.files import SystemIO
from ebbtide.disk.vectors import view
from ebbtide.errors import IntegrityError
from ebbtide.kernels.crc import crc32
from ebbtide.state.folders import INDEX, write_synced
from ebbtide.state.index import Piece, index_of
from ebbtide.units import round_up

_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
BUFFERS = 3
LENT = 1 << 20
"""Bytes from which on it is worth writing them from where they lie."""
PIECE = 32 << 20
"""Bytes that are written at once, and checked at once: enough for any disk's full rate."""


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

    def write(self, memory: Sequence[torch.Tensor], offset: int) -> None:
        """All of it, one after the other."""
        total, done = sum(one.numel() for one in memory), 0
        while done < total:
            done += self._move(self._io.pwritev, memory, done, offset)

    def read(self, memory: torch.Tensor, offset: int) -> int:
        """How many bytes there were."""
        done = 0
        while done < memory.numel():
            count = self._move(self._io.preadv, [memory], done, offset)
            if not count:
                break
            done += count
        return done

    def _move(
        self, act: Callable[[int, Any, int], int], memory: Sequence[torch.Tensor], done: int, offset: int
    ) -> int:
        parts, skip = [], done
        for one in memory:
            if skip < one.numel():
                parts.append(view(one.data_ptr() + skip, one.numel() - skip))
            skip = max(0, skip - one.numel())
        try:
            return act(self.number, parts, offset + done)
        except OSError as error:
            # Some file systems take the flag and refuse the transfers; a short one leaves the rest off the blocks.
            flags = fcntl.fcntl(self.number, fcntl.F_GETFL)
            if error.errno not in _NO_DIRECT or not flags & _DIRECT:
                raise
            fcntl.fcntl(self.number, fcntl.F_SETFL, flags & ~_DIRECT)
            return act(self.number, parts, offset + done)

    def end(self, length: int) -> None:
        """It has this length, and is on the disk."""
        os.ftruncate(self.number, length)
        os.fsync(self.number)

    def close(self) -> None:
        self._io.close(self.number)


class Copy(NamedTuple):
    """Memory for a piece, and where in the file it will be."""

    memory: torch.Tensor
    offset: int


class Snapshot:
    """What is copied now and written later: the first bytes of a rank's file, as many as there is room for."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.nbytes = self._length = 0
        self._memory: torch.Tensor | None = None
        self._file: _File | None = None

    def take(self, sizes: Sequence[int]) -> list[Copy]:
        """Room for the first of these pieces; none for the others."""
        places: list[tuple[int, int]] = []
        for size in sizes:
            if self.nbytes + round_up(size, BLOCK) > self._room:
                break
            places.append((self.nbytes, size))
            self.nbytes += round_up(size, BLOCK)
        memory = self._memory = map_memory(max(self.nbytes, BLOCK))
        return [Copy(memory[at : at + size], at) for at, size in places]

    def own(self, file: _File, length: int) -> None:
        """The file in which the rest is already."""
        self._file, self._length = file, length

    def write(self) -> None:
        assert self._file is not None and self._memory is not None
        try:
            for first in range(0, self.nbytes, PIECE):
                self._file.write([self._memory[first : min(first + PIECE, self.nbytes)]], first)
            self._file.end(self._length)
        finally:
            self.close()

    def close(self) -> None:
        file, self._file, self._memory = self._file, None, None
        if file is not None:
            file.close()


@runtime_checkable
class Filling(Protocol):
    """A planner that puts values straight into the buffer that is written, or says where they lie."""

    def nbytes(self, item: WriteItem) -> int: ...

    def lend(self, item: WriteItem) -> torch.Tensor | None: ...

    def fill(self, item: WriteItem, memory: torch.Tensor) -> None: ...


class ShardWriter(StorageWriter):
    """Into a folder that gets its name later."""

    def __init__(
        self,
        folder: Path,
        system: SystemIO | None = None,
        rank: int = 0,
        snapshot: Snapshot | None = None,
    ) -> None:
        """`snapshot`: takes what is to be written later."""
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
        file = _File(path, os.O_RDWR | os.O_CREAT, self._io)
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
        self, plan: SavePlan, planner: Filling, file: _File, name: str
    ) -> tuple[list[WriteResult], int]:
        """What was written, and the file's length."""
        results: list[WriteResult] = []
        lent = [planner.lend(item) for item in plan.items]
        sizes = [planner.nbytes(item) for item in plan.items]
        file.allocate(
            sum(
                round_up(nbytes + (0 if one is None else one.data_ptr() % BLOCK), BLOCK)
                for nbytes, one in zip(sizes, lent, strict=True)
            )
        )
        copies = [] if self._snapshot is None else self._snapshot.take(sizes)
        for item, content, copy in zip(plan.items, lent, copies, strict=False):
            if content is not None:
                copy.memory.copy_(content)
            else:
                planner.fill(item, copy.memory)
            piece = Piece(name, copy.offset, copy.memory.numel(), checksum(copy.memory))
            results.append(WriteResult(item.index, piece.nbytes, piece))
        done = len(copies)
        with _Queue(file, 0 if self._snapshot is None else self._snapshot.nbytes) as queue:
            for item, nbytes, content in zip(plan.items[done:], sizes[done:], lent[done:], strict=True):
                if content is not None:
                    offset = queue.lend(content)
                else:
                    memory, offset = queue.take(round_up(nbytes, BLOCK))
                    content = memory[:nbytes]
                    planner.fill(item, content)
                    memory[nbytes:].zero_()
                piece = Piece(name, offset, nbytes, checksum(content))
                results.append(WriteResult(item.index, nbytes, piece))
        return results, queue.length

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {(one.index.fqn, one.index.offset): one.storage_data for rank in results for one in rank}
        written = {piece.file for piece in pieces.values()}
        for path in self._folder.glob("rank-*.bin"):
            if path.name not in written:
                path.unlink()  # of a spare that more ranks wrote
        write_synced(self._folder / INDEX, index_of(metadata, pieces))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


class _Queue:
    """A file's bytes, one after the other: through buffers, where small pieces share one and are written together; or
    from where they lie."""

    def __init__(self, file: _File, offset: int) -> None:
        self._file = file
        self._stream = Stream("ebbtide-checkpoint")
        self._buffers = [map_memory(PIECE + BLOCK) for _ in range(BUFFERS)]
        self._edges = [map_memory(2 * BLOCK) for _ in range(BUFFERS)]
        self._under_way: list[Event | None] = [None] * BUFFERS
        self._lent: list[Event | None] = [None] * BUFFERS
        self._turn = self._lend_turn = 0
        self._used, self._offset = 0, offset

    @property
    def length(self) -> int:
        """Of the file, when all of it is on its way."""
        return self._offset

    def take(self, count: int) -> tuple[torch.Tensor, int]:
        """Memory for the next bytes, and where in the file they will be. It is full when the next is asked for."""
        if self._used and self._used + count > self._buffers[self._turn].numel():
            self._flush()
        if count > self._buffers[self._turn].numel():
            self._buffers[self._turn] = map_memory(count)
        start, self._used = self._used, self._used + count
        return self._buffers[self._turn][start : self._used], self._offset + start

    def lend(self, memory: torch.Tensor) -> int:
        """The next bytes lie in memory, and stay there; where in the file they will be. Their place agrees with their
        address, so that all but the first and the last block is written from there."""
        self._flush()
        assert memory.numel() >= 2 * BLOCK
        turn = self._lend_turn
        if (event := self._lent[turn]) is not None:
            event.wait()
        ahead = memory.data_ptr() % BLOCK
        place, end = self._offset + ahead, ahead + memory.numel()
        head = -ahead % BLOCK
        straight = (memory.numel() - head) // BLOCK * BLOCK
        first, last = self._edges[turn].zero_().view(2, BLOCK)
        first[ahead : ahead + head] = memory[:head]
        last[: end % BLOCK] = memory[head + straight :]
        parts = [memory[head : head + straight]]
        parts = [*([first] if head else []), *parts, *([last] if end % BLOCK else [])]
        self._lent[turn] = self._send(parts)
        self._lend_turn = (turn + 1) % BUFFERS
        return place

    def _flush(self) -> None:
        """Sends what is in the buffer on its way, and waits until the next one may be filled."""
        if not self._used:
            return
        self._under_way[self._turn] = self._send([self._buffers[self._turn][: self._used]])
        self._used = 0
        self._turn = (self._turn + 1) % BUFFERS
        if (event := self._under_way[self._turn]) is not None:
            event.wait()

    def _send(self, memory: list[torch.Tensor]) -> Event:
        event = self._stream.submit(partial(self._file.write, memory, self._offset))
        self._offset += sum(one.numel() for one in memory)
        return event

    def __enter__(self) -> _Queue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
            under_way = [event for event in (*self._under_way, *self._lent) if event is not None]
            failed = wait_for_all(under_way)
        finally:
            self._stream.close()
        if kind is None and failed is not None:
            raise failed


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
            length = round_up(piece.offset % BLOCK + piece.nbytes, BLOCK)
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
                piece = self._metadata.storage_data[index]
                yield _within(buffers[number % 2], piece)
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


def _within(blocks: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece in the blocks that it is read with."""
    begin = piece.offset % BLOCK
    return blocks[begin : begin + piece.nbytes]


def _reading(file: _File, memory: torch.Tensor, piece: Piece, folder: Path) -> Any:
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


__all__ = ["LENT", "PIECE", "ShardReader", "ShardWriter", "Snapshot"]
