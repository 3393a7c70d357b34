"""Tensors that share memory without being one: refused where that would matter. And values by name: all or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ebbtide
from ebbtide.errors import ConfigError, UnsupportedError
from harness import config_of


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))).float().square().mean()


def wrapped_again(model: Two) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data)


def by_data(model: Two) -> None:
    model.b.weight.data = model.a.weight.data


def overlapping(model: Two) -> None:
    flat = torch.randn(400)
    model.a.weight, model.b.weight = (nn.Parameter(flat[i : i + 256].view(16, 16)) for i in (0, 144))


def watched(model: Two) -> None:
    model.register_buffer("row", model.a.weight.detach()[3])


def engine_of(module: nn.Module, **changes: Any) -> ebbtide.Engine:
    return ebbtide.initialize(module, config_of(**{"precision": "fp32", "clip": None} | changes))


@pytest.mark.parametrize("share", [wrapped_again, by_data, overlapping, watched])
def test_what_shares_memory_with_a_trained_parameter_is_refused(share: Callable[[Two], None]) -> None:
    """They went ways of their own from the second step on."""
    model = Two()
    share(model)
    with pytest.raises(UnsupportedError, match=r"lie in the same memory and are not one parameter"):
        engine_of(model)
    before = model.a.weight.clone()
    model(torch.randn(2, 16)).backward()  # the module is as it was
    assert torch.equal(model.a.weight, before)


@pytest.mark.parametrize("share", [wrapped_again, by_data, overlapping, watched])
def test_what_is_converted_has_memory_of_its_own(share: Callable[[Two], None]) -> None:
    """As with `module.to(dtype)`, which plain PyTorch would begin with, too."""
    model = Two()
    share(model)
    engine = engine_of(model, precision="bf16")
    engine.backward(engine(torch.randn(2, 16, dtype=torch.bfloat16)))
    engine.step()
    engine.close()


def neighbours(model: Two) -> None:
    flat = torch.randn(512)
    model.a.weight, model.b.weight = (nn.Parameter(flat[i : i + 256].view(16, 16)) for i in (0, 256))


def frozen(model: Two) -> None:
    model.a.weight.requires_grad_(False)
    model.b.weight = nn.Parameter(model.a.weight.data, requires_grad=False)


def tied(model: Two) -> None:
    model.b.weight = model.a.weight


@pytest.mark.parametrize("share", [neighbours, frozen, tied])
def test_what_does_no_harm_is_not_refused(share: Callable[[Two], None]) -> None:
    model = Two()
    share(model)
    engine = engine_of(model)
    engine.backward(engine(torch.randn(2, 16)))
    engine.step()
    engine.close()


BAD: list[Any] = [
    torch.zeros(9),
    None,
    1.5,
    [0.0] * 16,
    torch.zeros(16, dtype=torch.complex64),
    torch.zeros(16, device="meta"),
    torch.zeros(16).to_sparse(),
]


@pytest.mark.parametrize("unmanaged", [(), ("b.*",)])
def test_values_by_name_are_written_all_or_not_at_all(unmanaged: tuple[str, ...]) -> None:
    engine = engine_of(Two(), unmanaged=unmanaged)
    before, hashed = engine.state_dict(), engine.weights_sha256()
    for value in BAD:
        refused = pytest.raises(ConfigError, match=r"b\.bias: expected .*nothing was written")
        with refused, engine.weights(write=True) as values:
            values["a.weight"].zero_()
            values["b.bias"] = value
        with pytest.raises(ConfigError, match=r"b\.bias: expected .*nothing was written"):
            engine.load_state_dict({**before, "a.weight": torch.zeros(16, 16), "b.bias": value})
        assert engine.weights_sha256() == hashed
    engine.close()


def test_frozen_parameters_in_double_precision_keep_it(tmp_path: Any) -> None:
    model = Two()
    exact = torch.randn(16, dtype=torch.float64)
    model.k = nn.Parameter(exact.clone(), requires_grad=False)
    engine = engine_of(model)
    engine.load_state_dict(engine.state_dict())
    with engine.weights("k", write=True):
        pass
    assert torch.equal(engine.state_dict()["k"], exact) and torch.equal(model.k, exact)
    engine.export(tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["k"], exact)
    engine.close()
