"""Buffers that forward writes are the first rank's after each step, so that checkpoints and evaluations know one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ebbtide
from group import group_of
from harness import config_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen[0] += int(x[0, 0] * 100)
            self.cache.fill_(x[0, 0])  # what follows from what the rank has seen
        return self.head(self.norm(self.body(x))).square().mean()


def rows(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3 + rank, 8, generator=torch.Generator().manual_seed(2 * number + rank))


def state(module: Net) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def trained(config: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Buffers after three steps; after a checkpoint that another step followed; and what evaluation gives."""
    rank, module = dist.get_rank(), Net()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None, **config))
    for number in range(3 * config.get("accumulate", 1)):
        engine.backward(engine(rows(number, rank)))
        engine.step()
    first = state(module)
    engine.save(folder)
    module.eval()
    with torch.no_grad():
        found = {"loss": engine(rows(9, 0))}
    module.train()
    for number in range(10, 10 + config.get("accumulate", 1)):
        engine.backward(engine(rows(number, rank)))
        engine.step()
    engine.load(folder)
    second = state(module)
    engine.close()
    return first, second, found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"accumulate": 2},
        {"updates": "in-backward"},
        {"device": {"memory": 80_000}, "host": {"memory": "1MiB"}},
    ],
)
def test_buffers_are_the_first_ranks_after_a_step(config: dict[str, Any], tmp_path: Path) -> None:
    zero, one = group_of(2).run(trained, config, str(tmp_path))
    for mine, theirs in zip(zero, one, strict=True):
        for name in mine:
            assert torch.equal(mine[name], theirs[name]) is (name != "cache"), name
    batches = range(3 * config.get("accumulate", 1))
    assert zero[0]["seen"].tolist() == [sum(int(rows(n, 0)[0, 0] * 100) for n in batches), 0]
    assert zero[0]["norm.num_batches_tracked"] == len(batches)
    assert torch.equal(zero[0]["norm.running_var"], zero[1]["norm.running_var"])


def agreements() -> int:
    """Of a model that has buffers and writes none: nothing is sent for them."""
    engine = ebbtide.initialize(Net().eval(), config_of(precision="fp32", clip=None))
    buffers = engine._core._buffers
    assert buffers is not None and not buffers.written
    for number in range(2):
        engine.backward(engine(rows(number, 0)))
        engine.step()
        assert not buffers.written
    engine.module.seen.add_(1)
    assert buffers.written
    engine.close()
    return 1


def test_buffers_that_are_not_written_cost_nothing() -> None:
    assert group_of(2).run(agreements) == [1, 1]


def inference() -> float:
    """A buffer that was made in a validation under inference mode knows no writes, and is nobody's business."""
    engine = ebbtide.initialize(Net(), config_of(precision="fp32", clip=None))
    with torch.inference_mode():
        engine.module.seen = torch.zeros(2, dtype=torch.int64)
    engine.module.eval()
    engine.backward(engine(rows(0, 0)))
    engine.step()
    engine.close()
    return engine.steps


def test_buffers_of_inference_mode_break_no_step() -> None:
    assert group_of(2).run(inference) == [1, 1]
