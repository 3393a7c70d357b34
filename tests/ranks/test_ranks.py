"""Many ranks: the weights are those of a plain loop that adds the ranks' gradients in order, wherever chunks are."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import ebbtide
import reference
import zoo
from ebbtide.errors import BudgetError, ConfigError, NonFiniteError, StateError, UnsupportedError
from ebbtide.runtime.distributed.agreement import REDUCE
from group import Group, RankError, group_of
from harness import LR, Count, batch_of, config_of
from sampling import some

STEPS = 4


def rank_of() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# -- what ranks do --------------------------------------------------------------------------------------------


def train(name: str, mode: str, steps: int, config: dict[str, Any], slices: bool = False) -> dict[str, Any]:
    """Each rank takes the batches that are its own. `slices`: gradients are exchanged so, as for want of room."""
    rank, size = rank_of()
    dtype = reference.ROUND[config.get("precision", "bf16")]
    with tempfile.TemporaryDirectory() as folder:
        if "ssd" in config:
            config = config | {"ssd": {"folder": folder, **config["ssd"]}}
            dist.barrier()
        engine = ebbtide.initialize(zoo.build(name, mode), config)
        if slices:
            engine._session.planning.needs_slices = True
        try:
            losses = []
            with Count(engine) as count:
                for number in range(steps * config.get("accumulate", 1)):
                    batch = count.given(batch_of(name, number * size + rank, dtype, "cpu"))
                    loss = engine(**batch).loss
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                    engine.check_integrity()
            return {
                "sha": engine.weights_sha256(),
                "losses": losses,
                "stats": engine.stats(),
                "counted": count.peak,
            }
        finally:
            engine.close()


def plain(
    name: str, mode: str, steps: int, precision: str, clip: float | None, accumulate: int
) -> str | None:
    """The reference, in one of them: with as many threads as each rank has."""
    rank, size = rank_of()
    if rank:
        return None
    dtype = reference.ROUND[precision]
    return reference.train(
        zoo.build(name, mode),
        lambda number: batch_of(name, number, dtype, "cpu"),
        steps,
        precision,
        lr=LR,
        clip=clip,
        accumulate=accumulate,
        ranks=size,
    )[0]


@cache
def expected(
    size: int, name: str, mode: str, precision: str = "bf16", clip: float | None = 1.0, accumulate: int = 1
) -> str:
    return str(group_of(size).run(plain, name, mode, STEPS, precision, clip, accumulate)[0])


def check(
    size: int, name: str, mode: str, config: dict[str, Any], slices: bool = False
) -> list[dict[str, Any]]:
    wanted = expected(
        size, name, mode, config.get("precision", "bf16"), config.get("clip"), config.get("accumulate", 1)
    )
    found = group_of(size).run(train, name, mode, STEPS, config, slices)
    for rank in found:
        assert rank["sha"] == wanted
        assert not rank["stats"]["diverged"]
        peaks, budgets = rank["stats"]["peak_bytes"], rank["stats"]["budget_bytes"]
        assert all(peaks[tier] <= budgets[tier] for tier in budgets)
        assert rank["counted"] <= budgets["device"]
    return found


HOST = {"device": {"memory": 1_600_000}, "host": {"memory": "64MB"}}
CHANGES: dict[str, dict[str, Any]] = {
    "everything fits": {},
    "host": HOST,
    "SSD": {"device": {"memory": 1_900_000}, "host": {"memory": 0}, "ssd": {"memory": "64MB"}},
    "three tiers": {"device": {"memory": 1_900_000}, "host": {"memory": "2MB"}, "ssd": {"memory": "64MB"}},
    "pages": HOST | {"layout": "page", "chunk_size": 16384},
    "tensors": HOST | {"layout": "tensor"},
    "large chunks": {"chunk_size": "256KiB"},
    "separate masters": HOST | {"master": "separate"},
    "without prefetch": HOST | {"prefetch": False},
    "in backward": {"updates": "in-backward", "clip": None},
    "in backward, host": HOST | {"updates": "in-backward", "clip": None},
    "accumulate": HOST | {"accumulate": 2},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16", "nonfinite": "continue", "clip": None},
    "activations go": HOST | {"offload_activations": "all"},
    "state on the host": HOST | {"placement": "host"},
}


@pytest.mark.parametrize("change", some([c for c in CHANGES if c != "fp16"], 6))
@pytest.mark.parametrize("size", [2])
def test_weights_are_those_of_a_plain_loop(size: int, change: str) -> None:
    config = config_of(**CHANGES[change])
    if CHANGES[change].get("layout") == "tensor":
        config.pop("chunk_size", None)
    check(size, "gpt2", "none", config)


@pytest.mark.parametrize(("size", "change"), [(3, "host"), pytest.param(4, "SSD", marks=pytest.mark.heavy)])
def test_on_more_ranks(size: int, change: str) -> None:
    check(size, "gpt2", "none", config_of(**CHANGES[change]))


@pytest.mark.parametrize("name", some([name for name in zoo.ZOO if name != "gpt2"], 2))
def test_models(name: str) -> None:
    check(2, name, "none", config_of(device={"memory": 2_000_000}, host={"memory": "64MB"}))


@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mode", ["none", "non-reentrant"])
@pytest.mark.parametrize("change", [c for c in CHANGES if c != "fp16"])
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_everything(name: str, change: str, mode: str, size: int) -> None:
    check(
        size,
        name,
        mode,
        config_of(
            **({"device": {"memory": 2_000_000}} if "device" in CHANGES[change] else {}) | CHANGES[change]
        ),
    )


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.heavy)])
def test_scaled_losses_give_the_same_weights_wherever_chunks_are(name: str) -> None:
    """The plain loop scales no losses, so fp16 has nothing else to be compared with."""
    shas = set()
    for place in (
        {},
        HOST | {"device": {"memory": 2_000_000}},
        {"prefetch": False},
        {"chunk_size": "256KiB"},
    ):
        for rank in group_of(2).run(train, name, "none", STEPS, config_of(**CHANGES["fp16"], **place)):
            shas.add(rank["sha"])
    assert len(shas) == 1


# -- one rank and many ------------------------------------------------------------------------------------------


def compared(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a global batch of twelve, and the first step's gradients."""
    rank, size = rank_of()
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(precision="fp32"))
    losses, gradients = [], {}
    for number in range(steps):
        whole = torch.cat([zoo.ZOO["gpt2"].batch(6 * number + i)["input_ids"] for i in range(6)])
        each = len(whole) // size
        ids = whole[rank * each : (rank + 1) * each]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        if not number:
            with engine.gradients() as found:
                gradients = {name: value.clone() for name, value in found.items()}
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / size)
    engine.close()
    return losses, gradients


