"""Parameters that the user writes between steps, each in a way of its own: the value counts, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ebbtide
from ebbtide.errors import StateError
from harness import config_of

WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def engine_of(**changes: Any) -> ebbtide.Engine:
    return ebbtide.initialize(
        Net(), config_of(**{"precision": "fp32", "chunk_size": "4KiB", "clip": None} | changes)
    )


def batch(engine: ebbtide.Engine, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype)


def step(engine: ebbtide.Engine, number: int) -> float:
    loss = engine(batch(engine, number))
    engine.backward(loss)
    engine.step()
    engine.check_integrity()
    return float(loss)


def in_place(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def by_vector(module: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()).detach() * 0.5, module.parameters())


BUDGETS: dict[str, dict[str, Any]] = {
    "everything fits": {},
    "bf16": {"precision": "bf16"},
    "separate master": {"precision": "bf16", "master": "separate"},
    "some is away": {"device": {"memory": 80_000}},
    "state on the host": {"device": {"memory": 80_000}, "placement": "host"},
    "in backward": {"updates": "in-backward"},
}


@pytest.mark.parametrize("budget", list(BUDGETS))
@pytest.mark.parametrize("write", [by_data, by_vector])
def test_memory_that_is_replaced_gives_its_values(write: Callable[[nn.Module], None], budget: str) -> None:
    found = []
    for way in (in_place, write):
        engine = engine_of(**BUDGETS[budget])
        try:
            step(engine, 0)
            step(engine, 1)
            with engine.resident():
                way(engine.module)
            with torch.no_grad():
                seen = float(engine(batch(engine, 5)))
            with engine.weights() as values:
                largest = max(float(value.abs().max()) for value in values.values())
            losses = [step(engine, number) for number in (2, 3)]
            found.append((seen, largest, losses, engine.weights_sha256()))
        finally:
            engine.close()
    assert found[0] == found[1]


MOMENTS = ("after backward", "by a hook", "within resident")


IN_PLACE: dict[str, dict[str, Any]] = {
    "everything fits": {},
    "bf16": {"precision": "bf16"},
    "separate master": {"precision": "bf16", "master": "separate"},
    "state on the host": {"placement": "static", "device": {"memory": 80_000}},
    "state on the host, bf16": {"placement": "static", "device": {"memory": 80_000}, "precision": "bf16"},
}
"""Parameters are on the device between backward and step, and gradients are not in their space."""


@pytest.mark.parametrize("budget", list(IN_PLACE))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_write_through_data_between_backward_and_step_counts(moment: str, budget: str) -> None:
    """The update wrote what PyTorch had not counted before anybody looked: the write was gone, or NaN."""

    def halved(engine: ebbtide.Engine, number: int, *, plainly: bool) -> None:
        net = engine.module
        assert isinstance(net, Net)

        def write(*_: Any) -> None:
            for parameter in net.layers[1].parameters():
                if plainly:
                    with torch.no_grad():
                        parameter.mul_(0.5)
                else:
                    parameter.data.mul_(0.5)

        for part in range(2):
            engine.backward(engine(batch(engine, 2 * number + part)))
        if moment == "by a hook":
            handle = engine.optimizer.register_step_pre_hook(write)
            engine.step()
            handle.remove()
        elif moment == "within resident":
            with engine.resident(write=True):
                write()
            engine.step()
        else:
            write()
            engine.step()
        engine.check_integrity()

    shas = []
    for plainly in (True, False):
        roomy = {"device": {"memory": "10MB"}, "host": {"memory": "10MB"}, "accumulate": 2}
        engine = engine_of(**roomy | IN_PLACE[budget])
        for number in range(4):
            halved(engine, number, plainly=plainly)
        shas.append(engine.weights_sha256())
        assert all(torch.isfinite(value).all() for value in engine.state_dict().values())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("write", [False, True])
def test_a_step_within_resident_is_no_write_of_the_users(precision: str, write: bool) -> None:
    """Gradients go where parameters are."""
    shas = []
    for within in (False, True):
        engine = engine_of(precision=precision, master="separate")
        for number in range(3):
            with engine.resident(write=write) if within else nullcontext():
                step(engine, number)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


NEXT: dict[str, Callable[[ebbtide.Engine], object]] = {
    "step": lambda engine: engine.step(),
    "forward": lambda engine: engine(batch(engine, 2)),
    "values": lambda engine: engine.weights("layers.1.weight").__enter__(),
}


@pytest.mark.parametrize("first", list(NEXT))
@pytest.mark.parametrize("how", ["in place", "through data"])
def test_a_write_where_gradients_are_is_refused_and_changes_nothing(how: str, first: str) -> None:
    """A step left the engine partially stepped, and what came before the step had the gradient halved in silence."""
    engine = engine_of(precision="bf16", master="separate")
    step(engine, 0)
    before = engine.weights_sha256()
    engine.backward(engine(batch(engine, 1)))
    assert engine._session.updates.sink.parameter_space.members
    with torch.no_grad():
        for parameter in engine.module.layers[1].parameters():  # type: ignore[union-attr, index]
            (parameter if how == "in place" else parameter.data).mul_(0.5)
    with pytest.raises(StateError, match="where gradients are: the write is lost, and so are the gradients"):
        NEXT[first](engine)
    assert engine.weights_sha256() == before
    with pytest.raises(StateError, match="without a backward"):
        engine.step()
    step(engine, 1)
    other = engine_of(precision="bf16", master="separate")
    for number in range(2):
        step(other, number)
    assert engine.weights_sha256() == other.weights_sha256()
    engine.close()
    other.close()


def test_a_step_after_memory_was_replaced_trains_the_chunk() -> None:
    """Nobody looks at values in between."""
    shas = []
    for way in (in_place, by_data):
        engine = engine_of()
        try:
            step(engine, 0)
            way(engine.module)
            step(engine, 1)
            shas.append(engine.weights_sha256())
        finally:
            engine.close()
    assert shas[0] == shas[1]


def away(engine: ebbtide.Engine) -> list[str]:
    return [n for n, p in engine.module.named_parameters() if p.dim() == 2 and p.stride() == (0, 0)]


@pytest.mark.parametrize("write", ["in place", "memory"])
def test_a_write_while_it_is_away_raises_at_once(write: str) -> None:
    engine = engine_of(device={"memory": 24_000})
    try:
        step(engine, 0)
        before = engine.weights_sha256()
        name = away(engine)[0]
        parameter = dict(engine.module.named_parameters())[name]
        with (
            pytest.raises(StateError, match=rf"{name} is away: .*engine\.weights\('{name}'\)"),
            torch.no_grad(),
        ):
            if write == "in place":
                parameter.zero_()
            else:
                parameter.data = torch.zeros(WIDTH, WIDTH)
        assert engine.weights_sha256() == before
        for other in away(engine):
            with pytest.raises(StateError, match=f"{other} is away"):
                dict(engine.module.named_parameters())[other].isnan()
        step(engine, 1)
        assert engine.weights_sha256() != before
    finally:
        engine.close()


def test_memory_of_another_shape_is_refused_by_name() -> None:
    engine = engine_of()
    try:
        step(engine, 0)
        before = engine.module.layers[1].weight.data
        engine.module.layers[1].weight.data = torch.zeros(WIDTH // 2, WIDTH)
        with pytest.raises(StateError, match=r"layers\.1\.weight was given memory of shape \(16, 32\)"):
            engine.weights_sha256()
        engine.module.layers[1].weight.data = before
        step(engine, 1)
    finally:
        engine.close()


@pytest.mark.parametrize("trained", [True, False])
def test_expanded_parameters_are_refused_by_name(trained: bool) -> None:
    model = Net()
    model.layers[0].weight = nn.Parameter(torch.randn(WIDTH, 1).expand(WIDTH, WIDTH), requires_grad=trained)
    with pytest.raises(ebbtide.errors.UnsupportedError, match=r"layers\.0\.weight is expanded"):
        ebbtide.initialize(model, config_of(precision="fp32", clip=None))


def added(module: Net) -> None:
    module.layers.append(nn.Linear(WIDTH, WIDTH))


def replaced(module: Net) -> None:
    module.layers[2].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def swapped(module: Net) -> None:
    module.layers[0], module.layers[1] = module.layers[1], module.layers[0]


def removed(module: Net) -> None:
    module.layers = module.layers[:4]


def tied(module: Net) -> None:
    module.layers[3].weight = module.layers[1].weight


CHANGED: list[tuple[Callable[[Net], None], str]] = [
    (added, r"another layers\.5\.weight .* there was none of that name"),
    (replaced, r"another layers\.2\.weight .* it was put in its place since"),
    (swapped, r"another layers\.0\.weight .* it was layers\.1\.weight then"),
    (removed, r"no longer has layers\.4\.weight"),
    (tied, r"no longer has layers\.3\.weight"),
]


@pytest.mark.parametrize(("change", "said"), CHANGED)
def test_a_module_that_is_another_since_is_refused(
    change: Callable[[Net], None], said: str, tmp_path: Path
) -> None:
    engine = engine_of()
    try:
        step(engine, 0)
        engine.save(tmp_path / "before")
        before = list(engine.module.layers)
        weights, sha = [layer.weight for layer in before], engine.weights_sha256()
        change(engine.module)
        reads: list[Callable[[], Any]] = [
            engine.weights_sha256,
            engine.state_dict,
            lambda: engine.weights().__enter__(),
            lambda: engine.save(tmp_path / "after"),
            lambda: engine.load(tmp_path / "before"),
            lambda: engine.export(tmp_path / "exported"),
        ]
        for read in reads:
            with pytest.raises(StateError, match=said):
                read()
        assert not (tmp_path / "after").exists() and not (tmp_path / "exported").exists()
        for layer, weight in zip(before, weights, strict=True):
            layer.weight = weight
        engine.module.layers = nn.ModuleList(before)
        assert engine.weights_sha256() == sha
        engine.load(tmp_path / "before")
        step(engine, 1)
    finally:
        engine.close()


class Listing(Net):
    """Reads weights past their modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(p.float().square().sum() for p in self.parameters())


def test_parameters_that_are_read_past_their_modules_are_no_silent_numbers() -> None:
    engine = ebbtide.initialize(
        Listing(), config_of(precision="fp32", chunk_size="4KiB", clip=None, device={"memory": 50_000})
    )
    try:
        before = engine.weights_sha256()
        with pytest.raises(StateError, match="is away: float needs its values"):
            engine(batch(engine, 0))
        assert engine.weights_sha256() == before
    finally:
        engine.close()
