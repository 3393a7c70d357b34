"""Lock-free updates on many ranks: gradients are added first, none is lost, and nothing changes under a pass."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ebbtide
import zoo
from ebbtide.config import Config
from ebbtide.devices.cpu_device import CpuBackend
from ebbtide.engine import Engine
from ebbtide.kernels import RULES
from ebbtide.memory.budget import Ledger
from ebbtide.memory.disk.space import DiskSpace
from ebbtide.runtime.process_tiers import Tiers
from group import group_of
from harness import batch_of, config_of
from test_lock_free import ELEMENTS, LAYERS, SUMS, Chain, slow


def chained(
    folder: str, host: bool, bound: int, delay: float, steps: int, rates: dict[str, float] | None = None
) -> dict[str, Any]:
    """The ranks' mean gradient is a whole number; the second rank's updates are slower than the first one's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, RULES["adamw"] = RULES["adamw"], SUMS
    budgets = {"device": 4_000_000, "host": 4_000_000 * host, "ssd": 16_000_000}
    own = Path(folder) / str(rank)
    own.mkdir()
    disk = DiskSpace([own], budgets["ssd"])
    config = {"layout": "tensor", "precision": "fp32", "updates": "lock-free", "placement": "host"}
    given_memory = {"device": {"kind": "cpu", "memory": budgets["device"]}, "optimizer": {"lr": 1.0}}
    engine = Engine(
        Chain(),
        Config.read(config | given_memory | {"max_staleness": bound}),
        tiers=Tiers(CpuBackend(poison=True, rates=rates), Ledger(budgets), disk),
    )
    try:
        slow(engine, delay * rank)
        total = torch.zeros(LAYERS)
        for number in range(steps):
            generator = torch.Generator().manual_seed(number)
            given = size * torch.randint(-4, 5, (size, LAYERS), generator=generator).float()
            engine.backward(engine(given[rank]))
            engine.step()
            total -= given.mean(0)
        stats = engine.stats()["lock_free"]
        found = engine.state_dict()
        for value, wanted in zip(found.values(), total, strict=True):
            assert torch.equal(value, wanted.expand(ELEMENTS))
        assert engine.module.watch.changed == 0
        engine.check_integrity()
        return stats | {"after": engine.stats()["lock_free"], "sha": engine.weights_sha256()}
    finally:
        engine.close()
        RULES["adamw"] = before


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("host", [False, True], ids=["one tier", "three tiers"])
def test_no_gradient_is_lost(host: bool, bound: int, tmp_path: Path) -> None:
    found = group_of(2).run(chained, str(tmp_path), host, bound, 0.004, 16)
    assert found[0]["sha"] == found[1]["sha"]
    for rank in found:
        assert rank["staleness_max"] <= bound
        after = rank["after"]
        assert after["pending"] == 0
        assert after["gradients_produced"] == after["gradients_applied"] == 16 * LAYERS


def test_gradients_that_are_still_on_their_way_to_the_host(tmp_path: Path) -> None:
    """The next step's come before the last one's have been added up."""
    found = group_of(2).run(chained, str(tmp_path), True, 8, 0.0, 6, {"device_to_host": 1e6})
    assert found[0]["sha"] == found[1]["sha"]
    assert all(rank["after"]["gradients_applied"] == 6 * LAYERS for rank in found)


def trained(folder: str, updates: str) -> dict[str, Any]:
    """A real model, saved and loaded again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = config_of(
        updates=updates,
        device={"memory": 2_000_000},
        host={"memory": "64MB"},
        placement="host",
        max_staleness=2,
    )
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    try:
        losses = []
        for number in range(30):
            loss = engine(**batch_of("gpt2", (number % 4) * size + rank, torch.bfloat16, "cpu")).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        engine.save(folder)
        sha = engine.weights_sha256()
        engine.load(folder)
        assert engine.weights_sha256() == sha
        with torch.no_grad():
            engine(**batch_of("gpt2", rank, torch.bfloat16, "cpu"))
        return {"losses": losses, "sha": sha}
    finally:
        engine.close()


@pytest.mark.heavy
def test_the_loss_falls_as_it_does_exactly() -> None:
    with tempfile.TemporaryDirectory() as folder:
        free = group_of(2).run(trained, folder, "lock-free")
        exact = group_of(2).run(trained, folder, "exact")
    assert free[0]["sha"] == free[1]["sha"]
    for one, other in zip(free, exact, strict=True):
        assert one["losses"][-1] < one["losses"][0]
        assert sum(one["losses"][-4:]) == pytest.approx(sum(other["losses"][-4:]), rel=0.1)
