"""`torch.set_default_device(...)` is for what the user's script makes: the engine's buffers stay in RAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from harness import config_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


TIGHT: dict[str, Any] = {"device": {"memory": 80_000}, "host": {"memory": "10MB"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "separate master": {"precision": "bf16", "master": "separate", "accumulate": 2},
    "budget": {"precision": "bf16"} | TIGHT,
    "SSD": TIGHT | {"host": {"memory": 200_000}},
    "in backward": {"updates": "in-backward", "clip": None},
    "outside the chunks": {"precision": "bf16", "unmanaged": ["layers.1.*"]},
    "on the host": {"host_modules": ["layers.1"]} | TIGHT,
    "activations": {"offload_activations": "all"} | TIGHT,
}


def trained(settings: dict[str, Any], folder: Path) -> str:
    """What a user's loop does with an engine, but for its batches all the while under the default device."""
    with torch.device("cpu"):
        net = Net()
    disk = {"ssd": {"folder": str(folder / "ssd"), "memory": "8MB"}} if settings is SETTINGS["SSD"] else {}
    engine = ebbtide.initialize(
        net,
        config_of(**{"precision": "fp32", "chunk_size": "4KiB"} | settings | disk),
    )
    average = engine.ema(0.9)
    for number in range(3):
        for part in range(engine.config.accumulate):
            drawn = torch.Generator(device="cpu").manual_seed(2 * number + part)
            x = torch.randn(4, 32, generator=drawn, device="cpu")
            x = x.to(next(engine.module.parameters()).dtype)
            engine.backward(engine(x))
        if engine.config.updates == "exact":
            engine.clip_grad_norm_(0.5)
        engine.step()
        with torch.no_grad():
            engine(x)
    engine.save(folder / "saved")
    engine.load(folder / "saved")
    with average.swapped_in(), torch.no_grad():
        engine(x)
    with engine.weights("layers.3.weight", write=True) as weights:
        weights["layers.3.weight"].mul_(0.5)
    assert all(value.device.type == "cpu" for value in engine.state_dict().values())
    engine.check_integrity()
    sha = engine.weights_sha256()
    engine.release()
    return sha


@pytest.mark.parametrize("name", list(SETTINGS))
def test_it_changes_nothing(name: str, tmp_path: Path) -> None:
    """On the meta device, where nothing is memory: each buffer that was left to the default raised, or was lost."""
    for place in ("plain", "meta"):
        (tmp_path / place / "ssd").mkdir(parents=True)
    plain = trained(SETTINGS[name], tmp_path / "plain")
    with default_device("meta"):
        assert trained(SETTINGS[name], tmp_path / "meta") == plain
