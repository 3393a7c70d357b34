"""What a module gets that no pass can be imagined of: an estimate that a plan can be made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import zoo
from ebbtide.errors import ConfigError
from ebbtide.layout import ITEMSIZE, build_layout
from ebbtide.planner.placement import ModelShape, Settings, make_plan
from ebbtide.planner.record import BACKWARD, FORWARD, GRADIENT, Record
from ebbtide.tracing import standalone
from sampling import crossed

IMAGINES = True


class ByValue(nn.Module):
    """Control flow that depends on data; a shared matrix; a frozen one; experts."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.first = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.first.weight
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.still = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(input_ids))
        if x.sum() > 0:
            x = self.again(x)
        x = self.experts[int(x.abs().sum()) % 4](self.still(x))
        return self.head(x).float().logsumexp(-1).sum()


def _shape(found: ebbtide.Trace) -> ModelShape:
    layout = build_layout(found.tensors, chunk_size=4096)
    parameters = [layout.spans[tensor.name].chunk for tensor in found.tensors]
    sizes = tuple(chunk.size * ITEMSIZE[chunk.dtype] for chunk in layout.chunks)
    return ModelShape(
        tuple(tuple(sorted({parameters[p] for p in run})) for run in found.runs),
        tuple(parameters),
        sizes,
        sizes,
        tuple(6 * size for size in sizes),
    )


def check_structure(found: ebbtide.Trace) -> None:
    """What every record keeps, and a plan from it at a budget that makes chunks move."""
    record: Record = found.record
    count = len(record.moments)
    keys = [(access.first, access.run) for access in record.accesses]
    assert keys == sorted(keys)
    assert all(0 <= a.first <= a.last < count and a.phase in (FORWARD, BACKWARD) for a in record.accesses)
    trained = [index for index, wanted in enumerate(found.trained) if wanted]
    assert sorted(arrival.parameter for arrival in record.arrivals) == trained
    for arrival in record.arrivals:
        moment = record.moments[arrival.moment]
        assert (moment.phase, moment.subject) == (GRADIENT, arrival.parameter)
    assert all(moment.peak >= record.fixed for moment in record.moments)
    shape = _shape(found)
    everything = record.peak + sum(shape.parameter_bytes) * 9
    for device in (everything, record.peak + sum(shape.parameter_bytes) * 2):
        assert make_plan(shape, record, Settings(device, everything)).record is record


def test_control_flow_by_value_gets_an_estimate() -> None:
    module = ByValue()
    ids = torch.zeros(4, 32, dtype=torch.int64)
    found = ebbtide.trace(module, ids, torch.bfloat16)
    assert found.record.source == "estimated"
    assert found.note.startswith("an estimate by layer type") and "DataDependent" in found.note
    check_structure(found)
    tokens, width = 128, 64
    matrices = 2 * width * width + width * width + 256 * width  # first, again; still; head
    assert found.record.flops == 6 * tokens * (
        matrices + width * width
    )  # every expert a quarter of the tokens
    assert all(p.grad is None and type(p) is nn.Parameter for p in module.parameters())
    assert float(module(ids)) != 0  # it is as it was


@pytest.mark.parametrize(("name", "mode"), crossed(zoo.ZOO, ["none", "non-reentrant"]))
def test_the_estimate_is_near_the_trace(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = zoo.build(name, mode), zoo.cast(zoo.ZOO[name].batch(0), torch.bfloat16)
    traced = ebbtide.trace(module, batch, torch.bfloat16)

    def refuse(*_: Any, **__: Any) -> Record:
        raise RuntimeError("no fake kernel\nfor this")

    monkeypatch.setattr(standalone, "trace_symbolically", refuse)
    found = ebbtide.trace(module, batch, torch.bfloat16)
    assert found.note.endswith("RuntimeError: no fake kernel")
    check_structure(found)
    assert 0.5 < found.record.flops / traced.record.flops < 1.5
    assert 0.5 < found.record.peak / traced.record.peak < 2
    assert found.record.fixed == traced.record.fixed


@pytest.mark.parametrize(
    ("build", "example"),
    [
        (lambda: nn.Linear(4, 4), torch.ones(2, 4)),
        (lambda: nn.Linear(4, 4).requires_grad_(False), torch.ones(4)),
        (lambda: nn.Sequential(nn.Conv1d(3, 8, 5, stride=2), nn.BatchNorm1d(8)), torch.ones(2, 3, 64)),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8)), torch.ones(2, 3, 32, 32)),
        (lambda: nn.LSTM(8, 16, 2), torch.ones(5, 2, 8)),
        (lambda: nn.TransformerEncoderLayer(16, 2), torch.ones(5, 2, 16)),
        (lambda: nn.Linear(4, 4), {"input": torch.tensor(1.0)}),
    ],
)
def test_any_module_has_one(
    build: Callable[[], nn.Module], example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(standalone, "trace_symbolically")
    found = ebbtide.trace(build(), example)
    assert "NameError" in found.note and found.record.moments
    check_structure(found)


def test_what_forward_cannot_be_called_with_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"does not fit the module's forward.*labels"):
        ebbtide.trace(ByValue(), {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.ones(1)})
