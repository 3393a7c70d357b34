"""Gradients of weights that several modules use: autograd's sum of their parts takes no memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.planner.record import Record
from ebbtide.tracing.hooks.gradient_sums import own_parts
from ebbtide.tracing.meter import StorageMeter
from harness import config_of

ROWS, WIDTH = 4096, 64
TABLE = ROWS * WIDTH * 2


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.embed(tokens).tanh()).float().logsumexp(-1).mean()}


def drawn() -> torch.Tensor:
    return torch.randint(ROWS, (1, 4), generator=torch.Generator().manual_seed(1))


def backward(model: Tied, owned: bool, hook: Any = None) -> int:
    """Leaves the gradient in the weight; the address of the head's part."""
    hidden = model.embed(drawn())
    out = model.head(hidden.tanh())
    if owned:
        own_parts([out], [model.embed.weight])
    transposed = out.grad_fn.next_functions[0][0].next_functions[1][0]
    found = []
    transposed.register_hook(lambda parts, _: found.append(parts[0].data_ptr()))
    if hook is not None:
        model.embed.weight.register_hook(hook)
    loss = out.float().logsumexp(-1).mean()
    del out, hidden, transposed
    loss.backward()
    return int(found[0])


def test_autograd_adds_to_a_part_that_is_its_own() -> None:
    model = Tied(torch.bfloat16)
    gradients = []
    for owned in (False, True):
        part = backward(model, owned)
        gradient = model.embed.weight.grad
        assert gradient is not None and (gradient.data_ptr() == part) == owned
        gradients.append(gradient)
        model.embed.weight.grad = None
    assert torch.equal(*gradients)


def test_a_pass_that_is_traced_adds_there_too() -> None:
    model = Tied(torch.bfloat16)
    weight = model.embed.weight.untyped_storage()._cdata
    meter = StorageMeter(lambda storage: storage == weight)
    with meter:
        part = backward(model, owned=True)
    gradient = model.embed.weight.grad
    assert gradient is not None and gradient.data_ptr() == part
    assert 2 * TABLE <= meter.take_peak() < 2.5 * TABLE


def test_what_a_hook_of_the_users_adds_is_no_part() -> None:
    seen: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return gradient + 1

    model = Tied(torch.bfloat16)
    with StorageMeter(lambda storage: False):
        backward(model, owned=True, hook=hook)
    gradient = model.embed.weight.grad
    assert gradient is not None and torch.equal(gradient, seen[0] + 1)


def test_plans_count_two_tensors_for_the_sum() -> None:
    torch.manual_seed(0)
    engine = ebbtide.initialize(Tied(), config_of(device={"memory": 30 * TABLE}))
    records: list[Record] = []
    for _ in range(3):
        loss = engine(drawn())["loss"]
        engine.backward(loss)
        engine.step()
        assert engine._session.cursor.plan is not None
        records.append(engine._session.cursor.plan.record)
    engine.close()
    assert records[0].source == "symbolic"
    assert all(2 * TABLE <= record.peak < 2.5 * TABLE for record in records)


@pytest.mark.parametrize("graph", [False, True])
def test_a_graph_of_the_gradient_stays_whole(graph: bool) -> None:
    model = Tied()
    out = model.head(model.embed(drawn()).tanh())
    own_parts([out], [model.embed.weight])
    [gradient] = torch.autograd.grad(out.logsumexp(-1).mean(), [model.embed.weight], create_graph=graph)
    assert gradient.requires_grad == graph
    if graph:
        [again] = torch.autograd.grad(gradient.square().sum(), [model.embed.weight])
        assert again.abs().sum() > 0