@pytest.mark.parametrize("size", some([2, 4], 1))
def test_the_same_global_batch_learns_the_same(size: int) -> None:
    alone = group_of(1).run(compared, 20)[0]
    for losses, gradients in group_of(size).run(compared, 20):
        assert losses == pytest.approx(alone[0], rel=1e-3)
        for name, value in gradients.items():
            scale = float(alone[1][name].abs().max())
            assert float((value - alone[1][name]).abs().max()) <= 1e-5 * max(scale, 1e-3)


# -- bytes ----------------------------------------------------------------------------------------------------


def middling() -> nn.Module:
    """Large enough that slices' padding is nothing beside them."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8192, n_positions=64, n_embd=384, n_layer=6, n_head=6,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def counted(config: dict[str, Any]) -> dict[str, Any]:
    rank, _ = rank_of()
    engine = ebbtide.initialize(middling(), config)
    session = engine._session
    ids = torch.randint(0, 8192, (1, 8), generator=torch.Generator().manual_seed(rank))
    sent = []
    for _ in range(4):
        before = session.sharing.ranks.sent
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.synchronize()
        sent.append(session.sharing.ranks.sent - before)
    shape, stats = session.shape, engine.stats()
    found = {
        "parameters": sum(place.numel for place in session.data.places),
        "sent": sent[-1],
        "gather_bytes": max(shape.whole_bytes),
        "non_model": session.traces.records()[-1].peak,
        "peaks": stats["peak_bytes"],
        "weights": engine.weights_sha256(),
    }
    engine.close()
    return found


def test_traffic_is_what_a_formula_says() -> None:
    """Two gathers and one exchange of gradients a step, where the device cannot hold whole chunks between passes."""
    size = 2
    group = Group(size)
    try:
        known = group.run(counted, config_of(chunk_size="1MiB", poison=False))[0]
        budget = 5 * known["gather_bytes"] + known["non_model"] + (8 << 20)
        tight = config_of(chunk_size="1MiB", poison=False, device={"memory": budget}, host={"memory": "1GB"})
        for rank in group.run(counted, tight):
            assert rank["peaks"]["device"] <= budget
            # Less, where a whole chunk can stay from forward to backward.
            assert 0.6 < rank["sent"] / (6 * (size - 1) / size * rank["parameters"]) <= 1.02
    finally:
        group.stop()


MODEL_DATA = 14
"""Bytes a parameter: bf16 values and gradients, the lower halves of the masters, two moments in fp32."""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_memory_is_what_a_formula_says(size: int) -> None:
    """A share of the model data, four gather buffers and what is no model data: with nowhere else to go."""
    group = Group(size)
    try:
        known = group.run(counted, config_of(chunk_size="1MiB", poison=False))[0]
        share = MODEL_DATA * known["parameters"] // size
        padding = share // 50
        budget = share + padding + 4 * known["gather_bytes"] + known["non_model"]
        whole = MODEL_DATA * known["parameters"] + known["non_model"]
        assert budget < whole
        alone = config_of(chunk_size="1MiB", poison=False, device={"memory": budget}, host={"memory": 0})
        for rank in group.run(counted, alone):
            assert rank["peaks"]["device"] <= budget
            assert rank["weights"] == known["weights"]
    finally:
        group.stop()


# -- ranks that differ -----------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Uses other layers on other ranks, and leaves some out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.either = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.never = nn.Linear(width, width)
        self.leave = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, way: list[int]) -> torch.Tensor:
        x = self.enter(x)
        for index in way:
            x = torch.tanh(self.either[index](x))
        return self.leave(x).square().mean()


WAYS = [[[0, 1], [2, 3]], [[3, 2, 1], [1, 2, 3]], [[0], [0, 0]], [[], [1]], [[1, 2], [1, 2]]]
WAYS += [[[3, 2, 1], [3, 2, 1]]] * 4 + [
    [[3, 2, 1], [1, 2, 3]],
    [[3, 2, 1], [3, 2, 1]],
    [[3, 2], [0, 1, 2, 3]],
]
WAYS += [[[0, 1], [0, 1]]] * 4 + [[[0], [0]], [[0, 1], [0]], [[0, 1], [0, 1]], [[1, 0], [0, 1]]]
"""By step and rank (of two): the layers that a rank goes through, in its order. What all do again and again they promise
each other; then they differ."""


def branch(config: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    rank, _ = rank_of()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Branching(), config)
    for step, ways in enumerate(WAYS):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        engine.backward(engine(x.to(engine.module.enter.weight.dtype), ways[rank]))
        engine.step()
        engine.check_integrity()
    state = engine.state_dict()
    sha = engine.weights_sha256()
    engine.close()
    return sha, state


def put_off(ways: list[list[list[int]]]) -> list[int]:
    """By step: how many chunks were reduced at the end of the pass only."""
    rank, _ = rank_of()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Branching(), config_of(precision="fp32", chunk_size="8KiB"))
    reductions, late, found = engine._session.sharing.reductions, [], []
    end = reductions.end
    reductions.end = lambda index, arrived: late.append(index) or end(index, arrived)
    for step, way in enumerate(ways):
        late.clear()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        engine.backward(engine(x, way[rank]))
        engine.step()
        found.append(len(late))
    engine.close()
    return found


def test_gradients_wait_for_the_end_of_a_pass_only_where_ranks_differ() -> None:
    """What was promised and is on no rank's way any more costs no room: whole gradients that wait are in no plan."""
    forth, back = [0, 1, 2, 3], [3, 2, 1, 0]
    ways = [[forth, forth]] * 4 + [[back, back], [forth, forth], [back, forth]]
    for late in group_of(2).run(put_off, ways, patience=60):
        assert late[:6] == [1] * 6  # the chunk of the layer that nobody uses
        assert late[6] > 1


