"""Loops and models that are not made like the zoo's: each trains to the bits of the plain loop, or is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import ebbtide
import reference
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import BudgetError, ConfigError, StateError, UnsupportedError
from harness import LR, config_of
from sampling import crossed
from zoo import Loss

WIDTH = 64
PLACES = {
    "resident": {},
    "tight": {"device": {"memory": 420_000}},
    "tight-separate": {"device": {"memory": 420_000}, "master": "separate"},
    "host-state": {"device": {"memory": 700_000}, "placement": "host"},
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PLACES[request.param]


def batch(number: int, rows: int = 8) -> dict[str, torch.Tensor]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
    return {"x": x.bfloat16()}


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def plain(kind: Callable[[], nn.Module], steps: int, **changes: Any) -> str:
    accumulate = changes.pop("accumulate", 1)
    batch_of = changes.pop("batch_of", batch)
    model = build(kind)
    return reference.train(model, batch_of, steps, lr=LR, clip=1.0, accumulate=accumulate)[0]


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(kind: Callable[[], nn.Module], **changes: Any) -> Engine:
        config = ebbtide.Config.read(config_of(chunk_size="16KiB", **changes))
        engines.append(Engine(build(kind), config, tiers=open_tiers(config)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.check_integrity()
        engine.close()


def train(engine: Engine, steps: int, batch_of: Callable[[int], dict[str, Any]] = batch) -> str:
    for number in range(steps):
        engine.backward(engine(**batch_of(number)).loss)
        engine.step()
    return engine.weights_sha256()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Loss:
        for layer in self.layers:
            x = x + torch.tanh(self.block(layer, x))
        return Loss(self.norm(x).float().pow(2).mean() + x.float().mean(), ())

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


class Twice(Net):
    """Each layer is called twice, and reads its neighbour's weight."""

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(torch.relu(layer(x))) + nn.functional.linear(x, self.layers[0].weight)


class Borrowed(Net):
    """A checkpointed function reads the weights of modules that it does not call."""

    reentrant = False

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(layer(x), self.layers[-1].weight.t(), self.layers[1].bias)

        if not self.reentrant or x.requires_grad:
            return checkpoint(body, x, use_reentrant=self.reentrant)
        return body(x)


class BorrowedReentrant(Borrowed):
    reentrant = True


class Counted(Net):
    """A checkpointed region that writes a buffer, which plain PyTorch does twice, and saves nothing but a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.fixed = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in self.layers)
        for parameter in self.fixed.parameters():
            parameter.data = parameter.bfloat16().float()  # it has no master

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        fixed = self.fixed[list(self.layers).index(layer)]

        def body(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.seen.mul_(0.5).add_(x.mean(0))
            return fixed(x - self.seen)

        return layer(checkpoint(body, x, use_reentrant=False))


class SharedGradients(Net):
    """Sums of parameters: autograd hands several of them one gradient, also as views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.c = nn.Parameter(torch.randn(WIDTH * WIDTH) / 8)
        self.d = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 8)

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) @ (self.a + self.b + self.c.view(WIDTH, WIDTH) + self.d)


class Normed(nn.Module):
    """Buffers that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, 128),
            nn.BatchNorm1d(128),
            nn.Linear(128, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> Loss:
        return Loss(self.down(self.norm(self.up(x))).float().pow(2).mean(), ())


class Negative(torch.autograd.Function):
    """Its gradient is a tensor whose numbers are those in memory with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(gradient.neg().contiguous())


class Negated(Net):
    """And a parameter without elements, which has a gradient all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, Negative.apply(layer.weight), layer.bias) + self.nothing.sum()


KINDS = [Net, Twice, Borrowed, BorrowedReentrant, Counted, SharedGradients, Normed, Negated]


@pytest.mark.parametrize(("kind", "accumulate"), crossed(KINDS, [1, 2]))
def test_odd_models_train_alike(
    make: Any, kind: type[nn.Module], place: dict[str, Any], accumulate: int
) -> None:
    expected = plain(kind, 4, accumulate=accumulate)
    engine = make(kind, accumulate=accumulate, **place)
    assert train(engine, 4 * accumulate) == expected
    assert (sum(engine.stats()["moved_bytes"].values()) > 0) == bool(place) or kind is Normed


class Shallow(Net):
    """Stochastic depth: a layer is left out by chance."""

    chance: Callable[[], float] = staticmethod(random.random)

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if self.chance() < 0.5 else layer(x)


class ShallowByNumpy(Shallow):
    chance = staticmethod(np.random.random)


class ShallowByItsOwn(Shallow):
    """By generators that the model has to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if self.python.random() + self.numpy.random() < 1.0 else layer(x)


