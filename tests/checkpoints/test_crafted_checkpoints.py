"""Checkpoints that were changed with care: values in the index, the facts and the saved state, checksums made right.

Each is refused by name before anything is changed, or it is the right bits; the engine trains on as if nothing had been.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.checkpoint.dcp_planners import FACTS
from ebbtide.checkpoint.folders import INDEX
from ebbtide.errors import ConfigError, DiskError, IntegrityError
from ebbtide.memory.disk.extents import BLOCK
from ebbtide.units import round_up
from group import group_of
from harness import config_of

WIDTH = 12
CASES = 60
ODD: list[Any] = [
    0, -1, 1, 2, 3, 7, 4096, 1 << 31, 1 << 62, 1 << 63, 1 << 70, 0.5, -0.0, float("nan"), float("inf"), True, False,
    None,
    "", "..", "../secret", "/etc/passwd", "float32", "bfloat16", "int32", "nothing", "rank-00000.bin", "rank-00001.bin",
    [], {}, [0], ["x"], [[]], {"x": 1},
]  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x).square().mean()


def start(precision: str) -> ebbtide.Engine:
    return ebbtide.initialize(
        Net(), config_of(precision=precision, chunk_size="4KiB", device={"memory": 400_000})
    )


def train(engine: ebbtide.Engine, first: int, last: int) -> None:
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[engine.config.precision]
    for number in range(first, last):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)
        engine.backward(engine(x))
        engine.step()


def save_on_two(folder: str) -> None:
    engine = start("fp32")
    train(engine, 0, 2)
    engine.save(folder)
    engine.close()


class Crafted:
    """A copy of a checkpoint, with its index and what is in JSON at hand."""

    def __init__(self, whole: Path, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        self.place = place
        self.body = json.loads(json.loads((place / INDEX).read_bytes())["body"])

    def content(self, key: str) -> bytes:
        file, offset, nbytes, _ = self.body["bytes"][key]
        return (self.place / file).read_bytes()[offset : offset + nbytes]

    def put(self, key: str, content: bytes) -> None:
        """In place of a content, with all checksums and tables as they are to be."""
        file, offset, *_ = self.body["bytes"][key]
        new = [self._append(file, content), len(content), zlib.crc32(content)]
        self.body["bytes"][key] = [file, *new]
        table = self.body["files"][file]
        rows = json.loads((self.place / file).read_bytes()[table[0] : table[0] + table[1]])
        for row in rows:
            if row[0] == key and row[4] == offset:
                row[2], row[4:] = len(content), new
        rows.sort(key=lambda row: row[4])
        said = json.dumps(rows).encode()
        self.body["files"][file] = [self._append(file, said), len(said), zlib.crc32(said)]

    def _append(self, file: str, content: bytes) -> int:
        path = self.place / file
        at = round_up(path.stat().st_size, BLOCK)
        with path.open("r+b") as one:
            one.seek(at)
            one.write(content)
        return at

    def finish(self) -> Path:
        text = json.dumps(self.body)
        (self.place / INDEX).write_text(json.dumps({"checksum": zlib.crc32(text.encode()), "body": text}))
        return self.place


def leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in there."""
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, one in entries:
        yield value, key
        if isinstance(one, dict | list):
            yield from leaves(one)


def change(value: Any, draw: random.Random) -> None:
    places = list(leaves(value))
    container, key = draw.choice(places)
    one = container[key]
    kinds = ["odd", "other", "gone", "near", "twice", "named"]
    kind = draw.choice(kinds)
    if kind == "odd":
        container[key] = draw.choice(ODD)
    elif kind == "other":
        other, place = draw.choice(places)
        container[key] = json.loads(json.dumps(other[place]))
    elif kind == "gone":
        del container[key]
    elif kind == "near" and isinstance(one, int | float):
        container[key] = one + draw.choice([-4096, -64, -4, -1, 1, 2, 4, 64, 4096])
    elif kind == "twice" and isinstance(container, list):
        container.insert(key, json.loads(json.dumps(one)))
    elif kind == "named" and isinstance(container, dict):
        container[draw.choice([f"{key}x", "weights/layers.0.weight", ""])] = container.pop(key)
    else:
        container[key] = draw.choice(ODD)


