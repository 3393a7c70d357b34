"""Blocks under torch.compile: compiled as often as in plain PyTorch, the same bits wherever their chunks are.

Most tests use a back end that needs no C++ compiler, and changes numbers: what ran compiled shows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.planner.record import BACKWARD
from group import group_of
from harness import config_of

LEAST = 100_300
"""Bytes of the device in which the model trains."""
PLACES = [None, 140_000, LEAST]


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.recompute: bool | None = None
        """None: nothing; else whether reentrantly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x.square().mean()


class Compiler:
    """Counts the graphs that it is given, and makes products of theirs twice as large."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.graphs += 1
        for node in graph.graph.nodes:
            if node.target is torch._C._nn.gelu:
                with graph.graph.inserting_after(node):
                    doubled = graph.graph.call_function(torch.mul, (node, 2.0))
                node.replace_all_uses_with(doubled, delete_user_cb=lambda user, new=doubled: user is not new)
        graph.recompile()
        return aot_eager(graph, example)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_place(model: Model, compiler: Any) -> None:
    for block in model.blocks:
        block.compile(backend=compiler)


def wrapped(model: Model, compiler: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=compiler)  # type: ignore[assignment]


def by_method(model: Model, compiler: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=compiler)  # type: ignore[method-assign]


def batches(count: int, seed: int = 2) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 32, generator=drawn) for _ in range(count)]


def engine_of(model: nn.Module, memory: int | None = None, **changes: Any) -> ebbtide.Engine:
    changes = {"precision": "fp32", "clip": None, "chunk_size": "8KiB"} | changes
    if changes.get("layout") == "tensor":
        del changes["chunk_size"]
    device = {} if memory is None else {"memory": memory}
    return ebbtide.initialize(model, config_of(device=device, **changes))


def trained(engine: ebbtide.Engine, steps: int = 5, evaluate: bool = False) -> str:
    try:
        for batch in batches(steps * engine.config.accumulate):
            if evaluate:
                with torch.no_grad():
                    engine(batch)
            engine.backward(engine(batch))
            engine.step()
            engine.check_integrity()
        stats = engine.stats()
        assert not stats["diverged"]
        assert stats["peak_bytes"]["device"] <= (stats["budget_bytes"]["device"] or 1 << 60)
        return engine.weights_sha256()
    finally:
        engine.close()


def plain_graphs(compiled: Callable[[Model, Any], None]) -> int:
    """How often plain PyTorch compiles."""
    model, compiler = Model(), Compiler()
    compiled(model, compiler)
    for batch in batches(3):
        model(batch).backward()
    torch._dynamo.reset()
    return compiler.graphs


@pytest.mark.parametrize("compiled", [in_place, wrapped, by_method])
def test_one_hash_and_as_many_graphs_as_plain(compiled: Callable[[Model, Any], None]) -> None:
    graphs = plain_graphs(compiled)
    as_written = trained(engine_of(Model()))
    found = set()
    for memory in PLACES:
        model, compiler = Model(), Compiler()
        compiled(model, compiler)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.add(trained(engine_of(model, memory)))
        assert not [one for one in said if "torch.compile" in str(one.message)]
        assert compiler.graphs == graphs
        torch._dynamo.reset()
    assert len(found) == 1 and as_written not in found


@pytest.mark.parametrize("memory", PLACES)
def test_gradients_are_those_of_plain_compiled_blocks(memory: int | None) -> None:
    plain, model, compiler = Model(), Model(), Compiler()
    in_place(plain, compiler)
    in_place(model, compiler)
    batch = batches(1)[0]
    plain(batch).backward()
    engine = engine_of(model, memory)
    engine.backward(engine(batch))
    with engine.gradients() as found:
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None and torch.equal(found[name], parameter.grad)
    engine.close()


WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "clipping": {"clip": 0.01},
    "separate": {"precision": "bf16", "master": "separate"},
    "accumulation": {"precision": "bf16", "master": "separate", "accumulate": 2},
    "in backward": {"updates": "in-backward"},
    "pages": {"layout": "page"},
    "tensors": {"layout": "tensor"},
    "lru": {"eviction": "lru", "prefetch": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_settings(way: str) -> None:
    changes = WAYS[way]
    found = set()
    for memory in (None, 140_000):
        model, compiler = Model(), Compiler()
        in_place(model, compiler)
        found.add(trained(engine_of(model, memory, **changes)))
        assert compiler.graphs == 1
        torch._dynamo.reset()
    assert len(found) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    found = set()
    for memory in (None, 95_000):
        for recompute in (None, reentrant):
            if memory and recompute is None:
                continue
            model, compiler = Model(), Compiler()
            model.recompute = recompute
            in_place(model, compiler)
            found.add(trained(engine_of(model, memory)))
            torch._dynamo.reset()
    assert len(found) == 1


class Tied(Model):
    """A weight that two blocks share, and one that is outside of them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].up.weight = self.blocks[1].up.weight  # type: ignore[union-attr]
        self.last = nn.Linear(32, 64)
        self.last.weight = self.blocks[2].up.weight  # type: ignore[union-attr, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        for index, parameter in enumerate(self.blocks.parameters()):
            parameter.requires_grad_(index % 3 == 0 and index > 6)


