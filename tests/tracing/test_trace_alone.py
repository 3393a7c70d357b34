"""`ebbtide.trace`: an iteration imagined without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import zoo
from ebbtide.errors import ConfigError
from sampling import crossed
from test_trace import records

IMAGINES = True


def _meta(name: str, mode: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name, mode)


@pytest.mark.parametrize(("name", "mode"), crossed(zoo.ZOO, ["none", "non-reentrant", "reentrant"]))
def test_it_is_what_the_engine_imagines(name: str, mode: str) -> None:
    """From a module on the meta device, whose values nobody knows."""
    imagined, [*_, live] = records(name, mode, device={"memory": "2MB"})
    assert imagined is not None
    batch = zoo.cast(zoo.ZOO[name].batch(0), torch.bfloat16)
    meta = {key: value.to("meta") for key, value in batch.items()}
    for module, example in ((zoo.build(name, mode), batch), (_meta(name, mode), meta)):
        found = ebbtide.trace(module, example, torch.bfloat16)
        assert [m.event for m in found.record.moments] == [m.event for m in imagined.moments]
        assert found.record.accesses == imagined.accesses
        assert found.record.arrivals == imagined.arrivals
        assert found.record.peak == pytest.approx(live.peak, rel=0.02, abs=2 << 20)
        assert [t.name for t in found.tensors] == [n for n, _ in module.named_parameters()]
        assert sorted(p for run in found.runs for p in run) == list(range(len(found.tensors)))


def test_nothing_stays_behind() -> None:
    module = zoo.build("gpt2")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = zoo.ZOO["gpt2"].batch(0)
    expected = module(**batch).loss
    ebbtide.trace(module, batch)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in module.parameters())
    assert type(module.transformer._parameters) is dict
    assert torch.equal(module(**batch).loss, expected)
    module(**batch).loss.backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("example", [torch.ones(2, 8), (torch.ones(2, 8),), {"input": torch.ones(2, 8)}])
def test_examples_of_all_kinds(example: Any) -> None:
    found = ebbtide.trace(nn.Linear(8, 4), example)
    assert found.record.flops == 2 * 2 * 2 * 8 * 4  # forward, and the weight's gradient
    assert found.trained == (True, True) and found.runs == ((0, 1),)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        ebbtide.trace(nn.ReLU(), torch.ones(2))
