"""Checkpoints: a session's values and whatever else a run needs to go on as if it had never stopped.

torch.distributed.checkpoint brings the ranks together; the planners here say what each of them writes and reads,
piece by piece, straight from where the values are and to where they belong.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import load as read_distributed
from torch.distributed.checkpoint import save as write_distributed
from torch.distributed.checkpoint.api import CheckpointException
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
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ebbtide.checkpoint.facts import look_at, look_at_state
from ebbtide.checkpoint.folders import INDEX
from ebbtide.checkpoint.index import look_at_index
from ebbtide.checkpoint.rank_files import PIECE, Snapshot
from ebbtide.checkpoint.shards import LENT, ShardReader, ShardWriter
from ebbtide.checkpoint.tensor_parts import BUFFERS, WEIGHTS, TensorPart, parts_of
from ebbtide.collecting import collecting_nothing
from ebbtide.errors import ConfigError, IntegrityError, nearest
from ebbtide.memory.disk.vectors import view
from ebbtide.runtime.distributed.ranks import all_or_none, naming
from ebbtide.runtime.parameters.binding import dense
from ebbtide.runtime.session import Session

FACTS, STATE = "facts", "state"


def write(
    session: Session, folder: Path, facts: Mapping[str, Any], state: Any, snapshot: Snapshot | None = None
) -> None:
    """`facts`: plain data of the engine's; `state`: the user's, whatever `torch.save` takes and gives back safely. Ranks
    that share the chunks write together, each what it has; the first one also what is common. `snapshot`: has a copy
    of what is to be written later."""
    ranks = session.ranks
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    with all_or_none(ranks):
        parts = {part.key: part for part in parts_of(session) if part.numel}
        contents = {_state_of(rank): _packed(state)}
        _require_plain(facts)
    described = {key: [list(part.shape), list(part.stride)] for key, part in parts.items()}
    for theirs in ranks.objects(described) if ranks is not None and session.layout.spread else ():
        described |= theirs  # state of experts that no update has touched here
    if not rank:
        contents[FACTS] = json.dumps({**facts, "ranks": size, "tensors": described}).encode()
    mine = {key: part for key, part in parts.items() if not (part.common and rank)}
    with _errors_as_raised(), naming(ranks):
        write_distributed(
            {},
            storage_writer=ShardWriter(folder, rank=rank, snapshot=snapshot, shapes=described),
            planner=_Writing(mine, contents),
            process_group=None if ranks is None else ranks.control,
            no_dist=ranks is None,
        )


def _state_of(rank: int) -> str:
    return f"{STATE}/{rank}"


@collecting_nothing()
def read(
    session: Session, folder: Path, check: Callable[[Mapping[str, Any]], None], weights_alone: bool = False
) -> tuple[dict[str, Any], Any]:
    """Fills a session with what a checkpoint has, and returns its facts and the user's state. Nothing is changed until
    `check` has accepted the facts, and all names and sizes are found right. `weights_alone`: and buffers, no state."""
    ranks = session.ranks
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    with all_or_none(ranks):
        looked = look_at_index(folder)
        metadata, known = looked.metadata, looked.metadata.state_dict_metadata
        sizes = {
            key: stored.size[0] for key, stored in known.items() if isinstance(stored, TensorStorageMetadata)
        }
        content = _read_content(folder, metadata, FACTS)
        facts = look_at(content, f"{folder}: {FACTS}", looked.shapes, sizes)
        state = _unpacked(folder, metadata, _state_of(rank if facts["ranks"] == size else 0))
    if not weights_alone:
        session.unfreezing.wake(_trained_before(session, facts["tensors"]))
    with all_or_none(ranks):
        there = {part.key: part for part in parts_of(session) if part.numel}
        _compare(folder, facts["tensors"], there)
        _compare_dtypes(folder, known, there)
        check(facts)
    wanted = (WEIGHTS, BUFFERS) if weights_alone else None
    parts = {part.key: part for part in parts_of(session, everything=not weights_alone) if part.numel}
    parts = {key: part for key, part in parts.items() if wanted is None or key.split("/")[0] in wanted}
    states = session.updates.rule.states
    for key, part in parts.items():
        if key in there and key not in metadata.state_dict_metadata and key.split("/")[0] in states:
            # state that no update had touched
            for first, count in _pieces(part):
                part.store(first, torch.zeros(count, dtype=part.dtype, device="cpu"))
    planner = _ReadingPlanner(parts, facts["tensors"])
    with _errors_as_raised(), naming(ranks):
        read_distributed(
            {},
            storage_reader=ShardReader(folder, metadata),
            planner=planner,
            process_group=None if ranks is None else ranks.control,
            no_dist=ranks is None,
        )
    planner.finish()
    # Also where this rank had nothing to read: what others have of a gathered chunk has changed all the same.
    for index in range(len(session.layout.chunks)):
        session.places.forget(index)
    return facts, state


def _require_plain(facts: Mapping[str, Any]) -> None:
    """Of the facts only these are the user's."""
    try:
        json.dumps(facts["groups"])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"save: the optimizer's groups are expected to have numbers and strings as settings ({error})"
        ) from error


