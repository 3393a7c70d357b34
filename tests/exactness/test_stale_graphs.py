"""A graph whose weights were updated or written since forward: refused in backward, whatever the placement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebbtide.config import Config
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import UnsupportedError
from harness import config_of

BUDGET = 150_000
STALE = "modified by an inplace operation"


class Model(nn.Module):
    """`side` is trained by itself, beside the others in their chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
        self.side = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, side: bool = False) -> torch.Tensor:
        found: torch.Tensor = self.side(x) if side else self.blocks(x)
        return found.float().square().mean()


def engine_of(memory: int | None, **settings: object) -> Engine:
    device = {} if memory is None else {"memory": memory}
    size = {} if settings.get("layout") == "tensor" else {"chunk_size": "64KiB"}
    read = Config.read(config_of(clip=None, device=device, **size, **settings))
    torch.manual_seed(0)
    return Engine(Model(), read, tiers=open_tiers(read))


def drawn(seed: int, like: Engine) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    return x.to(next(like.module.parameters()).dtype)


def warmed(engine: Engine, steps: int) -> None:
    for seed in range(steps):
        engine.backward(engine(drawn(seed, engine)))
        engine.step()


def step(engine: Engine) -> None:
    engine.backward(engine(drawn(7, engine)))
    engine.step()


def write_by_name(engine: Engine) -> None:
    with engine.weights("blocks.2.weight", write=True) as values:
        values["blocks.2.weight"].mul_(2)


def write_in_place(engine: Engine) -> None:
    with torch.no_grad(), engine.resident():
        engine.module.blocks[2].weight.mul_(2)


def load(engine: Engine) -> None:
    engine.load_state_dict(engine.state_dict())


@pytest.mark.parametrize("change", [step, write_by_name, write_in_place, load])
@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("memory", [None, BUDGET])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_changed_since_forward_are_refused(
    precision: str, memory: int | None, warm: int, change: Callable[[Engine], None]
) -> None:
    """Backward took the new weights with the old activations, and said nothing."""
    engine = engine_of(memory, precision=precision)
    warmed(engine, warm)
    loss = engine(drawn(9, engine))
    change(engine)
    with pytest.raises(RuntimeError, match=STALE):
        engine.backward(loss)
    engine.optimizer.zero_grad()
    step(engine)  # it goes on
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("memory", [None, BUDGET])
def test_updates_in_backward_make_graphs_stale_too(memory: int | None, warm: int) -> None:
    engine = engine_of(memory, precision="fp32", updates="in-backward")
    warmed(engine, warm)
    loss = engine(drawn(9, engine))
    step(engine)
    with pytest.raises(RuntimeError, match=STALE):
        engine.backward(loss)
    engine.close()


def test_a_weight_that_reentrant_checkpoints_share_is_refused_by_name() -> None:
    """Its first gradient updates it, and the second region wants what it was."""

    class Shared(Model):
        def forward(self, x: torch.Tensor, side: bool = False) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.side, x, use_reentrant=True)  # type: ignore[assignment]
            return x.square().mean()

    read = Config.read(config_of(precision="fp32", clip=None, updates="in-backward"))
    engine = Engine(Shared(), read, tiers=open_tiers(read))
    loss = engine(torch.randn(8, 64, requires_grad=True))
    with pytest.raises(UnsupportedError, match=r"reentrant checkpoints.*use updates = \"exact\""):
        engine.backward(loss)
    engine.close()


@pytest.mark.parametrize("layout", ["chunk", "page", "tensor"])
@pytest.mark.parametrize("memory", [None, BUDGET])
def test_what_the_step_left_alone_is_not(memory: int | None, layout: str) -> None:
    """As in plain PyTorch: a step updates what has gradients, and another part's graph is as good as before."""

    def parts(
        run: Callable[..., torch.Tensor], back: Callable[[torch.Tensor], None], end: Callable[[], None]
    ) -> None:
        for seed in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            first, second = run(x), run(x, side=True)
            back(first)
            end()
            back(second)
            end()

    engine = engine_of(memory, precision="fp32", layout=layout)
    parts(engine, engine.backward, lambda: engine.step() and None)  # type: ignore[arg-type, return-value]
    found = engine.state_dict()
    engine.close()
    other = engine_of(None, precision="fp32")
    for seed in range(3):
        for side in (False, True):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            other.backward(other(x, side=side))
            other.step()
    expected = other.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    other.close()


def test_other_engines_values_and_reads_make_nothing_stale() -> None:
    engine = engine_of(BUDGET, precision="fp32")
    warmed(engine, 3)
    loss = engine(drawn(9, engine))
    with engine.weights() as values:
        assert len(values) == 10
    with torch.no_grad():
        engine(drawn(3, engine))
    engine.backward(loss)
    engine.step()
    engine.close()


def test_a_model_from_the_meta_device_has_a_version_for_each_parameter() -> None:
    """All had that of the placeholder that they are views of while they are away."""
    with torch.device("meta"):
        model = Model()
    read = Config.read(config_of(precision="fp32", clip=None, device={"memory": BUDGET}, chunk_size="64KiB"))
    torch.manual_seed(0)
    engine, other = Engine(model, read, tiers=open_tiers(read)), engine_of(None, precision="fp32")
    for one in (engine, other):
        warmed(one, 3)
        with torch.no_grad(), one.resident():
            one.module.blocks[2].weight.mul_(0.5)
        warmed(one, 3)
    assert engine.weights_sha256() == other.weights_sha256()
    engine.close()
    other.close()
