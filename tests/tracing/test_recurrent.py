"""LSTM layers, whose workspace torch's fake kernels leave out: imagined as large as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.engine import Engine, open_tiers
from harness import Count, config_of

IMAGINES = True


class Reader(nn.Module):
    def __init__(self, width: int, layers: int, both_ways: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(width * (2 if both_ways else 1), 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.table(ids))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), ids.flatten())


@pytest.mark.parametrize(
    ("width", "layers", "both_ways", "rows", "steps", "precision"),
    [
        (64, 2, False, 8, 64, "fp32"),
        (64, 1, True, 4, 20, "bf16"),
        pytest.param(64, 2, False, 8, 64, "bf16", marks=pytest.mark.heavy),
        pytest.param(64, 1, True, 4, 20, "fp32", marks=pytest.mark.heavy),
        pytest.param(96, 1, True, 8, 100, "fp32", marks=pytest.mark.heavy),
        pytest.param(96, 1, True, 8, 100, "bf16", marks=pytest.mark.heavy),
    ],
)
def test_what_is_imagined_is_what_comes(
    width: int, layers: int, both_ways: bool, rows: int, steps: int, precision: str
) -> None:
    ids = torch.randint(0, 64, (rows, steps), generator=torch.Generator().manual_seed(0))

    def engine_of(memory: int) -> Engine:
        tight = config_of(precision=precision, clip=None, device={"memory": memory}, host={"memory": "64MB"})
        settings = Config.read(tight)
        return Engine(Reader(width, layers, both_ways), settings, tiers=open_tiers(settings))

    free = engine_of(64_000_000)
    free.backward(free(ids))
    [known] = free._session.traces._known.values()
    imagined = known.record
    free.step()
    for _ in range(2):
        free.backward(free(ids))
        free.step()
    [known] = free._session.traces._known.values()
    assert (imagined.source, known.record.source) == ("symbolic", "live")
    assert imagined.peak == pytest.approx(known.record.peak, rel=0.01, abs=16384)
    memory = imagined.peak + sum(free.stats()["tags"]["device"].values()) // 3
    free.close()
    engine = engine_of(memory)
    for _ in range(3):
        with Count(engine) as count:
            count.given({"ids": ids})
            engine.backward(engine(ids))
            engine.step()
        assert count.peak <= memory
    engine.close()


class Gates(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = kind(64, 64, batch_first=True)
        self.rest = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.layers(x)[0]).square().mean()


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_gates_that_are_written_one_by_one_leave_and_come_back_as_they_were(kind: type[nn.RNNBase]) -> None:
    """A GRU cell's gates share a storage and have versions of their own: what was copied with the first was taken for
    the others, too, and gradients were wrong."""

    def steps(**more: Any) -> tuple[list[tuple[float, float | None]], int]:
        settings = Config.read(
            config_of(precision="fp32", chunk_size="8KiB", host={"memory": "64MB"}, **more)
        )
        engine = Engine(Gates(kind), settings, tiers=open_tiers(settings))
        rows = []
        for seed in range(3):
            loss = engine(torch.randn(128, 8, 64, generator=torch.Generator().manual_seed(seed)))
            engine.backward(loss)
            rows.append((float(loss.detach()), engine.step().grad_norm))
        sent = engine.stats()["offloaded_bytes"]
        engine.close()
        return rows, sent

    resident, _ = steps()
    away, sent = steps(device={"memory": 8_000_000}, offload_activations="all")
    assert sent > 0
    assert away == resident