class Talking(nn.Module):
    """The user's own collectives, in the midst of both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.before: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            told = x.detach().mean()
            dist.all_reduce(told)
            x = x + 0.1 * told
            x.register_hook(self._talk)
        return x.square().mean()

    def _talk(self, gradient: torch.Tensor) -> torch.Tensor:
        self.before()
        told = gradient.mean()
        dist.all_reduce(told)
        return gradient + told


def talk(config: dict[str, Any], early: bool) -> tuple[str, int, int]:
    """The weights, exchanges that ended early, reductions that ranks agreed on in the last step. `early`: one rank wants
    the room of what is exchanged."""
    rank, _ = rank_of()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Talking(), config)
    session, ended, asked = engine._session, [], []
    agree = session.ranks.agree
    session.ranks.agree = lambda wish: asked.append(wish.deed) or agree(wish)
    if early and rank:
        engine.module.before = lambda: ended.append(session.room.end_exchange())
    for step in range(6):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        asked.clear()
        engine.backward(engine(x))
        engine.step()
    reductions = asked.count(REDUCE)
    sha = engine.weights_sha256()
    engine.close()
    return sha, sum(ended), reductions


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_users_may_talk_in_between(updates: str) -> None:
    shas = set()
    config = config_of(precision="fp32", chunk_size="8KiB", updates=updates, clip=None)
    for early in (False, True):
        for rank, (sha, ended, reductions) in enumerate(group_of(2).run(talk, config, early, patience=60)):
            shas.add(sha)
            assert (ended > 6) == (early and rank == 1 and updates == "exact")
            assert not reductions  # they are promised
    assert len(shas) == 1


def advised(place: dict[str, dict[str, Any]], tries: int) -> list[tuple[str, int]]:
    """What was short, until a step was done."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(tries):
            config = config_of(**place)
            if "ssd" in place:
                config["ssd"] = {"folder": folder, **place["ssd"]}
            engine = None
            try:
                engine = ebbtide.initialize(zoo.build("gpt2"), config)
                engine.backward(engine(**zoo.ZOO["gpt2"].batch(rank_of()[0])).loss)
                engine.step()
                break
            except BudgetError as error:
                found.append((error.tier, error.short))
                place[error.tier]["memory"] += error.short
                assert f"{error.tier}.memory" in error.advice, error
            finally:
                if engine is not None:
                    engine.close()
            dist.barrier()
    return found