def _packed(state: Any) -> bytes:
    """What comes back with `weights_only`, or a refusal now and not when it is wanted."""
    content = io.BytesIO()
    try:
        torch.save(state, content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception as error:
        raise ConfigError(
            "save: expected state made of tensors, numbers, strings, lists, tuples and dicts, so that loading it "
            f"runs no code of a file's; found {_first_odd(state, 'state') or type(error).__name__}"
        ) from error
    return content.getvalue()


def _first_odd(value: Any, name: str) -> str:
    """The first value in there that is something else, by its place and kind."""
    if isinstance(value, Mapping):
        inside = [(f"{name}[{key!r}]", one) for key, one in value.items()]
    elif isinstance(value, list | tuple | set):
        inside = [(f"{name}[{place}]", one) for place, one in enumerate(value)]
    elif value is None or isinstance(value, torch.Tensor | bool | int | float | complex | str | bytes):
        return ""
    else:
        return f"a {type(value).__name__} as {name}"
    return next((found for where, one in inside if (found := _first_odd(one, where))), "")


def _unpacked(folder: Path, metadata: Metadata, key: str) -> Any:
    content = _read_content(folder, metadata, key)
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise IntegrityError(
            f"{folder}: {key}: is damaged ({type(error).__name__}: {str(error).splitlines()[0]}); load "
            "another checkpoint"
        ) from error
    look_at_state(state, f"{folder}: {key}")
    return state


def _read_content(folder: Path, metadata: Metadata, key: str) -> bytes:
    if not isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata):
        raise IntegrityError(
            f"{folder / INDEX}: is damaged: expected {key!r}, found no such content; load another"
        )
    [content] = ShardReader(folder, metadata).contents([MetadataIndex(key)])
    return bytes(view(content.data_ptr(), content.numel()))


def _trained_before(session: Session, stored: Mapping[str, Any]) -> list[int]:
    """Members that have state in the checkpoint: frozen here, they may be trained again, and go on from that."""
    kinds = session.updates.rule.states
    trained = {name for kind, _, name in (key.partition("/") for key in stored) if kind in kinds}
    return [m for m, name in enumerate(session.data.names) if name in trained]


def _compare(folder: Path, stored: Mapping[str, Any], parts: Mapping[str, TensorPart]) -> None:
    """Whether the checkpoint is one of this model."""
    needed = {key for key in parts if key.split("/")[0] in (WEIGHTS, BUFFERS)}
    had = {key for key in stored if key.split("/")[0] in (WEIGHTS, BUFFERS)}
    for key in sorted(had - needed):
        raise ConfigError(f"load: '{folder}' is of another model: it has {key!r}{nearest(key, needed)}")
    for key in sorted(needed - had):
        raise ConfigError(f"load: '{folder}' is of another model: {key!r} is missing{nearest(key, had)}")
    for key in sorted(needed):
        shape = tuple(stored[key][0])
        if shape != parts[key].shape:
            raise ConfigError(
                f"load: '{folder}' is of another model: {key!r} has shape {shape}, expected {parts[key].shape}"
            )


def _compare_dtypes(folder: Path, known: Mapping[str, Any], parts: Mapping[str, TensorPart]) -> None:
    """Floating numbers become other floating numbers; nothing else becomes anything else."""
    for key in sorted(set(known) & set(parts)):
        found, expected = known[key].properties.dtype, parts[key].dtype
        converted = found.is_floating_point and expected.is_floating_point
        if found != expected and not converted:
            raise ConfigError(
                f"load: '{folder}' is of another model: {key!r} is {found}, expected {expected}"
            )


def _pieces(part: TensorPart) -> list[tuple[int, int]]:
    """Of what this rank has."""
    most = PIECE // part.dtype.itemsize
    begin, end = part.range
    return [(first, min(most, end - first)) for first in range(begin, end, most)]


