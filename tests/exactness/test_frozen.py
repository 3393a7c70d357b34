"""A frozen engine between a loss and what is trained (a perceptual loss, a reward): each forward is a pass of its own,
for nobody says when backward has gone through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import reference
from ebbtide.errors import BudgetError
from group import group_of
from harness import LR, Count, config_of
from sampling import crossed, everything, few
from zoo import Loss

WIDTH, ROWS = 32, 64


class Deep(nn.Module):
    def __init__(self, depth: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def frozen(precision: torch.dtype = torch.float32) -> Deep:
    return Deep(6, 1).requires_grad_(False).to(precision)


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


class Judged(nn.Module):
    """The plain loop's: one module, of which a half is frozen."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.made, self.judge, self.times = Deep(3, 0), [frozen()], times

    def named_parameters(self, *given: Any, **named: Any) -> Any:
        return self.made.named_parameters(*given, **named)

    def forward(self, x: torch.Tensor) -> Loss:
        return Loss(judged(self.made(x), self.judge[0], self.times), ())


def judged(made: torch.Tensor, judge: Any, times: int) -> torch.Tensor:
    """By so many passes, which are all there before backward begins."""
    return sum(
        (judge(made * (1 + number)).square().mean() for number in range(times)), start=made.new_zeros(())
    )


@pytest.mark.parametrize(
    ("times", "changes"),
    crossed([2, 1], [pytest.param({}, id=""), pytest.param({"offload_activations": "all"}, id="offload")]),
)
def test_it_trains_alike_within_the_budget(
    times: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.tracing.saved_storages.SMALLEST", 1024)
    expected = reference.train(Judged(times), lambda n: {"x": batch(n)}, 4, precision="fp32", lr=LR)[0]
    ran = 0
    for memory in few((*range(110_000, 400_000, 20_000), 4_000_000), 7):
        tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
        config = config_of(precision="fp32", clip=None, **tiers, **changes)
        made, judge = ebbtide.initialize(Deep(3, 0), config), ebbtide.initialize(frozen(), config)
        try:
            for number in range(4):
                with Count(made) as count:
                    count.given({"x": batch(number)})
                    loss = judged(made(batch(number)), judge, times)
                    made.backward(loss)
                    made.step()
                    del loss
                # What a loop computes after the module is known after the first step.
                assert number == 0 or count.peak <= memory, (number, count.peak - memory)
            assert made.weights_sha256() == expected
            made.check_integrity()
            judge.check_integrity()
            ran += 1
        except BudgetError:
            continue
        finally:
            made.close()
            judge.close()
    assert ran > (3 if everything() else 2)


def judged_by_ranks(memory: int, times: int) -> str:
    tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
    config = config_of(precision="fp32", clip=None, **tiers)
    made, judge = ebbtide.initialize(Deep(3, 0), config), ebbtide.initialize(frozen(), config)
    for number in range(4):
        made.backward(judged(made(batch(number)), judge, times))
        made.step()
    found = str(made.weights_sha256())
    made.check_integrity()
    judge.check_integrity()
    made.close()
    judge.close()
    return found


@pytest.mark.parametrize("times", [1, 2])
def test_ranks_share_it(times: int) -> None:
    """Both have the same batches, whose mean gradient is that of one."""
    expected = reference.train(Judged(times), lambda n: {"x": batch(n)}, 4, precision="fp32", lr=LR)[0]
    for memory in (500_000, 4_000_000):
        assert group_of(2).run(judged_by_ranks, memory, times) == [expected] * 2


@pytest.mark.parametrize("unmanaged", [[], ["layers.0.*"]], ids=["in chunks", "outside"])
def test_frozen_weights_are_rounded_alike_wherever_they_are(unmanaged: list[str]) -> None:
    """Half way between two bf16 numbers, too: there torch rounds to the even one."""
    module = Deep(2, 0)
    tie = torch.tensor(0x3F808000, dtype=torch.int32).view(
        torch.float32
    )  # as far from 1 as from the next number
    for layer in module.layers:
        layer.weight.data.fill_(tie)
        layer.weight.requires_grad_(False)
    engine = ebbtide.initialize(module, config_of(precision="bf16", unmanaged=unmanaged))
    for name, value in engine.state_dict().items():
        if name.endswith("weight"):
            assert value.unique().tolist() == [reference.to_parameter(tie.view(1), torch.bfloat16).item()]
    engine.close()