@pytest.mark.parametrize("kind", [Shallow, ShallowByNumpy, ShallowByItsOwn])
def test_chance_is_the_plain_loops(make: Any, kind: type[nn.Module], place: dict[str, Any]) -> None:
    """Where there is a plan to be made, too: a pass that is only imagined leaves no trace in what is drawn after it."""

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)

    seed()
    expected = plain(kind, 6)
    engine = make(kind, **place)
    seed()
    assert train(engine, 6) == expected


def test_buffers_are_the_plain_loops(make: Any, place: dict[str, Any]) -> None:
    model = build(Normed)
    reference.train(model, batch, 3, lr=LR, clip=1.0)
    engine = make(Normed, **place)
    train(engine, 3)
    state = engine.state_dict()
    for name, buffer in model.named_buffers():
        assert torch.equal(state[name].to(buffer.dtype), buffer), name


def test_gradients_are_read_wherever_they_are_kept(make: Any, place: dict[str, Any]) -> None:
    model = build(SharedGradients).bfloat16()
    engine = make(SharedGradients, **place)
    for number in range(3):
        model.zero_grad()
        model(**batch(number)).loss.backward()
        engine.backward(engine(**batch(number)).loss)
        if number == 0:
            with engine.gradients() as found:
                assert set(found) == {name for name, _ in model.named_parameters()}
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    assert torch.equal(found[name], parameter.grad.float()), name
        engine.step()


@pytest.mark.parametrize("master", ["split", "separate"])
def test_parameters_are_real_between_backward_and_step(make: Any, master: str) -> None:
    """Gradients may have taken their space; a look at them gives the values, and changes no number."""
    engine = make(Net, master=master, device={"memory": 420_000})
    for number in range(4):
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.backward(engine(**batch(number)).loss)
        if number % 2:
            for name, value in engine.module.state_dict().items():
                assert torch.equal(value, before[name]), name
        engine.step()
    assert engine.weights_sha256() == plain(Net, 4)


class Idle(Net):
    """Passes in which nothing of the model runs, and whose loss leads to something else."""

    def forward(self, x: torch.Tensor) -> Loss:
        return Loss(x.float().square().mean(), ())


@pytest.mark.parametrize("updates", ["exact", "in-backward", "lock-free"])
def test_a_pass_in_which_nothing_runs(make: Any, place: dict[str, Any], updates: str) -> None:
    engine = make(Idle, updates=updates, clip=None, **place)
    before = engine.weights_sha256()
    for number in range(3):
        x = batch(number)["x"].requires_grad_()
        engine.backward(engine(x).loss)
        assert x.grad is not None
        with pytest.raises(StateError, match="brought no gradient to a parameter"):
            engine.step()
    assert engine.weights_sha256() == before