@contextmanager
def _errors_as_raised() -> Iterator[None]:
    """Those of the first rank that has one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


class _Writing(SavePlanner):
    def __init__(self, parts: Mapping[str, TensorPart], contents: Mapping[str, bytes]) -> None:
        self._parts, self._contents = parts, contents

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """All is known."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(len(content)))
            for key, content in self._contents.items()
        ]
        for part in self._parts.values():
            properties = TensorProperties(part.dtype)
            for first, count in _pieces(part):
                chunk = ChunkStorageMetadata(torch.Size([first]), torch.Size([count]))
                data = TensorWriteData(chunk, properties, torch.Size([part.numel]))
                index = MetadataIndex(part.key, [first])
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data, key = item.tensor_data, item.index.fqn
            if data is None:
                found[key] = BytesStorageMetadata()
                continue
            stored = found.setdefault(key, TensorStorageMetadata(data.properties, data.size, []))
            assert isinstance(stored, TensorStorageMetadata)
            stored.chunks.append(data.chunk)
        return all_plans, Metadata(found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data, key = write_item.tensor_data, write_item.index.fqn
        if data is None:
            return io.BytesIO(self._contents[key])
        found = torch.empty(data.chunk.sizes[0], dtype=data.properties.dtype, device="cpu")
        self.fill(write_item, found.view(torch.uint8))
        return found

    def nbytes(self, item: WriteItem) -> int:
        data = item.tensor_data
        if data is None:
            return len(self._contents[item.index.fqn])
        return data.chunk.sizes[0] * data.properties.dtype.itemsize

    def lend(self, item: WriteItem) -> list[torch.Tensor] | None:
        data, nbytes = item.tensor_data, self.nbytes(item)
        if data is None or nbytes < LENT:
            return None
        found = self._parts[item.index.fqn].lend(data.chunk.offsets[0], data.chunk.sizes[0])
        there = [one.view(torch.uint8) for one in found or ()]
        whole = sum(one.numel() for one in there) == nbytes
        return there if whole and all(one.numel() >= LENT for one in there) else None

    def fill(self, item: WriteItem, memory: torch.Tensor) -> None:
        data, key = item.tensor_data, item.index.fqn
        if data is None:
            memory.copy_(torch.frombuffer(bytearray(self._contents[key]), dtype=torch.uint8))
        else:
            self._parts[key].load(data.chunk.offsets[0], memory.view(data.properties.dtype))


class _ReadingPlanner(LoadPlanner):
    """`described`: shape and strides that tensors were saved with."""

    def __init__(self, parts: Mapping[str, TensorPart], described: Mapping[str, Any]) -> None:
        self._parts, self._described = parts, described
        self._relaid: dict[str, torch.Tensor] = {}
        """Tensors whose elements lie in another order here; they are stored when all of them are there."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for key, part in self._parts.items():
            stored = self._stored.get(key)
            begin, end = part.range if self._laid_alike(part) else (0, part.numel)
            for chunk in stored.chunks if isinstance(stored, TensorStorageMetadata) else ():
                there = chunk.offsets[0]
                first, last = max(begin, there), min(end, there + chunk.sizes[0])
                if first >= last:
                    continue
                target = MetadataIndex(key, [first])
                source = MetadataIndex(key, chunk.offsets)
                sizes = [torch.Size([count]) for count in (first, first - there, last - first)]
                items.append(ReadItem(LoadItemType.TENSOR, target, sizes[0], source, sizes[1], sizes[2]))
        return LoadPlan(items)

    def _laid_alike(self, part: TensorPart) -> bool:
        described = self._described.get(part.key)
        return described is not None and tuple(described[1]) == part.stride

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("bytes are read before tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        stored = self._stored[read_item.dest_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        return torch.empty(read_item.lengths[0], dtype=stored.properties.dtype, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        key, first = read_item.dest_index.fqn, read_item.dest_offsets[0]
        part = self._parts[key]
        values = tensor.to(part.dtype)
        if self._laid_alike(part):
            part.store(first, values)
            return
        whole = self._relaid.setdefault(key, torch.empty(part.numel, dtype=part.dtype, device="cpu"))
        whole[first : first + values.numel()] = values

    def finish(self) -> None:
        for key, whole in self._relaid.items():
            part = self._parts[key]
            laid = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="cpu")
            laid.copy_(whole.as_strided(part.shape, tuple(self._described[key][1])))
            part.store(0, dense(laid))
        self._relaid.clear()