def craft(whole: Path, place: Path, draw: random.Random) -> tuple[Path, str]:
    crafted, what = Crafted(whole, place), draw.choice(["index", "index", "facts", "state"])
    count = draw.randint(1, 3)
    if what == "index":
        for _ in range(count):
            change(crafted.body, draw)
    elif what == "facts":
        facts = json.loads(crafted.content(FACTS))
        for _ in range(count):
            change(facts, draw)
        crafted.put(FACTS, json.dumps(facts).encode())
    else:
        state = torch.load(io.BytesIO(crafted.content("state/0")), weights_only=True)
        state = {
            "user": state["user"],
            "random": {**state["random"], "python": list(state["random"]["python"])},
        }
        for _ in range(count):
            places = [(c, k) for c, k in leaves(state) if not isinstance(c, tuple)]
            container, key = draw.choice(places)
            container[key] = draw.choice([*ODD, torch.zeros(3), torch.zeros(5056, dtype=torch.uint8)])
        content = io.BytesIO()
        torch.save(state, content)
        crafted.put("state/0", content.getvalue())
    return crafted.finish(), what


@cache
def control(precision: str) -> tuple[str, str]:
    """After two steps, and after one more."""
    engine = start(precision)
    train(engine, 0, 2)
    first = engine.weights_sha256()
    train(engine, 2, 3)
    second = engine.weights_sha256()
    engine.close()
    return first, second


def check(whole: Path, place: Path, precision: str, seeds: range) -> dict[str, int]:
    """How many were refused, and how many were loaded."""
    saved = start(precision)
    saved.load(whole)
    right = saved.weights_sha256()
    saved.close()
    count = {"refused": 0, "loaded": 0}
    engine = None
    for seed in seeds:
        if engine is None:
            engine = start(precision)
            train(engine, 0, 2)
        draw = random.Random(seed)
        path, what = craft(whole, place, draw)
        try:
            engine.load(path)
        except (IntegrityError, ConfigError, DiskError) as error:
            assert "load" in str(error), (seed, error)
            assert engine.weights_sha256() == control(precision)[0], (seed, what, str(error))
            count["refused"] += 1
            if not seed % 10:
                train(engine, 2, 3)
                assert engine.weights_sha256() == control(precision)[1], (seed, what)
                engine.close()
                engine = None
        else:
            assert engine.weights_sha256() == right, (seed, what)
            assert isinstance(random.gauss(0.0, 1.0), float), (seed, what)
            train(engine, 2, 3)  # whatever it goes on with, it goes on
            engine.check_integrity()
            engine.close()
            engine, count["loaded"] = None, count["loaded"] + 1
    if engine is not None:
        engine.close()
    return count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_of_one_rank(tmp_path: Path, precision: str) -> None:
    found = check(saved_here(tmp_path, precision), tmp_path / "crafted", precision, range(CASES))
    assert found["refused"] > CASES // 2


def saved_here(place: Path, precision: str) -> Path:
    engine = start(precision)
    train(engine, 0, 2)
    found = engine.save(place / "run", {"epoch": 1, "order": [3, 1, 2]})
    engine.close()
    return found


@pytest.mark.parametrize("following", [{}, "", [0.5], 1 << 70])
def test_a_number_to_come_that_is_none_is_refused(tmp_path: Path, following: Any) -> None:
    """Python keeps every second number that `random.gauss` draws, and takes whatever it is given there."""
    crafted = Crafted(saved_here(tmp_path, "fp32"), tmp_path / "crafted")
    state = torch.load(io.BytesIO(crafted.content("state/0")), weights_only=True)
    version, numbers, _ = state["random"]["python"]
    state["random"]["python"] = version, numbers, following
    content = io.BytesIO()
    torch.save(state, content)
    crafted.put("state/0", content.getvalue())
    engine = start("fp32")
    try:
        before = random.getstate()
        with pytest.raises(IntegrityError, match="random numbers cannot be taken up"):
            engine.load(crafted.finish())
        assert random.getstate() == before
    finally:
        engine.close()


def test_of_two_ranks(tmp_path: Path) -> None:
    group_of(2).run(save_on_two, str(tmp_path / "run"))
    [whole] = (tmp_path / "run").glob("step-*")
    found = check(whole, tmp_path / "crafted", "fp32", range(1000, 1000 + CASES // 2))
    assert found["refused"] > CASES // 4


@pytest.mark.heavy
def test_two_thousand(tmp_path: Path) -> None:
    for precision, first in (("fp32", 10_000), ("bf16", 20_000), ("fp16", 30_000)):
        place = tmp_path / precision
        place.mkdir()
        check(saved_here(place, precision), place / "crafted", precision, range(first, first + 500))
    group_of(2).run(save_on_two, str(tmp_path / "run"))
    [whole] = (tmp_path / "run").glob("step-*")
    check(whole, tmp_path / "crafted", "fp32", range(40_000, 40_500))