@pytest.mark.parametrize("tiers", [{}, {"ssd": {"memory": "64MB"}}])
def test_advice_is_of_what_users_set(tiers: dict[str, Any]) -> None:
    """A machine's memory is shared by its ranks: what one lacks is asked for all of them."""
    place = {"device": {"memory": 1_500_000}, "host": {"memory": 10_000}, **tiers}
    for found in group_of(2).run(advised, place, 10, patience=60):
        assert any(tier == "host" for tier, _ in found)
        assert len(found) <= 4, found


def crowded(config: dict[str, Any], outputs: int) -> tuple[str, bool]:
    """Between steps all weights are to stay on the device; the second rank holds so many evaluations' outputs."""
    rank, _ = rank_of()
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    held, refused = [], False
    for number in range(4):
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(number * 2 + rank)).loss)
        engine.step()
        if number == 2 and rank == 1:
            with torch.no_grad():
                held = [engine(input_ids=torch.arange(10).repeat(20, 1)).logits for _ in range(outputs)]
        try:
            with engine.resident(), torch.no_grad():
                assert engine(input_ids=torch.arange(10).view(1, 10)).logits.isfinite().all()
        except BudgetError:
            refused = True
        engine.check_integrity()
        held.clear()
    sha = engine.weights_sha256()
    engine.close()
    return sha, refused


@pytest.mark.parametrize("memory", some([1_300_000, 1_400_000], 1))  # gradients in slices, and whole
def test_a_rank_that_has_no_room_for_all_weights_keeps_nobody_waiting(memory: int) -> None:
    """It is refused, and the others have them."""
    config = config_of(device={"memory": memory}, host={"memory": "64MB"})
    (wanted, _), _ = group_of(2).run(crowded, config, 0)
    found = group_of(2).run(crowded, config, 4, patience=60)
    assert [sha for sha, _ in found] == [wanted] * 2
    assert [refused for _, refused in found] == [False, True]


class Broken(RuntimeError):
    pass


