"""A step that has begun comes to its end: a budget that is too small is refused before the first pass."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
import reference
from ebbtide.errors import BudgetError
from harness import LR, Count, config_of
from sampling import few, some
from zoo import Loss

WIDTH = 64


class Pair(nn.Module):
    """Two weights in one module, as experts and attention have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(torch.relu(F.linear(x, self.up)), self.down)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> Loss:
        return Loss(self.blocks(x).float().square().mean(), ())


class Pairs(Net):
    def __init__(self) -> None:
        super().__init__(Pair)


class Adapted(Net):
    """Most of it is frozen."""

    def __init__(self) -> None:
        super().__init__(Pair)
        for parameter in self.parameters():
            parameter.requires_grad_(False).data = parameter.bfloat16().float()  # it has no master
        self.blocks.append(nn.Linear(WIDTH, WIDTH))
        self.blocks.insert(0, nn.Linear(WIDTH, WIDTH))


class Again(Net):
    """Gradients of what is used within and without come twice, and between them the weights are used."""

    def __init__(self) -> None:
        super().__init__(Pair)

    def forward(self, x: torch.Tensor) -> Loss:
        x = checkpoint(self.blocks, self.blocks[0](x), use_reentrant=True)
        return Loss(self.blocks(x).float().square().mean(), ())


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()}


def trained(kind: type[nn.Module], steps: int = 3, **changes: Any) -> str | None:
    """The weights' hash, or None where it is refused, before anything has run."""
    begun = False
    engine = None
    try:
        engine = ebbtide.initialize(kind(), config_of(chunk_size="16KiB", **changes))
        for number in range(steps):
            loss = engine(**batch(number)).loss
            begun = True
            engine.backward(loss)
            engine.step()
        engine.check_integrity()
        return engine.weights_sha256()
    except BudgetError:
        if begun:
            raise
        return None
    finally:
        if engine is not None:
            engine.close()


@pytest.mark.parametrize("device", some([110_000, 150_000], 1))
@pytest.mark.parametrize(
    "kind, changes",
    [
        (Pairs, {"master": "separate"}),
        (Pairs, {}),
        (Adapted, {}),
        (Adapted, {"layout": "page"}),
        (Again, {"master": "separate"}),
    ],
)
def test_whatever_the_host(kind: type[nn.Module], device: int, changes: dict[str, Any]) -> None:
    """A module's first weight is wanted after the second one's gradient has taken its space, which it keeps: no plan has
    room for it elsewhere; where gradients come twice, none have it. What is frozen leaves the device, too, and has its
    place on the host."""
    expected = reference.train(kind(), batch, 3, lr=LR, clip=1.0)[0]
    found = [
        trained(kind, device={"memory": device}, host={"memory": host}, **changes)
        for host in few(range(100_000, 900_000, 20_000), 14)
    ]
    assert {None, expected} == set(found)


@pytest.mark.parametrize(
    "device, changes",
    [(2_000_000, {}), (2_000_000, {"host_modules": ["blocks.0"]}), (600_000, {"updates": "in-backward"})],
    ids=["exact", "host-modules", "in-backward"],
)
def test_who_trains_can_load_what_it_has_saved(device: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """A new engine keeps the device free for a first pass that nobody has seen: where the host has no room for what has
    to leave for that, what is loaded goes first."""
    loaded = 0
    for host in few(range(0, 900_000, 25_000), 13):
        tiers = {"device": {"memory": device}, "host": {"memory": host}}
        config = config_of(**{"chunk_size": "16KiB", "clip": None, **tiers, **changes})
        try:
            begin = ebbtide.initialize(Pairs(), config)
        except BudgetError:
            continue
        with closing(begin) as first:
            try:
                first.backward(first(**batch(0)).loss)
            except BudgetError:
                continue
            first.step()
            first.save(tmp_path / "saved")
            expected = first.weights_sha256()
        with closing(ebbtide.initialize(Pairs(), config)) as second:
            second.load(tmp_path / "saved")
            assert second.weights_sha256() == expected
            second.backward(second(**batch(1)).loss)
            second.step()
        loaded += 1
    assert loaded


class Prepared(Net):
    """Computes something large from its input before the first module."""

    def __init__(self) -> None:
        super().__init__(Pair)

    def forward(self, x: torch.Tensor) -> Loss:
        return super().forward((x[:, :, None] * x[:, None]).mean(1))


def test_what_is_computed_before_the_first_module_is_foreseen() -> None:
    """The level was that of the pass before, until the first module was there."""
    outcomes = set()
    for memory in range(200_000, 700_000, 20_000):
        tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}}
        engine = ebbtide.initialize(Prepared(), config_of(chunk_size="16KiB", **tiers))
        for rows in (2, 24, 2, 24, 2):
            given = {"x": torch.randn(rows, WIDTH).bfloat16()}
            with Count(engine) as count:
                count.given(given)
                try:
                    loss = engine(**given).loss
                except BudgetError:
                    outcomes.add((rows, "refused"))
                    continue
                engine.backward(loss)
                engine.step()
                del loss
            assert count.peak <= memory
            outcomes.add((rows, "trained"))
        engine.close()
    assert {(2, "trained"), (24, "refused"), (24, "trained")} <= outcomes