class Uneven(Model):
    """Blocks that are skipped now and then, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not ebbtide.imagining():
            self.calls += 1
        for index, block in enumerate(self.blocks):
            if self.calls % 3 != 2 or index % 2:
                x = block(x)
        return self.blocks[1](x).square().mean()


class Broken(Block):
    """In two graphs, with something between them that no compiler sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        torch._dynamo.graph_break()
        return x - 0.1 * self.down(nn.functional.gelu(self.up(x)))


class Recomputing(Block):
    """With a checkpoint in it that the compiler leaves alone: backward computes a part of the block by itself."""

    @torch.compiler.disable
    def recomputed(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recomputed(nn.functional.gelu(x)) * 0.5


@pytest.mark.parametrize("kind", [Tied, Frozen, Uneven, lambda: Model(Broken), lambda: Model(Recomputing)])
def test_models(kind: Callable[[], Model]) -> None:
    found = set()
    for memory in (None, 135_000):
        model, compiler = kind(), Compiler()
        in_place(model, compiler)
        engine = engine_of(model, memory)
        try:
            for batch in batches(6):
                engine.backward(engine(batch))
                engine.step()
            found.add(engine.weights_sha256())
            assert engine.stats()["peak_bytes"]["device"] <= (memory or 1 << 60)
        finally:
            engine.close()
        torch._dynamo.reset()
    assert len(found) == 1


@pytest.mark.parametrize("memory", PLACES)
def test_evaluations_between_steps(memory: int | None) -> None:
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    expected = trained(engine_of(model))
    torch._dynamo.reset()
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    assert trained(engine_of(model, memory), evaluate=True) == expected


def test_ssd(tmp_path: Path) -> None:
    found = set()
    for changes in ({}, {"memory": 150_000, "host": {"memory": "440KiB"}}):
        model, compiler = Model(), Compiler()
        in_place(model, compiler)
        ssd = {"folder": str(tmp_path), "memory": "10MB"} if changes else {}
        found.add(trained(engine_of(model, **changes, ssd=ssd)))
        torch._dynamo.reset()
    assert len(found) == 1


@pytest.mark.parametrize("which", ["all", "checkpoints"])
def test_activations_that_leave(which: str) -> None:
    found = set()
    for changes in ({}, {"memory": 140_000, "offload_activations": which}):
        model, compiler = Model(), Compiler()
        model.recompute = False if which == "checkpoints" else None
        in_place(model, compiler)
        engine = engine_of(model, **changes)
        for batch in batches(5):
            engine.backward(engine(batch))
            engine.step()
        found.add(engine.weights_sha256())
        engine.close()
        torch._dynamo.reset()
    assert len(found) == 1


def of_a_rank(memory: int | None) -> tuple[str, int]:
    torch._dynamo.reset()
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    return trained(engine_of(model, memory)), compiler.graphs


def test_two_ranks() -> None:
    found = [one for memory in (None, 2 * LEAST) for one in group_of(2).run(of_a_rank, memory)]
    assert len(set(found)) == 1 and found[0][1] == 1


def records(engine: ebbtide.Engine) -> list[Any]:
    return [known.record for known in engine._session.traces._known.values()]


@pytest.mark.parametrize("recompute", [None, False, True])
def test_a_blocks_gradients_are_in_its_moment(recompute: bool | None) -> None:
    """A checkpoint around the block has it computed again after its backward has begun."""
    model, compiler = Model(), Compiler()
    model.recompute = recompute
    in_place(model, compiler)
    engine = engine_of(model, 140_000)
    gradients = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
    for batch in batches(2):
        loss = engine(batch)
        for record in records(engine):  # imagined, then as it was
            before = {j: record.moments[j - 1].alive for j in range(1, len(record.moments))}
            arrivals = {arrival.moment for arrival in record.arrivals}
            together = [j for j in arrivals if record.moments[j].phase == BACKWARD]
            assert len(together) == 6
            assert all(record.moments[j].peak >= before[j] + gradients for j in together)
        engine.backward(loss)
        engine.step()
    engine.close()


def test_a_block_that_is_compiled_anew_stays_a_unit() -> None:
    expected = None
    for memory in PLACES:
        model, first, second = Model(), Compiler(), Compiler()
        in_place(model, first)
        engine = engine_of(model, memory)
        in_place(model, second)
        found = trained(engine)
        assert (first.graphs, second.graphs) == (0, 1) and found == (expected or found)
        expected = found
        torch._dynamo.reset()


# -- which blocks --------------------------------------------------------------------------------------------


def blocks_of(engine: ebbtide.Engine) -> list[str]:
    return [block.name for block in engine._session.interceptor._blocks.all]


def test_blocks_that_repeat_are_found() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.stages = nn.ModuleList(nn.Sequential(Block(), Block(), nn.ReLU()) for _ in range(1))
            self.experts = nn.ModuleList([Block(), nn.Linear(32, 32), Block(), nn.Linear(32, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    engine = engine_of(Stages(), compile="blocks")
    assert blocks_of(engine) == ["stages.0.0", "stages.0.1", "experts.0", "experts.2"]
    engine.close()


def test_a_block_of_another_shape_is_compiled_with_its_class() -> None:
    engine = engine_of(Model(lambda: Block(32), 2), compile="blocks")
    assert blocks_of(engine) == ["blocks.0", "blocks.1"]
    engine.close()


def test_a_model_without_blocks_says_so() -> None:
    model = Model(count=1)
    with pytest.warns(UserWarning, match="no two blocks of this model are alike"):
        engine = engine_of(model, compile="blocks")
    assert trained(engine) == trained(engine_of(Model(count=1)))


@pytest.mark.parametrize("memory", [None, 160_000])
def test_a_module_that_is_elsewhere_too_is_no_block(memory: int | None) -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.blocks[0].up

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x) + self.again(x)[:, :32]
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    expected = trained(engine_of(Shared()))
    model, compiler = Shared(), Compiler()
    in_place(model, compiler)
    with pytest.warns(
        UserWarning, match=r"run as they are written, not compiled: a module in 'blocks\.0' is part of"
    ):
        found = trained(engine_of(model, memory))
    assert found == expected and compiler.graphs == 0


@pytest.mark.parametrize("form", ["in place", "wrapped"])
def test_a_mode_with_cuda_graphs_runs_as_written(form: str) -> None:
    expected = trained(engine_of(Model()))
    model = Model()
    if form == "in place":
        model.blocks[1].compile(mode="reduce-overhead")
    else:
        model.blocks[1] = torch.compile(model.blocks[1], mode="max-autotune")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"'blocks\.1' is compiled to CUDA graphs"):
        found = trained(engine_of(model, 160_000))
    assert found == expected or form == "wrapped"  # which changes the names that the hash goes by


def test_a_module_on_the_host_is_in_no_block() -> None:
    expected = trained(engine_of(Model(), host_modules=["blocks.1.up"]))
    with pytest.warns(UserWarning, match=r"a module in 'blocks\.1' computes on the host"):
        engine = engine_of(Model(), compile="blocks", host_modules=["blocks.1.up"])
    assert trained(engine) == expected


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", PLACES)
def test_what_cannot_be_compiled_runs_as_written_and_says_so(memory: int | None) -> None:
    def broken(graph: Any, example: Any) -> Any:
        raise RuntimeError("no compiler here")

    expected = trained(engine_of(Model()))
    model = Model()
    in_place(model, broken)
    engine = engine_of(model, memory)
    with pytest.warns(UserWarning, match=r"cannot compile 'blocks\.0', a Block: .*no compiler here") as said:
        found = trained(engine)
    assert found == expected
    assert len([one for one in said if "cannot compile" in str(one.message)]) == 1


def test_an_error_of_the_model_is_its_own() -> None:
    class Picky(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(4, 32))

    model, compiler = Model(Picky), Compiler()
    in_place(model, compiler)
    engine = engine_of(model, LEAST + 40_000)
    with pytest.raises(RuntimeError, match="shape"):
        engine(torch.randn(3, 32))
    expected, other = Compiler(), Model(Picky)
    torch._dynamo.reset()
    in_place(other, expected)
    assert trained(engine) == trained(engine_of(other))


def test_a_budget_that_is_too_small_is_refused_before_anything_runs() -> None:
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    engine = engine_of(model, 70_000)
    with pytest.raises(BudgetError, match="needs at least"):
        engine(batches(1)[0])
    assert compiler.graphs == 0
    engine.close()


def test_a_parameter_that_is_put_into_a_block_is_noticed() -> None:
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    engine = engine_of(model, 140_000)
    model.blocks[1].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ebbtide.errors.EbbtideError, match=r"blocks\.1\.extra"):
        engine(batches(1)[0])
    engine.close()


# -- around the engine ---------------------------------------------------------------------------------------


def test_the_module_is_the_users_again_when_the_engine_is_closed() -> None:
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    before = [block._compiled_call_impl for block in model.blocks]
    engine = engine_of(model)
    engine.close()
    assert [block._compiled_call_impl for block in model.blocks] == before
    other = Model()
    engine = engine_of(other, compile="blocks")
    engine.close()
    assert all(block._compiled_call_impl is None for block in other.blocks)


def test_a_copy_is_an_ordinary_module() -> None:
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    engine = engine_of(model)
    engine.backward(engine(batches(1)[0]))
    engine.step()
    with engine.resident():
        made = copy.deepcopy(model)
        expected = model(batches(1)[0])
    engine.close()
    assert not any(
        type(value).__module__.startswith("ebbtide") for m in made.modules() for value in vars(m).values()
    )
    assert torch.isfinite(made(batches(1)[0])) and torch.isfinite(expected)


def test_blocks_under_torch_func_run_as_written() -> None:
    model, compiler = Model(), Compiler()
    in_place(model, compiler)
    engine = engine_of(model)
    with engine.resident(), torch.no_grad():
        found = torch.func.vmap(model.blocks[0])(torch.randn(2, 4, 32))
    assert found.shape == (2, 4, 32) and compiler.graphs == 0
    engine.close()


@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_run_goes_on_with_blocks_compiled_or_not(compiled_first: bool, tmp_path: Path) -> None:
    """From the same values; what was traced of passes made of other units is not used."""

    def engine_with(blocks: bool) -> ebbtide.Engine:
        torch._dynamo.reset()
        model = Model()
        if blocks:
            in_place(model, Compiler())
        return engine_of(model, LEAST)

    engine = engine_with(compiled_first)
    for batch in batches(3):
        engine.backward(engine(batch))
        engine.step()
    engine.save(tmp_path / "run")
    expected = engine.weights_sha256()
    engine.close()
    other = engine_with(not compiled_first)
    other.load(tmp_path / "run")
    assert other.weights_sha256() == expected
    for batch in batches(3):
        other.backward(other(batch))
        other.step()
        assert not other.stats()["diverged"]
    other.close()
    again = engine_with(compiled_first)
    again.load(tmp_path / "run")
    again.backward(again(batches(1)[0]))
    assert again.stats()["traces"] == 0  # it knows what it traced
    again.close()