def broken(config: dict[str, Any], where: int | None) -> str:
    """A pass that fails on both ranks after so many layers, and counts for nothing."""
    rank, _ = rank_of()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Talking(), config)
    for step in range(7):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        if step == 4 and where is not None:
            left = iter(range(where))

            def fail(left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise Broken

            engine.module.before = fail
            with pytest.raises(Broken):
                engine.backward(engine(x))
            engine.module.before = lambda: None
            engine.check_integrity()
        engine.backward(engine(x))
        engine.step()
        engine.check_integrity()
    sha = engine.weights_sha256()
    engine.close()
    return sha


def test_a_pass_that_fails_half_way_leaves_nothing_behind() -> None:
    config = config_of(precision="fp32", chunk_size="8KiB", clip=None)
    wanted = group_of(2).run(broken, config, None)[0]
    for where in (1, 2, 4):
        assert group_of(2).run(broken, config, where, patience=60) == [wanted] * 2


class Again(nn.Module):
    """A layer that is checkpointed, and so has a gradient for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, uses: int) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(uses if layer is self.layers[1] else 1):
                x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return x.square().mean()


def again(config: dict[str, Any], uses: list[int]) -> tuple[str, float, str]:
    rank, _ = rank_of()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Again(), config)
    refused, norm = "", 0.0
    for step, count in enumerate(uses):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank), requires_grad=True)
        try:
            engine.backward(engine(x, count))
        except UnsupportedError as error:
            refused = str(error)
            break
        norm = float(engine.step().grad_norm or 0.0)
        engine.check_integrity()
    sha = "" if refused else engine.weights_sha256()
    engine.close()
    return sha, norm, refused


@pytest.mark.parametrize("uses", [[2], [1, 1, 1, 2, 2, 1], [2, 2, 2, 1, 2]])
def test_a_gradient_that_comes_twice_counts_twice(uses: list[int]) -> None:
    """Promised or not, and however late the second one is."""
    config = config_of(precision="fp32", chunk_size="8KiB")
    alone = group_of(1).run(again_alone, uses)[0]
    found = group_of(2).run(again, config, uses)
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx(alone, rel=1e-4)


def plainly(kind: type[nn.Module], chosen: list[Any], clip: float | None) -> str:
    """The weights of a plain loop. `chosen`: what forward is told beside its batch, by batch."""
    ways = iter(chosen)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = kind()

        def forward(self, x: torch.Tensor) -> zoo.Loss:
            return zoo.Loss(self.model(x, next(ways)), ())

    def batch(number: int) -> dict[str, Any]:
        step, rank = divmod(number, 2)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        return {"x": x.requires_grad_()}  # a reentrant region wants it

    return reference.train(Both(), batch, len(chosen) // 2, "fp32", lr=LR, clip=clip, ranks=2)[0]


@pytest.mark.parametrize("place", [{}, {"memory": 200_000}])
@pytest.mark.parametrize("uses", [[2], [3, 1, 2, 2]])
def test_gradients_of_one_weight_are_added_up_before_ranks_get_their_mean(
    uses: list[int], place: dict[str, Any]
) -> None:
    """As autograd would have, whether a plan says how many come or nobody does."""
    config = config_of(precision="fp32", chunk_size="8KiB", clip=None, device=place)
    wanted = group_of(2).run(plainly, Again, [count for count in uses for _ in range(2)], None)[0]
    assert {sha for sha, _, _ in group_of(2).run(again, config, uses)} == {wanted}


def again_alone(uses: list[int]) -> float:
    """The last gradient's norm, of both ranks' batches."""
    torch.manual_seed(0)
    engine = ebbtide.initialize(Again(), config_of(precision="fp32", accumulate=2))
    for step, count in enumerate(uses):
        for rank in range(2):
            generator = torch.Generator().manual_seed(100 * step + rank)
            engine.backward(engine(torch.randn(8, 64, generator=generator, requires_grad=True), count))
            outcome = engine.step()
    engine.close()
    return float(outcome.grad_norm or 0.0)


@pytest.mark.parametrize("uses", [[2], [1, 1, 1, 2]])
def test_in_backward_a_gradient_that_comes_twice_is_refused(uses: list[int]) -> None:
    config = config_of(precision="fp32", chunk_size="8KiB", updates="in-backward", clip=None)
    for _, _, refused in group_of(2).run(again, config, uses):
        assert "layers.1" in refused and "second gradient" in refused


@pytest.mark.parametrize("change", some(["host", "everything fits", "in backward"], 2))
def test_ranks_that_use_other_layers_do_not_hang(change: str) -> None:
    config = config_of(precision="fp32", chunk_size="8KiB", **CHANGES[change])
    if "memory" in config["device"]:
        config["device"]["memory"] = 300_000
    found = group_of(2).run(branch, config)
    assert found[0][0] == found[1][0]
    chosen = [way for step in WAYS for way in step]
    assert found[0][0] == group_of(2).run(plainly, Branching, chosen, config["clip"])[0]
    torch.manual_seed(0)
    before = Branching().state_dict()
    assert torch.equal(found[0][1]["never.weight"], before["never.weight"])
    assert not torch.equal(found[0][1]["either.3.weight"], before["either.3.weight"])


def interleaved(config: dict[str, Any], disturbed: bool) -> str:
    """Evaluation of other lengths, values by name and writes in place between steps."""
    rank, size = rank_of()
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    for number in range(4):
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(number * size + rank)).loss)
        if disturbed and config["updates"] == "exact":
            with engine.gradients("*.c_fc.weight") as found:
                assert all(value.isfinite().all() for value in found.values())
        engine.step()
        if number == 1:
            with engine.resident(), torch.no_grad():
                engine.module.lm_head.weight.mul_(0.5)
                for parameter in engine.module.transformer.h[1].parameters():
                    parameter.add_(0.25)
        if number == 2:
            with engine.weights("transformer.h.0.*", write=True) as values:
                for value in values.values():
                    value *= 1.5
        if not disturbed:
            continue
        with torch.no_grad():
            for _ in range(1 + rank):  # one of them evaluates more
                engine(input_ids=torch.arange(10).view(1, 10))
        with engine.resident(), torch.no_grad():
            assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
        engine.load_state_dict(engine.state_dict())
        engine.check_integrity()
    sha = engine.weights_sha256()
    engine.close()
    return sha


@pytest.mark.parametrize("updates", some(["in-backward", "exact"], 1))
def test_what_happens_between_steps_changes_nothing(updates: str) -> None:
    shas = set()
    for place, disturbed in ((CHANGES["everything fits"], False), (CHANGES["host"], True), ({}, True)):
        config = config_of(updates=updates, clip=None, **place)
        shas.update(group_of(2).run(interleaved, config, disturbed))
    assert len(shas) == 1


class Outside(nn.Module):
    """A parameter that is trained outside the chunks, which one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.outside = nn.Linear(64, 64)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor, all_of_it: bool) -> zoo.Loss:
        x = self.frozen(self.inside(x))
        x = self.outside(x) if all_of_it else x
        return zoo.Loss(x.square().mean() + self.empty.sum(), ())


