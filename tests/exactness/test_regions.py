"""Checkpointed regions that read weights otherwise than by running their modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.checkpoint import checkpoint

import ebbtide
import reference
from ebbtide.errors import BudgetError
from harness import LR, Count, config_of
from sampling import everything, few
from zoo import Loss

WIDTH, ROWS = 64, 24


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))}


class Scales(nn.Module):
    """Weights in a list and a dictionary, which are modules that never run."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        made = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=trained) for _ in range(4)]
        self.some, self.more = nn.ParameterList(made[:3]), nn.ParameterDict({"last": made[3]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.some:
            x = torch.tanh(x @ weight)
        return x * self.more["last"].sum(0)


class Listed(nn.Module):
    """Its regions run modules that read from lists."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scales = nn.ModuleList(Scales(trained) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Loss:
        for number, scales in enumerate(self.scales):
            ends = self.layers[2 * number : 2 * number + 2]

            def body(x: torch.Tensor, scales: Any = scales, ends: Any = ends) -> torch.Tensor:
                return ends[1](scales(torch.tanh(ends[0](x))))

            x = x + checkpoint(body, x, use_reentrant=False)
        return Loss(x.square().mean(), ())


class Read(nn.Module):
    """A region without a module reads weights of the one around it, and the weight of one that it does not run."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=trained)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(trained)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[1](x) @ self.own)
        return self.layers[2](torch.tanh(x @ self.other.weight))

    def forward(self, x: torch.Tensor) -> Loss:
        x = self.layers[0](x)
        return Loss(self.layers[3](checkpoint(self.body, x, use_reentrant=False)).square().mean(), ())


@pytest.mark.parametrize(
    ("trained", "kind", "offload"),
    [
        pytest.param(trained, kind, offload, marks=() if daily else pytest.mark.heavy)
        for kind in (Listed, Read)
        for trained in (True, False)
        for offload in ("off", "all")
        for daily in [trained == (offload == "all")]
    ],
)
def test_it_trains_alike_wherever_the_weights_are(kind: Any, trained: bool, offload: str) -> None:
    """Frozen ones, too, which a checkpoint keeps as the parameters that they are. Where modules run in a region, what is
    there while it is computed again is what the plan says."""
    expected = reference.train(kind(trained), batch, 3, precision="fp32", lr=LR)[0]
    ran = 0
    for memory in few((*range(80_000, 320_000, 12_000), 8_000_000), 8):
        tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "layout": "tensor"}
        config = config_of(precision="fp32", clip=None, offload_activations=offload, **tiers)
        engine = ebbtide.initialize(kind(trained), config)
        try:
            for number in range(3):
                with Count(engine) as count:
                    engine.backward(engine(**count.given(batch(number))).loss)
                    engine.step()
                assert count.peak <= memory, (memory, number, count.peak - memory)
            assert engine.weights_sha256() == expected
            engine.check_integrity()
            ran += 1
        except BudgetError as error:
            assert kind is Read or "needs at least" in str(error)
        finally:
            engine.close()
    assert ran > (5 if everything() else 2)


class Shift(nn.Module):
    """Its second parameter's gradient comes before anything of its region is wanted in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.ones(width, width)),
            nn.Parameter(torch.zeros(width, width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.scale * 1.0) + self.shift


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shift, self.last = nn.Linear(32, 32), Shift(32), nn.Linear(32, 32)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> Loss:
        self.runs += not is_fake(x)
        x = checkpoint(lambda y: self.shift(torch.tanh(self.first(y))), x, use_reentrant=False)
        return Loss(self.last(x).square().mean(), ())


def test_a_module_is_run_again_after_a_gradient_of_it_has_come() -> None:
    """With a separate master gradients take their parameters' space, and these are wanted again: what that takes is
    planned, or the pass is refused before it runs."""

    def given(step: int) -> dict[str, torch.Tensor]:
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
        return {"x": x.bfloat16()}

    sha = reference.train(Shifted(), given, 3, lr=LR)[0]
    ran = refused = 0
    for device in range(20_000, 60_000, 2_000):
        config = config_of(
            master="separate",
            chunk_size="16KiB",
            clip=None,
            device={"memory": device},
            host={"memory": "64MB"},
        )
        engine = ebbtide.initialize(Shifted(), config)
        try:
            for step in range(3):
                engine.backward(engine(**given(step)).loss)
                engine.step()
            assert engine.weights_sha256() == sha
            ran += 1
        except BudgetError:
            assert engine.module.runs == 0
            refused += 1
        finally:
            engine.close()
    assert ran and refused
