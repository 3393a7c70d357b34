"""Deep models are foreseen from shallow ones, number by number, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ebbtide.forecasting.deep_models import SHALLOW, foresee, layers_alike
from ebbtide.forecasting.forecaster import Forecaster, Workload
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.models import ModelSpec, find_model
from ebbtide.models.spec import spec_of
from ebbtide.planner.record import Record
from ebbtide.tracing.standalone import Trace
from sampling import crossed

MACHINE = Machine.read("a100-node").with_devices(8)
DEEP = 9

NAMES = ("gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "vit-tiny")
WORK = {
    "plain": Workload(2, 32),
    "checkpointed": Workload(2, 32, checkpoint_activations=True),
    "sent away": Workload(2, 32, offload_activations=True),
    "both": Workload(2, 32, checkpoint_activations=True, offload_activations=True),
}


def unhurried(record: Record) -> Record:
    """Without the seconds that tracing took."""
    return replace(record, moments=tuple(replace(m, host_seconds=0.0) for m in record.moments))


def shallow(spec: ModelSpec, work: Workload) -> list[Trace]:
    forecaster = Forecaster(spec)
    return [forecaster.see(work, MACHINE, layers).trace for layers in SHALLOW]


@pytest.mark.parametrize(("name", "kind"), crossed(NAMES, WORK))
def test_it_is_the_trace_of_the_deep_model(name: str, kind: str) -> None:
    spec, work = find_model(name), WORK[kind]
    real = Forecaster(spec).see(work, MACHINE, DEEP).trace
    found = foresee(shallow(spec, work), DEEP)
    assert found == replace(real, record=unhurried(real.record))


def alternating(step: int) -> ModelSpec:
    """A Gemma: each so manieth layer attends to everything, the others to a window."""
    fields = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 14,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 300,
        "sliding_window": 8,
        "layer_types": [
            "full_attention" if place % step == step - 1 else "sliding_attention" for place in range(14)
        ],
    }
    return spec_of("gemma", fields)


def test_a_model_of_two_kinds_of_layers_is_traced_whole() -> None:
    """Its first five are of one kind."""
    spec, work = alternating(7), Workload(1, 32)
    assert foresee(shallow(spec, work), 14) is not None
    assert not layers_alike(spec.on_meta(), spec.config, 14)
    found = Forecaster(spec).see(work, MACHINE).trace
    assert any(moment.host_seconds for moment in found.record.moments)


def test_layers_of_two_kinds_in_turn_tell_nothing() -> None:
    work = Workload(1, 32)
    wide, narrow = (
        shallow(find_model("gpt2-tiny"), work),
        shallow(find_model("gpt:layers=6,hidden=512"), work),
    )
    assert foresee([wide[0], narrow[1], wide[2]], DEEP) is None
    assert foresee([wide[0], wide[2], wide[1]], DEEP) is None


@pytest.mark.parametrize("change", ["width", "setting", "kind", "depth"])
def test_a_layer_that_is_made_otherwise_is_seen(change: str) -> None:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(6))
        assert layers_alike(nn.Sequential(layers), object.__new__(type("C", (), {})), 6)
        other = {
            "width": nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1)),
            "setting": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)),
            "kind": nn.Sequential(nn.Linear(4, 4), nn.Dropout2d(0.1)),
            "depth": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.ReLU()),
        }
        layers[4] = other[change]
    assert not layers_alike(nn.Sequential(layers), object.__new__(type("C", (), {})), 6)
