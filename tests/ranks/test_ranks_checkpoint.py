"""Checkpoints of many ranks: each writes its own, and any number of them goes on from there, bit for bit."""

from __future__ import annotations

import errno
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ebbtide
import zoo
from ebbtide.checkpoint import dcp_planners, tensor_parts
from ebbtide.checkpoint.folders import RunFolder
from ebbtide.errors import ConfigError, DiskError, EbbtideError, IntegrityError
from ebbtide.memory.disk.data_files import SystemIO
from ebbtide.memory.disk.extents import BLOCK
from group import group_of
from harness import config_of
from sampling import some

HALF, WHOLE = 2, 4
HOST = {"device": {"memory": 1_600_000}, "host": {"memory": "64MB"}}
SSD = {"device": {"memory": 1_900_000}, "host": {"memory": 0}, "ssd": {"memory": "64MB"}}
FORMS: dict[str, dict[str, Any]] = {
    "everything fits": {},
    "host": HOST,
    "SSD": SSD,
    "pages": HOST | {"layout": "page", "chunk_size": 16384},
    "separate masters": HOST | {"master": "separate"},
    "large chunks": {"chunk_size": "256KiB"},
}


def rank_of() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def start(config: dict[str, Any], folder: Path, name: str = "gpt2", seed: int = 0) -> ebbtide.Engine:
    dcp_planners.LENT = 2 * BLOCK  # what is written from where it lies: here, all but the smallest
    if "ssd" in config:
        if not rank_of()[0]:
            (folder / "tier").mkdir(exist_ok=True)
        dist.barrier()
        config = config | {"ssd": {"folder": str(folder / "tier"), **config["ssd"]}}
    return ebbtide.initialize(zoo.build(name, seed=seed), config)


def train(engine: ebbtide.Engine, first: int, last: int) -> None:
    """The same batches for every number of ranks; a rank's own random numbers are drawn, too."""
    rank, _ = rank_of()
    for number in range(first, last):
        loss = engine(**zoo.ZOO["gpt2"].batch(10 * number + rank)).loss
        engine.backward(loss * (1 + 0.1 * torch.rand(())))
        engine.step()
    engine.check_integrity()


Ranges = dict[str, list[tuple[int, bytes]]]


def values(engine: ebbtide.Engine) -> Ranges:
    """What this rank has of everything, as it lies: masters in full precision, optimizer state."""
    engine.synchronize()
    found: Ranges = {}
    for part in tensor_parts.parts_of(engine._session, everything=True):
        begin, end = part.range
        out = torch.empty(end - begin, dtype=part.dtype)
        if end > begin:
            part.load(begin, out)
        found[part.key] = [(begin, out.float().numpy().tobytes())]
    return found


def together(ranks: list[Ranges]) -> dict[str, bytes]:
    """All ranks' ranges as whole tensors."""
    whole: dict[str, bytes] = {}
    for key in ranks[0]:
        pieces = sorted({piece for rank in ranks for piece in rank[key] if piece[1]})
        assert [first for first, _ in pieces] == sorted({first for first, _ in pieces})
        whole[key] = b"".join(content for _, content in pieces)
    return whole


# -- what ranks do --------------------------------------------------------------------------------------------


def straight(config: dict[str, Any], folder: Path) -> str:
    torch.manual_seed(100 + rank_of()[0])
    engine = start(config, folder)
    train(engine, 0, WHOLE)
    sha = engine.weights_sha256()
    engine.close()
    return sha


def save(config: dict[str, Any], folder: Path, state: Any = None) -> tuple[str, Ranges]:
    torch.manual_seed(100 + rank_of()[0])
    engine = start(config, folder)
    train(engine, 0, HALF)
    saved = engine.save(folder / "run", state, keep=1)
    found = str(saved), values(engine)
    engine.close()
    return found


def load(config: dict[str, Any], folder: Path, go_on: bool = False) -> tuple[Any, Ranges | str]:
    engine = start(config, folder, seed=9)
    state = engine.load(folder / "run")
    found: Ranges | str
    if go_on:
        train(engine, HALF, WHOLE)
        found = engine.weights_sha256()
    else:
        found = values(engine)
    engine.close()
    return state, found


@cache
def saved_values(size: int, folder: Path) -> dict[str, bytes]:
    return together([found for _, found in group_of(size).run(save, config_of(), folder)])


# -- resume ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), some([("everything fits", "SSD"), ("SSD", "pages"), ("pages", "host")], 2)
)
def test_what_was_saved_goes_on_bit_for_bit(before: str, after: str, folder: Path) -> None:
    group = group_of(2)
    expected = group.run(straight, config_of(**FORMS[before]), folder)
    names = group.run(save, config_of(**FORMS[before]), folder, {"next": HALF})
    assert names[0][0] == names[1][0] and Path(names[0][0]).name == f"step-{HALF:08d}"
    for state, sha in group.run(load, config_of(**FORMS[after]), folder, True):
        assert state == {"next": HALF} and sha == expected[0] == expected[1]


