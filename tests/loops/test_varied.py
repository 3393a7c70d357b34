"""Passes of one kind of input that differ by its values: what is planned for is the largest of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import BudgetError
from ebbtide.runtime.planning.plan_cache import WATCHED
from harness import Count, config_of

IMAGINES = True

WIDTH, ROWS = 64, 128


class Layered(nn.Module):
    """As many layers as the input says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers[: int(count.item())]:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def engine_of(memory: int) -> Engine:
    config = config_of(
        precision="fp32", chunk_size="16KiB", device={"memory": memory}, host={"memory": "64MB"}
    )
    settings = Config.read(config)
    return Engine(Layered(), settings, tiers=open_tiers(settings))


def train(engine: Engine, counts: list[int]) -> list[int]:
    """The most bytes that were there in each step, by a count of its own."""
    peaks = []
    for number, layers in enumerate(counts):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        count = torch.tensor(layers)
        with Count(engine) as counted:
            counted.given({"x": x, "count": count})
            engine.backward(engine(x, count))
            engine.step()
        peaks.append(counted.peak)
    return peaks


def test_those_that_take_turns_stay_within_the_budget_once_both_were_seen() -> None:
    counts = [1, 8] * 6
    shas = []
    for memory in (900_000, 64_000_000):
        engine = engine_of(memory)
        peaks = train(engine, counts)
        assert max(peaks[4:]) <= memory
        engine.check_integrity()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_those_that_never_fit_are_refused() -> None:
    engine = engine_of(600_000)
    with pytest.raises(BudgetError):
        train(engine, [1, 8] * 3)
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("memory", [900_000, 64_000_000])
def test_what_does_not_come_again_is_forgotten(memory: int) -> None:
    engine = engine_of(memory)
    train(engine, [8] * 3)
    before = engine.stats()["non_model_peak"]
    train(engine, [1] * (WATCHED + 2))
    assert engine.stats()["non_model_peak"] < before // 2
    traces = engine.stats()["traces"]
    train(engine, [1] * 3)
    assert engine.stats()["traces"] == traces  # all alike: they are not traced any more
    engine.close()
