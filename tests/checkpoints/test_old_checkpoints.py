"""Checkpoints of earlier versions load, and training goes on as it would have then.

`data/checkpoint-0.1` was written by commit f9fb86e, before the rooms of the house were moved:
`python tests/checkpoints/test_old_checkpoints.py` wrote it there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.checkpoint.tensor_parts import parts_of
from harness import config_of

HERE = Path(__file__).parent / "data" / "checkpoint-0.1"
STEPS = 3


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 24)
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 96)
        self.down = nn.Linear(96, 24)
        self.head = nn.Linear(24, 61, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        logits = self.head(x[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def begin(**changes: Any) -> ebbtide.Engine:
    torch.manual_seed(7)
    return ebbtide.initialize(Small(), config_of(chunk_size="8KiB", **changes))


def go_on(engine: ebbtide.Engine, first: int) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        batch = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(step))
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def sha256(engine: ebbtide.Engine) -> str:
    """Of weights, moments and buffers."""
    digest = hashlib.sha256()
    for part in sorted(parts_of(engine._session), key=lambda one: one.key):
        begin, end = part.range
        flat = torch.empty(end - begin, dtype=part.dtype)
        part.load(begin, flat)
        digest.update(part.key.encode() + flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write() -> None:
    """What the commit that wrote the data did."""
    engine = begin()
    go_on(engine, 0)
    engine.save(HERE / "run", {"epoch": 2})
    facts = {"sha256": sha256(engine), "losses": go_on(engine, STEPS)}
    (HERE / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")


@pytest.mark.parametrize("changes", [{}, {"device": {"memory": "100KiB"}}, {"layout": "page"}], ids=str)
def test_values_are_the_same_and_training_goes_on(changes: dict[str, Any]) -> None:
    expected = json.loads((HERE / "expected.json").read_text())
    engine = begin(**changes)
    try:
        assert engine.load(HERE / "run") == {"epoch": 2}
        assert sha256(engine) == expected["sha256"]
        # Products differ from one kind of processor to the next.
        assert go_on(engine, STEPS) == pytest.approx(expected["losses"], rel=5e-3)
    finally:
        engine.close()


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(write())