def outside() -> tuple[str, list[float | None]]:
    rank, _ = rank_of()
    torch.manual_seed(rank)  # the parameters of rank 0 count
    engine = ebbtide.initialize(Outside(), config_of(precision="fp32", unmanaged=["outside.*"]))
    norms = []
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x, step != 1 or not rank).loss)
        norms.append(engine.step().grad_norm)
    sha = engine.weights_sha256()
    engine.close()
    return sha, norms


def test_parameters_outside_the_chunks_stay_the_same_on_all_ranks() -> None:
    found = group_of(2).run(outside)
    assert found[0] == found[1]


def averaged() -> tuple[int, bool]:
    """The most that a step took beside the gradients that it averages, in bytes, and whether their mean is right, even
    of one that lies otherwise than its parameter."""
    rank, size = rank_of()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    engine = ebbtide.initialize(model, config_of(precision="fp32", unmanaged=["[0-4].*"], clip=None))
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(rank))
    outside, most, right = engine._session.unmanaged.parameters, 0, True
    try:
        for _ in range(2):
            with Count(engine) as count:
                engine.backward(engine(x).square().mean())
                odd = outside["1.weight"]
                odd.grad = odd.grad.t().contiguous().t()
                every = [None] * size
                dist.all_gather_object(every, {name: one.grad for name, one in outside.items()})
                wanted = {name: sum(one[name] for one in every) / size for name in outside}
                count.peak = before = count.total + engine._tiers.backend.held()["device"]
                engine._session.average_unmanaged()
            most = max(most, count.peak - before)
            right = right and all(torch.equal(one.grad, wanted[name]) for name, one in outside.items())
            right = right and odd.grad.stride() == odd.stride()
            engine.step()
        return most, right
    finally:
        engine.close()