@pytest.mark.parametrize(("before", "after"), some([(2, 1), (1, 4), (4, 2), (3, 2)], 2))
def test_any_number_of_ranks_goes_on(before: int, after: int, folder: Path) -> None:
    expected = saved_values(before, folder)
    found = together([ranges for _, ranges in group_of(after).run(load, config_of(), folder)])
    assert found == expected


@pytest.mark.parametrize("form", some([form for form in FORMS if form != "everything fits"], 2))
def test_other_forms(form: str, folder: Path) -> None:
    expected = saved_values(2, folder)
    found = together([ranges for _, ranges in group_of(3).run(load, config_of(**FORMS[form]), folder)])
    assert found == expected


def test_every_rank_writes_its_own(folder: Path) -> None:
    name = group_of(2).run(save, config_of(), folder)[0][0]
    sizes = [os.path.getsize(Path(name) / f"rank-{rank:05d}.bin") for rank in range(2)]
    # The last chunk is not full, and the first rank writes what is common.
    assert 0.6 * sizes[0] < sizes[1] < sizes[0]
    assert sorted(os.listdir(folder / "run")) == ["latest", Path(name).name]


# -- what goes wrong ------------------------------------------------------------------------------------------


def refused(config: dict[str, Any], folder: Path, name: str) -> tuple[str, str]:
    engine = start(config, folder, name)
    with pytest.raises(EbbtideError) as told:
        engine.load(folder / "run")
    engine.close()
    return type(told.value).__name__, str(told.value)


def test_a_damaged_shard_is_found_by_all(folder: Path) -> None:
    name = Path(group_of(2).run(save, config_of(), folder)[0][0])
    path = name / "rank-00001.bin"
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content) // 2)] ^= 1
    path.write_bytes(content)
    for size in (1, 2):
        for kind, message in group_of(size).run(refused, config_of(), folder, "gpt2"):
            assert kind == IntegrityError.__name__ and str(path) in message


def test_another_model_and_a_missing_checkpoint_are_refused(folder: Path) -> None:
    for kind, message in group_of(2).run(refused, config_of(), folder, "gpt2"):
        assert kind == ConfigError.__name__ and "not there" in message
    group_of(2).run(save, config_of(), folder)
    for kind, message in group_of(2).run(refused, config_of(), folder, "llama"):
        assert kind == ConfigError.__name__ and "another model" in message


def full(folder: Path, where: int) -> tuple[str, str, str]:
    """The disk of one rank is full while it saves: all are told, training goes on, the old checkpoint stays."""
    rank, _ = rank_of()
    engine = start(config_of(), folder)
    train(engine, 0, HALF)
    engine.save(folder / "run")

    def no_space(self: SystemIO, file: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    train(engine, HALF, HALF + 1)
    before = SystemIO.fallocate
    if rank == where:
        SystemIO.fallocate = no_space  # type: ignore[method-assign]
    try:
        with pytest.raises(EbbtideError) as told:
            engine.save(folder / "run")
    finally:
        SystemIO.fallocate = before  # type: ignore[method-assign]
    train(engine, HALF + 1, WHOLE)
    sha = engine.weights_sha256()
    latest = RunFolder(folder / "run").latest()
    engine.save(folder / "run")
    engine.close()
    return type(told.value).__name__, str(latest), sha


@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_of_one_rank_loses_nothing(where: int, folder: Path) -> None:
    found = group_of(2).run(full, folder, where)
    assert found[0] == found[1]
    kind, latest, _ = found[0]
    assert kind == DiskError.__name__ and Path(latest).name == f"step-{HALF:08d}"
    left = sorted(os.listdir(folder / "run"))
    assert left == ["latest", f"step-{HALF:08d}", f"step-{WHOLE:08d}"]


def evaluated_and_loaded(folder: str) -> list[float]:
    """A chunk of one slice: what the second rank has of it is padding, and nothing is read there."""
    torch.manual_seed(0)
    engine = ebbtide.initialize(torch.nn.Linear(32, 32, bias=False), config_of(precision="fp32", clip=None))
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    found = []

    def evaluate() -> None:
        with torch.no_grad():
            found.append(float(engine(rows).square().sum()))

    try:
        engine.save(folder)
        evaluate()
        engine.backward(engine(rows).square().sum())
        engine.step()
        evaluate()
        engine.load(folder)
        evaluate()
        return found
    finally:
        engine.close()


def test_what_was_gathered_before_a_load_is_gathered_again_on_all_ranks(tmp_path: Path) -> None:
    for first, stepped, loaded in group_of(2).run(evaluated_and_loaded, str(tmp_path)):
        assert stepped != first
        assert loaded == first
