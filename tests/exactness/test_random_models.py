"""Models and settings that nobody chose: each trains to the bits of a plain loop, in what its plan was taken for.

Blocks of what people write (weights that are shared, tied, frozen, unused, read by others, recomputed) in any order,
under any settings, at the least budget that works, a little more, and much more. Every run draws new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import ebbtide
import reference
from ebbtide.errors import BudgetError
from group import group_of
from harness import LR, Count, config_of
from zoo import Loss

VOCABULARY, STEPS = 256, 3
EXAMPLES, RANKS = 100, 2
START = 20_000
"""Bytes of device budget that no plan takes; from there on by what refusals ask for."""
AMPLE = 1 << 30


class Mlp(nn.Module):
    def __init__(self, width: int, frozen: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)
        if unused:
            self.unused = nn.Parameter(torch.ones(2 * width))
        self.requires_grad_(not frozen)
        for one in self.parameters() if frozen else ():
            one.data = one.data.bfloat16().float()  # what is frozen has no master that would know more bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attend(nn.Module):
    """`nn.MultiheadAttention`, which reads the weights of a submodule that it never calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attend(x, x, x, need_weights=False)[0]


class Heads(nn.Module):
    """One matrix for three, cut into views that autograd keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.three(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Scaled(nn.Module):
    """Parameters of its own, beside no module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.mix = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x * self.scale) @ self.mix.tanh()


class Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": Mlp,
    "frozen": lambda width: Mlp(width, frozen=True),
    "unused": lambda width: Mlp(width, unused=True),
    "attend": Attend,
    "heads": Heads,
    "scaled": Scaled,
    "convolved": Convolved,
    "recomputed": lambda width: Recomputed(Mlp(width), False),
    "recomputed heads": lambda width: Recomputed(Heads(width), False),
    "reentrant": lambda width: Recomputed(Mlp(width), True),
}


@dataclass(frozen=True)
class Drawn:
    blocks: tuple[str, ...]
    again: tuple[int, ...]
    """Blocks that follow once more, by number: their weights are used twice."""
    width: int
    length: int
    tied: bool
    shorter: bool
    """Every other batch of a rank is half as long; alone, every other two."""
    evaluates: bool
    """After each step."""


class Model(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, drawn.width)
        self.blocks = nn.ModuleList(BLOCKS[name](drawn.width) for name in drawn.blocks)
        self.order = (*range(len(drawn.blocks)), *drawn.again)
        self.head = None if drawn.tied else nn.Linear(drawn.width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> Loss:
        x = self.embed(ids)
        for number in self.order:
            x = self.blocks[number](x)
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return Loss(loss, ({"logits": logits},))


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    blocks = tuple(draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=6)))
    again = tuple(draw(st.lists(st.integers(0, len(blocks) - 1), max_size=2)))
    width, length = draw(st.sampled_from([16, 32, 48, 64])), draw(st.sampled_from([8, 32, 96]))
    # In eval mode its weights are read before they are used, and stay meanwhile: no plan foresees that.
    evaluates = draw(st.booleans()) and "attend" not in blocks
    return Drawn(blocks, again, width, length, draw(st.booleans()), draw(st.booleans()), evaluates)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    precision = draw(st.sampled_from(["bf16", "bf16", "fp32"]))
    updates = draw(st.sampled_from(["exact", "exact", "in-backward"]))
    found = {
        "precision": precision,
        "layout": draw(st.sampled_from(["chunk", "page", "tensor"])),
        "eviction": draw(st.sampled_from(["farthest-next-use", "lru", "list-order"])),
        "placement": draw(st.sampled_from(["auto", "auto", "host", "static"])),
        "prefetch": draw(st.booleans()),
        "offload_activations": draw(st.sampled_from(["off", "off", "checkpoints", "all"])),
        "updates": updates,
        "clip": None if updates == "in-backward" else draw(st.sampled_from([None, 1.0])),
        "host": {"memory": AMPLE},
        "accumulate": 1 if updates == "in-backward" else draw(st.sampled_from([1, 1, 2])),
    }
    if precision != "fp32":
        found["master"] = draw(st.sampled_from(["split", "separate"]))
    config = config_of(**found)
    if "chunk_size" in config:
        config["chunk_size"] = draw(st.sampled_from(["8KiB", "32KiB", "128KiB"]))
    return config