def test_gradients_outside_the_chunks_are_averaged_where_they_are() -> None:
    """Five weights of 64 KiB, of which one has to be laid as its parameter is; what ranks send has room already."""
    for most, right in group_of(2).run(averaged):
        assert right and most <= 65536 + 4096


def among_others() -> list[str]:
    """Each rank has been in another number of groups of the user's."""
    for _ in range(2):
        dist.new_group([0])
    shas = []
    for _ in range(2):
        engine = ebbtide.initialize(Outside(), config_of(precision="fp32"))
        engine.backward(engine(torch.ones(8, 64), True).loss)
        engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    return shas


def test_the_users_own_groups_are_no_obstacle() -> None:
    group = Group(2)
    try:
        found = group.run(among_others)
    finally:
        group.stop()
    assert found[0] == found[1]


def not_finite(where: str) -> str:
    """On one rank only; both are told, and both can go on."""
    rank, _ = rank_of()
    engine = ebbtide.initialize(Outside(), config_of(precision="fp32"))
    x = torch.ones(8, 64)
    with pytest.raises(NonFiniteError) as told:
        if where == "loss":
            engine.backward(engine(x * (float("nan") if rank else 1.0), True).loss)
        else:
            handle = engine.module.inside.weight.register_hook(lambda g: g * float("inf") if rank else g)
            engine.backward(engine(x, True).loss)
            handle.remove()
        engine.step()
    engine.backward(engine(x, True).loss)
    engine.step()
    engine.close()
    return str(told.value)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_stops_all(where: str) -> None:
    for message in group_of(2).run(not_finite, where):
        assert ("loss" if where == "loss" else "inside.weight") in message


def out_of_step() -> str:
    rank, _ = rank_of()
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(**CHANGES["host"]))
    batch = zoo.ZOO["gpt2"].batch(rank)
    engine.backward(engine(**batch).loss)
    with pytest.raises(StateError, match=r"do the same|different things") as told:
        if not rank:
            engine.step()
        else:
            engine.state_dict()
    return str(told.value)


def test_ranks_that_are_not_in_one_pass_are_told() -> None:
    group = Group(2)
    for message in group.run(out_of_step):
        assert "rank 0" in message and "rank 1" in message
    group.stop()


def started(what: str) -> str:
    rank, _ = rank_of()
    module, config = zoo.build("gpt2"), config_of()
    if what == "model" and rank:
        module = zoo.build("llama")
    if what == "settings" and rank:
        config = config_of(clip=2.0)
    with pytest.raises(ConfigError) as told:
        ebbtide.initialize(module, config)
    return str(told.value)


@pytest.mark.parametrize("what", ["model", "settings"])
def test_ranks_must_start_alike(what: str) -> None:
    for message in group_of(2).run(started, what):
        assert "rank 1" in message and ("clip" if what == "settings" else "lm_head.weight") in message


def seeded(seed: int) -> str:
    """`seed`: that of rank 1."""
    rank, _ = rank_of()
    engine = ebbtide.initialize(zoo.build("gpt2", seed=seed * rank), config_of())
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(rank)).loss)
    engine.step()
    sha = engine.weights_sha256()
    engine.close()
    return sha


def test_the_weights_of_the_first_rank_count() -> None:
    assert len({*group_of(2).run(seeded, 0), *group_of(2).run(seeded, 7)}) == 1


# -- the tests' own means ---------------------------------------------------------------------------------------


def fails(how: str) -> int:
    rank, _ = rank_of()
    if rank == 1 and how == "raises":
        raise ValueError("as it was told to")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1:
        time.sleep(60)
    return rank


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "as it was told to"), ("dies", "exit codes"), ("hangs", "answer")]
)
def test_a_rank_that_fails_makes_the_test_fail(how: str, said: str) -> None:
    group = Group(2)
    with pytest.raises(RankError, match=said):
        group.run(fails, how, patience=20 if how != "hangs" else 12)
    group.stop()
