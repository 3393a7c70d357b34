"""Stages of a pipeline beside shared chunks, two by two: the model is that of two ranks which have all of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import ebbtide
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.pipelining import Stage
from group import group_of
from harness import config_of
from sampling import some

WIDTH, LENGTH, VOCABULARY, BATCH, PIECES, STEPS = 32, 8, 64, 8, 4, 4
TIGHT = {"device": {"memory": "150KiB"}, "host": {"memory": "4MiB"}, "chunk_size": "16KiB"}
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@cache
def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # Without biases: that of keys has no gradient but noise, which Adam makes as large as any.
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, VOCABULARY)
    )


FIRST = 3
"""Modules of the first stage."""


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def batch_of(number: int, rank: int) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2 * (number % 3) + rank)
    )


def whole(config: dict[str, Any]) -> dict[str, Any]:
    """Two ranks, which have all of the model."""
    rank = dist.get_rank()
    engine = ebbtide.initialize(whole_model(), config)
    norms = []
    try:
        for number in range(STEPS):
            ids = batch_of(number, rank)
            engine.backward(loss_of(engine(ids), ids))
            norms.append(engine.step().grad_norm)
        with engine.weights() as found:
            return {"norms": norms, "weights": {name: value.clone() for name, value in found.items()}}
    finally:
        engine.close()


class Pipe:
    """One stage, and the schedule that runs it."""

    def __init__(self, schedule: str, config: dict[str, Any]) -> None:
        mesh = mesh_of()
        self.rank, self.stage = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        model = whole_model()
        module = model[FIRST:] if self.stage else model[:FIRST]
        self.engine = ebbtide.initialize(
            module, config, group=mesh["dp"].get_group(), stages=mesh["pp"].get_group()
        )
        dtype = torch.float32 if config.get("precision") == "fp32" else torch.bfloat16
        piece = BATCH // PIECES
        hidden = torch.zeros(piece, LENGTH, WIDTH, dtype=dtype)
        ids = torch.zeros(piece, LENGTH, dtype=torch.long)
        logits = torch.zeros(piece, LENGTH, VOCABULARY, dtype=dtype)
        given, out = (hidden, logits) if self.stage else (ids, hidden)
        made = Stage(self.engine, self.stage, 2, given, out, group=mesh["pp"].get_group())
        self.schedule = SCHEDULES[schedule](made, PIECES, loss_fn=loss_of)

    def steps(self, first: int, count: int) -> list[float | None]:
        norms = []
        for number in range(first, first + count):
            ids = batch_of(number, self.rank)
            if self.stage:
                self.schedule.step(target=ids)
            else:
                self.schedule.step(ids)
            norms.append(self.engine.step().grad_norm)
            self.engine.check_integrity()
        return norms

    def weights(self) -> dict[str, torch.Tensor]:
        """By their names in the whole model, which a slice of a Sequential keeps."""
        with self.engine.weights() as found:
            return {name: value.clone() for name, value in found.items()}


def staged(schedule: str, config: dict[str, Any]) -> dict[str, Any]:
    pipe = Pipe(schedule, config)
    try:
        norms = pipe.steps(0, STEPS)
        stats = pipe.engine.stats()
        return {
            "norms": norms,
            "weights": pipe.weights(),
            "sha": pipe.engine.weights_sha256(),
            "moved": sum(stats["moved_bytes"].values()),
            "plan": pipe.engine._session.cursor.diverged,
        }
    finally:
        pipe.engine.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_by_two_is_the_model_of_two(schedule: str) -> None:
    config = config_of(precision="fp32")
    expected = group_of(2).run(whole, config)[0]
    found = group_of(4).run(staged, schedule, config)
    for one in found:
        assert one["norms"] == found[0]["norms"]
        assert one["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    weights = found[0]["weights"] | found[1]["weights"]
    assert set(weights) == set(expected["weights"])
    for key, value in expected["weights"].items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", some(SCHEDULES, 1))
def test_bits_do_not_depend_on_the_place(schedule: str) -> None:
    resident = group_of(4).run(staged, schedule, config_of())
    found = group_of(4).run(staged, schedule, config_of(**TIGHT))
    assert [one["sha"] for one in found] == [one["sha"] for one in resident]
    assert min(one["moved"] for one in found) > max(one["moved"] for one in resident)
    assert [one["plan"] for one in found] == [""] * 4, "the schedule is the pass that was planned"


def going_on(folder: str) -> tuple[str, str]:
    pipe = Pipe("1f1b", config_of())
    try:
        pipe.steps(0, 2)
        pipe.engine.save(Path(folder))
        pipe.steps(2, 2)
        expected = pipe.engine.weights_sha256()
        pipe.engine.load(folder)
        pipe.steps(2, 2)
        return expected, pipe.engine.weights_sha256()
    finally:
        pipe.engine.close()


def test_each_stage_saves_its_own(tmp_path: Path) -> None:
    for expected, found in group_of(4).run(going_on, str(tmp_path)):
        assert expected == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0-of-2", "part-1-of-2"]


def not_finite() -> list[bool]:
    """In the first stage only, on one rank only: the loss does not show it."""
    pipe = Pipe("gpipe", config_of(nonfinite="continue"))
    try:
        if dist.get_rank() == 0:
            pipe.engine.module[1].up.weight.register_hook(lambda gradient: gradient * float("nan"))
        sha = pipe.engine.weights_sha256()
        pipe.steps(0, 1)
        return [pipe.engine.steps == 0, pipe.engine.weights_sha256() == sha]
    finally:
        pipe.engine.close()


def test_one_stage_that_is_not_finite_skips_the_step_for_all() -> None:
    assert group_of(4).run(not_finite) == [[True, True]] * 4


def refused() -> list[str]:
    said = []
    mesh = mesh_of()
    dp, pp = mesh["dp"].get_group(), mesh["pp"].get_group()
    x = torch.zeros(2, LENGTH, WIDTH)
    for config in ({"updates": "in-backward", "clip": None}, {"precision": "fp16"}, {"accumulate": 2}, {}):
        engine = None
        try:
            stages = pp if config else None
            engine = ebbtide.initialize(nn.Linear(WIDTH, WIDTH), config_of(**config), group=dp, stages=stages)
            Stage(engine, 0, 2, x, x, group=pp)
        except (ConfigError, UnsupportedError) as error:
            said.append(str(error))
        finally:
            if engine is not None:
                engine.close()
    try:
        ebbtide.initialize(nn.Linear(4, 4), config_of(), stages=pp)
    except ConfigError as error:
        said.append(str(error))
    try:
        ebbtide.initialize(
            nn.Linear(4, 4), config_of(clip=float(1 + dist.get_rank() % 2)), group=dp, stages=pp
        )
    except ConfigError as error:
        said.append(str(error))
    return said


def test_what_cannot_be() -> None:
    for backward, fp16, accumulate, unknown, groups, clip in group_of(4).run(refused):
        assert 'takes updates = "exact"' in backward and "bf16" in fp16 and "found 2" in accumulate
        assert "initialize(..., stages=)" in unknown and "have other stages" in groups and "clip is" in clip