def batch_of(drawn: Drawn, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    length = drawn.length // 2 if drawn.shorter and step // RANKS % 2 else drawn.length
    return {"ids": torch.randint(0, VOCABULARY, (2, length), generator=generator)}


@dataclass(frozen=True)
class Refused:
    enough: int
    """The device budget that the message asks for."""
    passes: int
    """Taken before."""
    message: str


@dataclass(frozen=True)
class Done:
    sha: str
    losses: list[float]
    peak: int
    """The most device bytes: of the engine's count and of ours the larger."""


# -- what a process does, alone or as a rank ------------------------------------------------------------------


def place_of() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def plain(drawn: Drawn, config: dict[str, Any]) -> tuple[str, list[float]] | None:
    rank, size = place_of()
    if rank:
        return None
    return reference.train(
        Model(drawn),
        lambda number: batch_of(drawn, number),
        STEPS,
        config["precision"],
        lr=LR,
        clip=config["clip"],
        accumulate=config["accumulate"],
        ranks=size,
    )


def train(drawn: Drawn, config: dict[str, Any], budget: int | None) -> Done | Refused:
    config = config | {"device": {**config["device"], "memory": budget or AMPLE}}
    rank, size = place_of()
    try:
        engine = ebbtide.initialize(Model(drawn), config)
    except BudgetError as error:
        return refused(error, budget, 0)
    losses: list[float] = []
    try:
        with Count(engine) as count:
            for number in range(STEPS * config["accumulate"]):
                with _disable_current_modes():
                    batch = batch_of(drawn, number * size + rank)
                count.given(batch)
                out = engine(**batch)
                engine.backward(out.loss)
                engine.step()
                losses.append(out.loss.item())
                del out
                if drawn.evaluates and number % config["accumulate"] == config["accumulate"] - 1:
                    engine.module.eval()
                    with torch.no_grad():
                        engine(**batch)
                    engine.module.train()
                engine.check_integrity()
        return Done(engine.weights_sha256(), losses, max(count.peak, engine.stats()["peak_bytes"]["device"]))
    except BudgetError as error:
        return refused(error, budget, len(losses))
    finally:
        engine.close()


def refused(error: BudgetError, budget: int | None, passes: int) -> Refused:
    found = re.search(r"raise device\.memory (to|by) (\d+) bytes", str(error))
    if found is None or budget is None:
        raise error
    return Refused(int(found[2]) + (budget if found[1] == "by" else 0), passes, str(error))


# -- what is asked of it --------------------------------------------------------------------------------------


def check(run: Callable[..., list[Any]], drawn: Drawn, config: dict[str, Any]) -> None:
    """`run` has a function called in every process there is."""
    # A weight that reentrant regions share gets its gradient in parts, which updates in backward refuse by name.
    assume(
        config["updates"] == "exact" or "reentrant" not in {drawn.blocks[number] for number in drawn.again}
    )
    sha, losses = run(plain, drawn, config)[0]

    def trained(budget: int | None) -> list[Done] | Refused:
        note(f"{budget} bytes")
        found = run(train, drawn, config, budget)
        if any(isinstance(one, Refused) for one in found):
            assert all(isinstance(one, Refused) and one.passes == 0 for one in found), found
            return max(found, key=lambda one: one.enough)
        for rank, one in enumerate(found):
            assert one.sha == sha and one.losses == losses[rank :: len(found)]
            assert budget is None or one.peak <= budget
        return found

    resident = trained(None)
    assert not isinstance(resident, Refused)
    low, high = START, max(one.peak for one in resident)
    while isinstance(answer := trained(low), Refused):
        assert low < answer.enough <= 2 * high, answer.message
        low = answer.enough
    high = max(low, high)
    for budget in (low + (high - low) // 16, low + (high - low) // 3):
        assert not isinstance(trained(budget), Refused)


drawn_anew = settings(
    max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.heavy
@drawn_anew
@given(drawn=models(), config=configs())
def test_a_random_model_trains_exactly_within_its_budget(drawn: Drawn, config: dict[str, Any]) -> None:
    check(lambda function, *arguments: [function(*arguments)], drawn, config)


def test_a_whole_that_left_comes_back_without_room_for_its_slice() -> None:
    """Found so: the tied embedding stays from its first use to its second in the plan, and leaves in the engine."""
    drawn = Drawn(("attend", "attend"), (), width=32, length=8, tied=True, shorter=False, evaluates=False)
    chosen = {"precision": "bf16", "eviction": "list-order", "master": "split", "accumulate": 2}
    config = config_of(**chosen, clip=None, prefetch=False, chunk_size="8KiB", host={"memory": AMPLE})
    wanted = group_of(RANKS).run(plain, drawn, config)[0]
    for budget in (104_000, 106_000):
        for done in group_of(RANKS).run(train, drawn, config, budget):
            assert done.sha == wanted[0] and done.peak <= budget


def test_a_shorter_batch_whose_activations_leave_fits_where_a_longer_one_does() -> None:
    """Found so: it ran by the longer one's plan, and left that, for what it saved had other sizes than planned."""
    drawn = Drawn(
        (*["attend"] * 5, "reentrant"), (0, 5), width=16, length=96, tied=False, shorter=True, evaluates=False
    )
    chosen = {
        "precision": "bf16",
        "layout": "tensor",
        "master": "split",
        "offload_activations": "checkpoints",
    }
    config = config_of(**chosen, accumulate=1, clip=None, prefetch=False, host={"memory": AMPLE})
    wanted = group_of(RANKS).run(plain, drawn, config)[0]
    for done in group_of(RANKS).run(train, drawn, config, 930_312):
        assert done.sha == wanted[0] and done.peak <= 930_312


@pytest.mark.heavy
@drawn_anew
@given(drawn=models(), config=configs())
def test_a_random_model_trains_exactly_on_ranks(drawn: Drawn, config: dict[str, Any]) -> None:
    check(group_of(RANKS).run, drawn, config)
