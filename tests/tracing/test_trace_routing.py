"""Mixtures of experts, imagined: an evenly loaded layer in closed form; and values that are known without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.models import find_model
from ebbtide.planner.record import FORWARD
from ebbtide.tracing.hooks import find_units
from ebbtide.tracing.symbolic.known_values import LIMIT
from ebbtide.tracing.symbolic.routing import EVEN, even_load, shares
from test_trace_families import BATCH, INNER, LENGTH, WIDTH, mixtral, switch

IMAGINES = True


def _meta(make: Any, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return make(**changes).train()


def _trace(module: nn.Module, length: int = LENGTH) -> ebbtide.Trace:
    ids = torch.empty(BATCH, length, dtype=torch.int64, device="meta")
    found = ebbtide.trace(module, {"input_ids": ids, "labels": ids}, torch.bfloat16)
    assert found.note == ""
    return found


def _expert_flops(module: nn.Module, found: ebbtide.Trace) -> int:
    """Forward multiplications of modules that are, or are in, a collection of experts."""
    units = {unit.index: unit.name for _, unit in find_units(module, list(module.parameters()))[2]}
    return sum(
        work.flops
        for moment in found.record.moments
        if moment.phase == FORWARD and ".experts" in units[moment.subject]
        for work in moment.work
    )


def _arrived_once(found: ebbtide.Trace) -> bool:
    return sorted(arrival.parameter for arrival in found.record.arrivals) == list(range(len(found.tensors)))


@pytest.mark.parametrize(("total", "experts"), [(12, 4), (30, 4), (3, 4), (0, 2), (1000, 7)])
def test_shares_are_even_and_complete(total: int, experts: int) -> None:
    rows = shares(total, experts)
    assert len(rows) == experts and sum(rows) == total and max(rows) - min(rows) <= 1


@pytest.mark.parametrize("length", [LENGTH, 15])
@pytest.mark.parametrize("experts", [4, 7])
def test_switch_multiplies_as_an_even_load(experts: int, length: int) -> None:
    module = _meta(switch, num_experts=experts)
    found = _trace(module, length)
    sparse_layers, matrices = 2, 2
    assert _expert_flops(module, found) == sparse_layers * 2 * BATCH * length * matrices * WIDTH * INNER
    assert _arrived_once(found)


def test_more_experts_than_tokens_all_get_gradients() -> None:
    module = _meta(switch, num_experts=2 * BATCH * 8)
    assert _arrived_once(_trace(module, 8))


def test_capacity_bounds_the_load() -> None:
    module = _meta(switch, expert_capacity=5)
    rows = 4 * 5 * BATCH
    assert _expert_flops(module, _trace(module)) == 2 * 2 * rows * 2 * WIDTH * INNER


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_mixtral_multiplies_as_an_even_load(implementation: str) -> None:
    module = _meta(mixtral, experts_implementation=implementation)
    found = _trace(module)
    layers, chosen, matrices = 2, 2, 3
    assert _expert_flops(module, found) == layers * chosen * 2 * BATCH * LENGTH * matrices * INNER * WIDTH
    assert _arrived_once(found)
    # All in all thrice forward: two products backward for each one.
    whole = [sum(w.flops for m in found.record.moments for w in m.work if w.kind == "matmul")]
    heads = 2 * BATCH * LENGTH * sum(p.numel() for n, p in module.named_parameters() if "experts" not in n)
    norms_and_embedding = sum(
        p.numel() for n, p in module.named_parameters() if "norm" in n or "embed_tokens" in n
    )
    heads -= 2 * BATCH * LENGTH * norms_and_embedding
    assert whole == [3 * (heads + _expert_flops(module, found))]


def test_nothing_stays_on_the_instances() -> None:
    for module in (_meta(switch), _meta(mixtral, experts_implementation="eager")):
        before = [set(vars(child)) for child in module.modules()]
        with even_load(module):
            assert any("forward" in vars(child) for child in module.modules())
        _trace(module)
        assert [set(vars(child)) for child in module.modules()] == before


class Doubled(nn.Module):
    """Routes by value, in a way that is nobody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[x.sum(-1) > 0])


class Inherited(Doubled): ...


def test_another_layer_is_added_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ebbtide.trace(Inherited(), torch.ones(6, 8)).note != ""
    monkeypatch.setitem(
        EVEN, "Doubled", lambda layer: iter([(layer, "forward", lambda x: layer.inner(x[: len(x) // 2]))])
    )
    found = ebbtide.trace(Inherited(), torch.ones(6, 8))
    assert found.note == "" and found.record.flops == 2 * (2 * 3 * 8 * 8)


def test_a_share_of_the_experts_computes_as_much_as_before() -> None:
    """Every rank sends its tokens to others and gets as many."""
    spec = find_model("t5:layers=4,hidden=64,heads=4,ffn=128,experts=16")
    flops = []
    for ranks in (1, 4):
        module = spec.share_of_experts(ranks).on_meta()
        found = ebbtide.trace(module, spec.example(4, 64), torch.bfloat16)
        assert found.note == "" and _arrived_once(found)
        flops.append(found.record.flops)
    assert flops[0] == flops[1]


# -- known values ----------------------------------------------------------------------------------


class Branching(nn.Module):
    """Does something else where it cannot look at what it knows."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.length).unsqueeze(0).expand(2, -1)
        if bool((positions.diff(dim=-1) == 1).all()):
            return self.inner(x).sum()
        return self.inner(self.inner(x)).sum()


def test_branches_on_numbers_go_as_they_would() -> None:
    found = ebbtide.trace(Branching(64), torch.ones(2, 8))
    assert found.note == "" and found.record.flops == 2 * (2 * 2 * 8 * 8)


def test_large_numbers_are_imagined() -> None:
    assert "DataDependent" in ebbtide.trace(Branching(LIMIT), torch.ones(2, 8)).note


class Writing(nn.Module):
    """Writes what depends on weights into what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        kept = torch.zeros(2, 8)
        kept[:, :4] = y[:, :4]
        return kept.sum()


def test_known_tensors_may_be_written_to() -> None:
    found = ebbtide.trace(Writing(), torch.ones(2, 8))
    assert found.note == "" and _arrived_once(found)
