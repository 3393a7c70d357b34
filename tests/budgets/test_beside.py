"""What is outside the chunks takes its part of a budget in every moment, not only in those that a plan knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.config import Config
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import BudgetError
from harness import Count, config_of
from sampling import few

WIDTH, TOKENS = 64, 512


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


TABLE = 4 * WIDTH * TOKENS
IDS = torch.arange(16).view(2, 8)


def test_before_the_first_pass(tmp_path: Path) -> None:
    """Buffers for state on SSD took all there was."""
    begun = 0
    for memory in range(200_000, 700_000, 20_000):
        tiers = {"device": {"memory": memory}, "host": {"memory": 0}}
        disk = {"folder": str(tmp_path), "memory": "32MB"}
        config = config_of(precision="fp32", unmanaged=["table.*"], chunk_size="16KiB", ssd=disk, **tiers)
        try:
            engine = ebbtide.initialize(Net(), config)
        except BudgetError as error:
            assert error.tier == "device" and error.short > 0
            continue
        held = engine._session.ledger.reserved["device"]
        assert held + TABLE <= memory
        engine.close()
        begun += 1
    assert begun


@pytest.mark.parametrize("steps", [0, 1])
def test_of_an_engine_that_rests_while_another_one_works(steps: int) -> None:
    """After a step, with its optimizer state."""
    memory = 1_500_000
    config = Config.read(
        config_of(
            precision="fp32",
            chunk_size="16KiB",
            unmanaged=["table.*"],
            device={"memory": memory},
            host={"memory": "64MB"},
        )
    )
    tiers = open_tiers(config)
    first, second = Engine(Net(), config, tiers=tiers), Engine(Net(), config, tiers=tiers)
    for engine in [first] * steps + [second]:
        engine.backward(engine(IDS))
        engine.step()
    taken = TABLE * (1 + 2 * steps) + TABLE * 3
    assert taken <= tiers.ledger.level["device"]
    assert tiers.ledger.level["device"] + tiers.ledger.reserved["device"] <= memory
    first.close()
    second.close()


@pytest.mark.parametrize("changes", [{}, {"updates": "lock-free"}], ids=["", "lock-free"])
def test_gradients_of_the_batches_before(changes: dict[str, Any], tmp_path: Path) -> None:
    """They are there from the beginning of the second one, where the first one's activations were alone."""
    ran = 0
    for memory in few((*range(700_000, 1_500_000, 25_000), 4_000_000), 12):
        tiers = {"device": {"memory": memory}, "host": {"memory": "32MB"}, "chunk_size": "16KiB"}
        disk = {"folder": str(tmp_path), "memory": "32MB"}
        config = config_of(
            precision="fp32", unmanaged=["table.*"], accumulate=3, clip=None, ssd=disk, **tiers, **changes
        )
        engine = ebbtide.initialize(Net(), config)
        try:
            with Count(engine) as count:  # it sees the table, too, in views of it
                for number in range(3):
                    for _ in range(3):
                        ids = torch.arange(128).view(2, 64) + number
                        engine.backward(engine(**count.given({"ids": ids})))
                        assert count.peak <= memory, (memory, number, count.peak - memory)
                    engine.step()
            engine.check_integrity()
            ran += 1
        except BudgetError as error:
            assert error.tier == "device"
        finally:
            engine.close()
    assert ran > 3