class Interrupted(Net):
    at: tuple[int, type[BaseException]] | None = None

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.at is not None and layer is self.layers[self.at[0]] and not isinstance(x, FakeTensor):
            _, error = self.at
            self.at = None
            raise error
        return layer(x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupts_leave_the_engine_usable(make: Any, place: dict[str, Any], error: Any) -> None:
    engine = make(Interrupted, **place)
    expected = plain(Net, 4)
    for number in range(4):
        engine.module.at = (number, error)
        with pytest.raises(error):
            engine(**batch(number))
        engine.check_integrity()
        engine.backward(engine(**batch(number)).loss)
        engine.step()
    assert engine.weights_sha256() == expected


def test_a_forward_that_is_dropped(make: Any, place: dict[str, Any]) -> None:
    engine = make(Net, **place)
    for number in range(4):
        engine(**batch(100 + number))
        engine.backward(engine(**batch(number)).loss)
        engine.step()
    assert engine.weights_sha256() == plain(Net, 4)


class Two(Net):
    """The sum of two batches' losses."""

    def forward(self, x: torch.Tensor) -> Loss:
        first, second = x.chunk(2)
        return Loss(super().forward(first).loss + super().forward(second).loss, ())


def test_two_forward_passes_and_one_backward(make: Any, place: dict[str, Any]) -> None:
    engine = make(Net, **place)
    for number in range(4):
        first, second = batch(number)["x"].chunk(2)
        engine.backward(engine(x=first).loss + engine(x=second).loss)
        engine.step()
    assert engine.weights_sha256() == plain(Two, 4)


def test_shapes_change_and_evaluation_runs_between_micro_batches(make: Any, place: dict[str, Any]) -> None:
    def uneven(number: int) -> dict[str, torch.Tensor]:
        return batch(number, 4 + 3 * (number % 3))

    engine = make(Net, accumulate=3, **place)
    for number in range(12):
        engine.backward(engine(**uneven(number)).loss)
        with torch.no_grad():
            engine(**batch(77, 5))
        engine.step()
    assert engine.weights_sha256() == plain(Net, 4, accumulate=3, batch_of=uneven)


def test_training_while_resident(make: Any) -> None:
    engine = make(Net, device={"memory": 900_000}, placement="host")
    train(engine, 2)
    with engine.resident():
        for number in (2, 3):
            engine.backward(engine(**batch(number)).loss)
            engine.step()
    assert engine.weights_sha256() == plain(Net, 4)


class Compiled(Net):
    """Each layer is compiled; the backend runs the traced graph with eager operators, so bits can be compared."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="aot_eager")


def test_compiled_modules(make: Any) -> None:
    engine = make(Compiled, **PLACES["tight"])
    assert train(engine, 4) == plain(Net, 4)
    assert engine.stats()["moved_bytes"]["host_to_device"] > 0


def test_graph_capture_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(Net)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        engine(**batch(0))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_forgotten_engine_gives_its_memory_back(place: dict[str, Any], steps: int) -> None:
    config = ebbtide.Config.read(config_of(chunk_size="16KiB", **place))
    tiers = open_tiers(config)
    engine = Engine(build(SharedGradients), config, tiers=tiers)
    train(engine, steps)
    engine.backward(engine(**batch(steps)).loss)
    del engine
    gc.collect()
    assert set(tiers.ledger.reserved.values()) == {0}
    assert not any(tiers.backend.held().values())
    tiers.ledger.check()


def test_a_closed_engine_is_refused(make: Any, place: dict[str, Any]) -> None:
    engine = make(Net, **place)
    engine.backward(engine(**batch(0)).loss)
    engine.close()
    assert set(engine._tiers.ledger.reserved.values()) == {0}
    engine.close()
    for use in (lambda: engine(**batch(0)), engine.step, engine.state_dict, engine.weights_sha256):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_managed_module_is_not_converted_nor_managed_twice(make: Any) -> None:
    engine = make(Net)
    module = engine.module
    assert module.to("cpu") is module and module.bfloat16() is module
    for convert in (module.half, module.double, lambda: module.to(torch.float32)):
        with pytest.raises(UnsupportedError, match="cannot be converted"):
            convert()
    with pytest.raises(ConfigError, match="managed by another engine"):
        ebbtide.initialize(module, config_of())
    with pytest.raises(ConfigError, match="managed by another engine"):
        ebbtide.initialize(nn.Sequential(module, nn.Linear(2, 2)), config_of())
    assert train(engine, 2) == plain(Net, 2)
    engine.close()
    for use in (lambda: module(**batch(0)), module.state_dict, next(iter(module.children())).state_dict):
        with pytest.raises(StateError, match="engine that is closed"):
            use()
    with pytest.raises(ConfigError, match="engine that is closed"):
        ebbtide.initialize(module, config_of())


@pytest.mark.parametrize(
    "changes, groups, match",
    [
        ({}, [{"params": [nn.Parameter(torch.ones(2))]}], "not the module's"),
        ({}, [{"params": [], "lrr": 1}], "lrr"),
        ({"device": {"memory": 10_000}}, None, "does not fit|largest chunk"),
        ({"unmanaged": ["no.such.*"]}, None, "matches no parameter"),
    ],
)
def test_a_refused_start_leaves_the_module_as_it_was(
    changes: dict[str, Any], groups: Any, match: str
) -> None:
    module = build(Net)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loss = module(torch.ones(2, WIDTH)).loss
    with pytest.raises((ConfigError, BudgetError), match=match):
        ebbtide.initialize(module, config_of(**changes), groups)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(module(torch.ones(2, WIDTH)).loss, loss)
    engine = ebbtide.initialize(module, config_of())
    engine.close()


def test_writing_an_unknown_name_writes_nothing(make: Any) -> None:
    engine = make(Net)
    before = engine.weights_sha256()
    with pytest.raises(ConfigError, match="no parameter"), engine.weights("norm.weight", write=True) as found:
        found["norm.weight"].zero_()
        found["norm.wait"] = torch.ones(WIDTH)
    assert engine.weights_sha256() == before


def test_budgets_beyond_the_machine_are_refused() -> None:
    for tier in ("device", "host"):
        config = ebbtide.Config.read(config_of(**{tier: {"memory": "90000TB"}}))
        with pytest.raises(ConfigError, match=f"{tier}.memory: .* this machine has"):
            open_tiers(config)


def test_a_guessed_level_is_not_reported_as_use(make: Any) -> None:
    engine = make(Net, device={"memory": "1GB"}, host={"memory": "1MB"})
    train(engine, 3)
    assert engine.stats()["peak_bytes"]["device"] < 2_000_000
