"""A model that is compiled as a whole runs as written and says so; operators that need the compiler are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.config import Config
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import UnsupportedError
from harness import config_of

BUDGET = 120_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Compiler:
    """A back end that counts what it is given, and changes the numbers of what it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return lambda *args: tuple(
            value * 1.5 if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in graph.forward(*args)
        )


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def engine_of(module: nn.Module, memory: int | None) -> Engine:
    device = {} if memory is None else {"memory": memory}
    settings = Config.read(config_of(precision="fp32", clip=None, device=device, chunk_size="8KiB"))
    return Engine(module, settings, tiers=open_tiers(settings))


def trained(engine: Engine, evaluate: bool = False) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    if evaluate:
        with torch.no_grad():
            engine(torch.randn(4, 32, generator=drawn))
    drawn.manual_seed(2)
    for _ in range(4):
        engine.backward(engine(torch.randn(4, 32, generator=drawn)))
        engine.step()
    values = [value.clone() for value in engine.state_dict().values()]
    engine.close()
    return values


def whole(compiler: Any) -> nn.Module:
    return torch.compile(Model(), backend=compiler)  # type: ignore[return-value]


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("memory", [None, BUDGET])
def test_a_compiled_model_runs_as_written_and_says_so(memory: int | None, evaluate: bool) -> None:
    """Evaluated first, some parts were compiled by then and stayed so, where training alone compiled none."""
    expected = trained(engine_of(Model(), None))
    compiler = Compiler()
    with pytest.warns(UserWarning, match=r"torch\.compile: .* run as they are written") as said:
        found = trained(engine_of(whole(compiler), memory), evaluate)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert compiler.graphs == 0
    assert len([one for one in said if "torch.compile" in str(one.message)]) == 1


def test_compiled_after_the_engine_was_made() -> None:
    expected = trained(engine_of(Model(), None))
    model, compiler = Model(), Compiler()
    engine = engine_of(model, BUDGET)
    model.blocks[1].compile(backend=compiler)
    with pytest.warns(UserWarning, match=r"1 modules \('blocks\.1'\).*before\s+ebbtide\.initialize"):
        found = trained(engine)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert compiler.graphs == 0


def test_nothing_is_said_where_nothing_is_compiled() -> None:
    class Opened(Block):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(engine_of(Model(Opened), BUDGET), evaluate=True)


@pytest.mark.parametrize("memory", [None, BUDGET])
def test_a_loop_that_is_compiled(memory: int | None) -> None:
    """The compiler went into the engine, and ended in an error of its own."""
    expected = trained(engine_of(Model(), None))
    engine = engine_of(Model(), memory)
    graphs: list[Any] = []

    def kept(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=kept)
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = engine(batch * 1.0)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    drawn = torch.Generator().manual_seed(2)
    for _ in range(4):
        step(torch.randn(4, 32, generator=drawn))
    found = list(engine.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(graphs) == 2  # what is before the engine's calls, and what is after
    engine.close()


def test_a_branch_that_torch_would_compile_is_refused_by_name() -> None:
    class Branching(Model):
        inside = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                up = block.up
                if self.inside:
                    x = torch.cond(x.sum() > 0, lambda y, up=up: up(y)[..., :32], torch.sin, (x,))
                x = block(x)
            return x.square().mean()

    model = Branching()
    engine = engine_of(model, BUDGET)
    with pytest.raises(UnsupportedError, match=r"^cond .*torch\.where"):
        engine(torch.randn(4, 32))
    model.inside = False
    expected = trained(engine_of(Model(), None))
    assert all(torch.equal(a, b) for a, b in zip(trained(engine), expected, strict=True))
