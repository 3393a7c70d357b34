"""Ranks that would update their parts of the weights with different settings are refused, before anything is updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import ebbtide
from ebbtide.errors import StateError
from group import group_of
from harness import config_of
from test_habits import LR, Net, batch

BASE: dict[str, Any] = {"precision": "fp32", "chunk_size": "8KiB", "clip": None, "optimizer": {"lr": LR}}


def start(groups: Any = None, **changes: Any) -> ebbtide.Engine:
    module = Net()
    made = None if groups is None else groups(module)
    return ebbtide.initialize(module, config_of(**(BASE | changes)), param_groups=made)


def loss_of(engine: ebbtide.Engine, number: int) -> torch.Tensor:
    x, y = batch(number * dist.get_world_size() + dist.get_rank())
    return F.cross_entropy(engine(x), y)


def rate(engine: ebbtide.Engine, value: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = value


def two_groups(module: Net) -> list[dict[str, Any]]:
    first, *others = module.parameters()
    return [{"params": [first]}, {"params": others, "lr": LR / 2}]


def clip(engine: ebbtide.Engine, norm: float) -> None:
    engine.clip_grad_norm_(norm)


def moved(engine: ebbtide.Engine, count: int) -> None:
    """The first `count` parameters of the second group go into the first."""
    first, second = engine.optimizer.param_groups
    first["params"], second["params"] = (
        first["params"] + second["params"][:count],
        second["params"][count:],
    )


CASES: dict[str, tuple[Any, Callable[[ebbtide.Engine, Any], None], tuple[Any, Any], str]] = {
    "rate": (None, rate, (LR, 2 * LR), r"param_groups\[0\]\['lr'\] is 0\.\d+ on rank 0 and 0\.\d+ on rank 1"),
    "norm": (None, clip, (0.5, 0.25), "the norm to clip to is 0.5 on rank 0 and 0.25 on rank 1"),
    "group": (two_groups, moved, (0, 1), "the group of .* is 1 on rank 0 and 0 on rank 1"),
}


def differing(case: str) -> tuple[str, str, str, str]:
    """What is said; and the weights before, after, and once ranks are alike again."""
    groups, change, values, _ = CASES[case]
    engine = start(groups)
    loss_of(engine, 0).backward()
    engine.step()
    before = engine.weights_sha256()
    loss_of(engine, 1).backward()
    change(engine, values[dist.get_rank()])
    said = ""
    try:
        engine.step()
    except StateError as error:
        said = str(error)
    after = engine.weights_sha256()
    if case == "rate":
        rate(engine, LR)
        assert engine.step().updated  # its gradients were held
    else:
        engine.zero_grad()
    again = engine.weights_sha256()
    engine.close()
    return said, before, after, again


@pytest.mark.parametrize("case", CASES)
def test_other_settings_on_a_rank_are_named_and_update_nothing(case: str) -> None:
    found = group_of(2).run(differing, case)
    assert found[0] == found[1]
    said, before, after, again = found[0]
    assert before == after
    expected = CASES[case][3]
    with pytest.raises(StateError, match=expected):
        raise StateError(said)
    assert (again != before) is (case == "rate")


def in_backward() -> tuple[str, bool]:
    engine = start(updates="in-backward")
    before = engine.weights_sha256()
    rate(engine, LR * (1 + dist.get_rank()))
    said = ""
    try:
        engine.backward(loss_of(engine, 0))
    except StateError as error:
        said = str(error)
    same = engine.weights_sha256() == before
    engine.close()
    return said, same


def test_updates_in_backward_ask_before_they_begin() -> None:
    for said, same in group_of(2).run(in_backward):
        assert "on rank 0 and" in said
        assert same


def nearly() -> str:
    """As of a schedule that two makes of processors compute: the last bit of its cosine differs."""
    engine = start()
    rate(engine, math.nextafter(LR, 1.0) if dist.get_rank() else LR)
    loss_of(engine, 0).backward()
    assert engine.step().updated
    rate(engine, torch.tensor(LR))
    loss_of(engine, 1).backward()
    assert engine.step().updated
    sha = engine.weights_sha256()
    engine.close()
    return sha


def test_the_last_bit_of_a_schedule_is_no_difference() -> None:
    assert len(set(group_of(2).run(nearly))) == 1


def in_a_hook(by: str) -> tuple[str, bool]:
    """Only one rank has the hook; it sets a rate when the step has begun."""
    engine = start()
    before = engine.weights_sha256()
    if dist.get_rank():
        engine.optimizer.register_step_pre_hook(lambda *_: rate(engine, 2 * LR))
    loss_of(engine, 0).backward()
    said = ""
    try:
        engine.step() if by == "engine" else engine.optimizer.step()
    except StateError as error:
        said = str(error)
    same = engine.weights_sha256() == before
    engine.close()
    return said, same


@pytest.mark.parametrize("by", ["engine", "optimizer"])
def test_a_hook_that_sets_a_rate_on_one_rank_is_found(by: str) -> None:
    for said, same in group_of(2).run(in_a_hook, by):
        assert "param_groups[0]['lr']" in said and "on rank 1" in said
        assert same
