"""Passes of which nobody is told, for nothing can move: numbers and books are those of passes that are followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import zoo
from ebbtide.engine.stepping import Stepping
from ebbtide.errors import NonFiniteError
from ebbtide.runtime.fast_path import FastPath
from ebbtide.runtime.gradients.stand_ins import HeldGradient
from ebbtide.runtime.updates import chunk_update
from harness import Count, config_of
from sampling import crossed

LINE = {"accumulate": 2, "clip": 0.5}
ALIKE = [
    pytest.param({}, id="plain"),
    pytest.param(LINE, id="accumulated"),
    pytest.param({"precision": "fp32", "clip": None}, id="fp32"),
]


def engine_of(
    model: str | nn.Module, rests: bool, checkpointing: str = "none", **changes: Any
) -> ebbtide.Engine:
    module = zoo.build(model, checkpointing) if isinstance(model, str) else model
    engine = ebbtide.initialize(module, config_of(**changes))
    if not rests:
        engine._session.resting._possible = False
    return engine


def steps(engine: ebbtide.Engine, name: str, numbers: range) -> list[bool]:
    """Whether each pass rested."""
    rested = []
    for number in numbers:
        for micro in range(engine.config.accumulate):
            engine.backward(engine(**zoo.ZOO[name].batch(10 * number + micro)).loss)
            rested.append(engine._session.resting.now)
        engine.step()
    return rested


def books(engine: ebbtide.Engine) -> dict[str, Any]:
    engine.check_integrity()
    found = engine.stats()
    return {key: found[key] for key in ("peak_bytes", "tags", "moved_bytes", "traces", "diverged")}


@pytest.mark.parametrize(("name", "changes"), crossed(zoo.ZOO, ALIKE))
def test_numbers_and_books_are_those_of_passes_that_are_followed(name: str, changes: dict[str, Any]) -> None:
    found = []
    for rests in (True, False):
        engine = engine_of(name, rests, **changes)
        rested = steps(engine, name, range(5))
        assert all(rested[2:]) is any(rested) is rests
        found.append((engine.weights_sha256(), books(engine)))
        engine._tiers.ledger.count_anew()
        steps(engine, name, range(5, 7))
        found[-1] += (books(engine),)
        engine.close()
    assert found[0] == found[1]


BESIDE_A_HOST = {"host": {"memory": 8_000_000}}


@pytest.mark.parametrize(("name", "changes"), crossed(zoo.ZOO, ALIKE))
def test_where_chunks_could_move_they_are_held(name: str, changes: dict[str, Any]) -> None:
    shas = []
    for rests in (True, False):
        engine = engine_of(name, rests, **BESIDE_A_HOST, **changes)
        rested = steps(engine, name, range(6))
        assert all(rested[3 * engine.config.accumulate :]) is any(rested) is rests
        engine.check_integrity()
        assert all(may_leave(engine))
        found = engine.stats()
        assert found["peak_bytes"]["device"] <= found["budget_bytes"]["device"]
        shas.append((engine.weights_sha256(), found["moved_bytes"], found["traces"]))
        engine.close()
    assert shas[0] == shas[1]


def test_updates_that_were_foreseen_take_what_is_decided_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are put together before the host knows how gradients are scaled, or what a hook of the optimizer's does to
    the settings of some, or to a weight."""
    taken: list[bool] = []
    carry_out = chunk_update.carry_out
    monkeypatch.setattr(
        chunk_update, "carry_out", lambda *given: taken.append(carry_out(*given)) or taken[-1]
    )
    shas = []
    for rests in (True, False):
        module = zoo.build("gpt2")
        biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
        others = [p for n, p in module.named_parameters() if not n.endswith("bias")]
        engine = ebbtide.initialize(
            module, config_of(**BESIDE_A_HOST), [{"params": biases}, {"params": others}]
        )
        engine._session.resting._possible = rests
        steps(engine, "gpt2", range(4))
        assert bool(taken) is rests and all(taken)

        def change(optimizer: torch.optim.Optimizer, *_: Any, module: nn.Module = module) -> None:
            optimizer.param_groups[0]["lr"] *= 0.5
            with torch.no_grad():
                module.transformer.ln_f.weight.mul_(1.5)

        handle = engine.optimizer.register_step_pre_hook(change)
        steps(engine, "gpt2", range(4, 6))
        handle.remove()
        assert (False in taken) is rests
        taken.clear()
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(7)).loss * float("inf"))
        with pytest.raises(NonFiniteError):
            engine.step()
        steps(engine, "gpt2", range(8, 10))
        shas.append(engine.weights_sha256())
        engine.close()
        taken.clear()
    assert shas[0] == shas[1]


def may_leave(engine: ebbtide.Engine) -> list[bool]:
    """Of each parameter chunk."""
    store = engine._session.store
    return [not store.in_use(chunk) for chunk in store.chunks.values() if chunk.kind == "param"]


def evict_all(engine: ebbtide.Engine) -> None:
    """As much as a shortage of room could."""
    store, room = engine._session.store, engine._session.room
    for chunk in store.chunks.values():
        if chunk.kind == "param" and not store.in_use(chunk):
            room.evict(chunk)
            store.settle(chunk)


def test_held_chunks_may_leave_when_their_graph_is_gone() -> None:
    """After an evaluation in the midst, backward, a pass that raises, one whose loss is dropped; for another engine."""
    shas = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests, **BESIDE_A_HOST)
        steps(engine, "gpt2", range(4))
        batch = zoo.ZOO["gpt2"].batch(1)
        loss = engine(**batch).loss
        with torch.no_grad():
            engine(**batch)
        assert any(may_leave(engine)) is not rests
        engine.backward(loss)
        assert all(may_leave(engine))  # though somebody holds the loss
        engine.step()
        loss = engine(**batch).loss
        del loss
        assert all(may_leave(engine))
        evict_all(engine)
        with torch.no_grad():
            assert torch.isfinite(engine(**batch).loss)
        assert torch.isfinite(engine.module.lm_head.weight.sum())
        engine.backward(engine(**batch).loss)
        engine.step()
        steps(engine, "gpt2", range(2))
        handle = engine.module.transformer.h[1].register_forward_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            engine(**batch)
        handle.remove()
        assert all(may_leave(engine))
        other = ebbtide.initialize(zoo.build("gpt2"), config_of(host={"memory": 8_000_000}))
        assert not any(steps(engine, "gpt2", range(6, 8)))
        other.close()
        assert any(steps(engine, "gpt2", range(8, 12))) is rests
        engine.check_integrity()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_of_a_pass_that_raised_finds_its_weights(frozen: bool) -> None:
    """Somebody keeps what a module made, before another raises; or freezes it meanwhile."""
    grown = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests, **BESIDE_A_HOST)
        steps(engine, "gpt2", range(4))
        batch, layers, kept = zoo.ZOO["gpt2"].batch(5), engine.module.transformer.h, list[torch.Tensor]()
        handles = [
            layers[0].register_forward_hook(lambda _, __, made, kept=kept: kept.append(made)),  # type: ignore[misc]
            layers[1].register_forward_hook(lambda *_, all_=engine.module: all_.requires_grad_(not frozen)),
            layers[1].register_forward_hook(_raise),
        ]
        with pytest.raises(ZeroDivisionError):
            engine(**batch)
        for handle in handles:
            handle.remove()
        engine.module.requires_grad_(True)
        assert engine._session.resting.now is rests
        assert any(may_leave(engine)) is not rests
        evict_all(engine)
        [found] = torch.autograd.grad(kept[0].float().square().mean(), layers[0].ln_1.weight)
        grown.append(found)
        kept.clear()
        assert all(may_leave(engine)) or not rests
        steps(engine, "gpt2", range(6, 8))
        assert all(may_leave(engine))
        engine.check_integrity()
        engine.close()
    assert grown[0].isfinite().all() and torch.equal(grown[0], grown[1])


def test_a_graph_that_outlives_the_pass_finds_its_weights() -> None:
    """Two forward passes, and something wants room between their backward passes."""
    shas = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests, **BESIDE_A_HOST, **LINE)
        steps(engine, "gpt2", range(4))
        first, second = (engine(**zoo.ZOO["gpt2"].batch(number)).loss for number in (90, 91))
        engine.backward(first)
        assert engine._session.resting.now is rests
        evict_all(engine)
        engine.backward(second)
        engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spare", ["a chunk", "a chunk and all gradients"])
def test_gradients_that_wait_beside_their_chunks_stay_within_the_budget(accumulate: int, spare: str) -> None:
    """Counted by another way; with room for them the pass rests, else it is followed."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(20)))
    engine = engine_of(model, True, **BESIDE_A_HOST, accumulate=accumulate, precision="fp32")
    ledger, session = engine._tiers.ledger, engine._session

    def train(count: int) -> list[bool]:
        rested = []
        for number in range(count * accumulate):
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(number))
            engine.backward(engine(x).square().mean())
            rested.append(session.resting.now)
            engine.step()
        return rested

    train(3)
    assert session.cursor.plan is not None
    chunks = session.store.chunks.values()
    room = max(chunk.nbytes for chunk in chunks if chunk.kind == "param")
    if spare != "a chunk":
        room += sum(chunk.nbytes for chunk in chunks if chunk.kind == "grad")
    ledger.budgets["device"] = session.cursor.plan.highest + room
    ledger.count_anew()
    with Count(engine) as count:
        rested = train(3)
    assert all(rested) is any(rested) is (spare != "a chunk")
    assert count.peak <= ledger.budgets["device"]
    assert engine.stats()["peak_bytes"]["device"] <= ledger.budgets["device"]
    engine.close()


@pytest.mark.parametrize("eviction", ["lru", "list-order"])
def test_a_chunk_may_leave_between_its_update_and_its_books(
    eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the first state of another, where there is less room than a pass asks for that rests."""
    monkeypatch.setattr(FastPath, "has_room", lambda self, plan: all(self._updates.data.bound))
    shas = []
    for rests in (True, False):
        torch.manual_seed(0)
        engine = engine_of(Late(), rests, host={"memory": 30_000_000}, precision="fp32", eviction=eviction)
        generator = torch.Generator().manual_seed(1)

        def step(engine: ebbtide.Engine = engine, generator: torch.Generator = generator) -> None:
            engine.backward(engine(torch.randn(4, 128, generator=generator)))
            engine.step()

        for _ in range(4):
            step()
        plan = engine._session.cursor.plan
        assert plan is not None
        engine._tiers.ledger.budgets["device"] = plan.highest + 65_536
        engine.module.first = 0
        with torch.no_grad():
            engine(torch.zeros(4, 128))
        engine.module.first = 10
        step()
        assert engine._session.resting.now is rests
        engine.module.first = 0
        for _ in range(2):
            step()
        engine.check_integrity()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


class Late(nn.Module):
    """Some of its layers are used later only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(20))
        self.first = 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers[10:], *self.layers[self.first : 10]]:
            x = x + layer(x)
        return x.square().mean()


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpointed_regions_run_again_unnoticed(checkpointing: str) -> None:
    """But where torch's own hooks count what is saved in them: ours must be there in the first run and in the second."""
    shas = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests, checkpointing)
        assert any(steps(engine, "gpt2", range(5))) is (rests and checkpointing == "reentrant")
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_what_autograd_adds_out_of_place_is_counted_once() -> None:
    """Under a dispatch mode it adds nothing in place."""
    shas = []
    for rests in (True, False):
        engine = engine_of("t5", rests, **LINE)
        steps(engine, "t5", range(2))
        with Count(engine):
            assert all(steps(engine, "t5", range(2, 5))) is rests
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


class Skipping(nn.Module):
    """Leaves one of its layers out, when told to, or runs one twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.skip = self.again = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                x = x + layer(x).relu()
            if index == self.again:
                x = x + layer(x).relu()
        return x.float().square().mean()


def test_what_was_foreseen_of_a_step_that_was_interrupted_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one may be of a pass that reaches other parameters, and is followed."""

    def interrupted(*_: Any) -> str:
        monkeypatch.undo()
        raise KeyboardInterrupt

    shas = []
    for rests in (True, False):
        engine = engine_of(Skipping(), rests, precision="bf16", **BESIDE_A_HOST)
        engine.module.skip = 2
        for number, rows in enumerate([8] * 5 + [4]):
            x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(number)).bfloat16()
            engine.backward(engine(x))
            if number == 4:
                assert engine._session.resting.now is rests
                monkeypatch.setattr(Stepping, "_nonfinite", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
                engine.module.skip = -1
            else:
                engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("other", ["skip", "again"], ids=["other gradients", "other modules"])
def test_a_pass_that_is_another_has_the_next_followed_and_traced(other: str) -> None:
    found = []
    for rests in (True, False):
        engine = engine_of(Skipping(), rests, precision="bf16")
        rested = []
        for number in range(12):
            setattr(engine.module, other, 2 if number > 5 else -1)
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(number)).bfloat16()
            engine.backward(engine(x))
            rested.append(engine._session.resting.now)
            engine.step()
        found.append((engine.weights_sha256(), rested, engine.stats()["traces"]))
        engine.close()
    assert found[0][0] == found[1][0]
    assert found[0][1] == [False] * 2 + [True] * 5 + [False] * 2 + [True] * 3  # the seventh was another
    assert found[0][2] == found[1][2] == 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("early", [True, False], ids=["before any gradient", "after some"])
def test_a_backward_that_raises_leaves_nothing_behind(accumulate: int, early: bool) -> None:
    def raises(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    shas = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests, accumulate=accumulate)
        steps(engine, "gpt2", range(3))
        for number in range(accumulate):
            loss = engine(**zoo.ZOO["gpt2"].batch(100 + number)).loss
            if number < accumulate - 1:
                engine.backward(loss)
        parameters = dict(engine.module.named_parameters())
        last = "transformer.ln_f.weight" if early else "transformer.h.0.ln_1.weight"
        handle = parameters[last].register_hook(raises)
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss)
        handle.remove()
        held = HeldGradient if early and accumulate > 1 else type(None)
        assert all(type(parameter.grad) is held for parameter in parameters.values())
        assert engine._session.micro == (accumulate - 1 if early else 0)
        if early and accumulate > 1:
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(200)).loss)
            engine.step()
        rested = steps(engine, "gpt2", range(4, 6))
        assert all(rested) is any(rested) is rests
        shas.append(engine.weights_sha256())
        engine.check_integrity()
        engine.close()
    assert shas[0] == shas[1]


def test_values_writes_and_evaluation_between_passes() -> None:
    found = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests)
        steps(engine, "gpt2", range(3))
        seen = []
        for number in range(3, 6):
            with torch.no_grad():
                seen.append(engine(**zoo.ZOO["gpt2"].batch(number)).loss.item())
                engine.module.transformer.ln_f.weight.mul_(1.01)
                seen.append(float(engine.module.transformer.h[0].mlp.c_fc.weight.float().sum()))
            loss = engine(**zoo.ZOO["gpt2"].batch(number)).loss
            engine.backward(loss)
            with engine.gradients("transformer.h.0.mlp.c_fc.weight") as gradients:
                seen.append(float(gradients["transformer.h.0.mlp.c_fc.weight"].float().norm()))
            engine.step()
        found.append((seen, engine.weights_sha256()))
        engine.close()
    assert found[0] == found[1]


def test_an_activation_that_is_written_before_backward_is_refused() -> None:
    engine = engine_of(Skipping(), True, precision="bf16")
    x = torch.randn(8, 32).bfloat16()
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    assert engine._session.resting.now
    kept: list[torch.Tensor] = []
    handle = engine.module.layers[1].register_forward_hook(lambda module, given, out: kept.append(given[0]))
    loss = engine(x)
    kept[0].add_(1)
    handle.remove()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
    engine.backward(engine(x))
    engine.step()
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [{"device": {"memory": 4_000_000}}, {"master": "separate"}, {"updates": "in-backward", "clip": None}],
    ids=["a budget", "gradients in the parameters' space", "updates"],
)
def test_passes_in_which_something_moves_are_followed(changes: dict[str, Any]) -> None:
    engine = engine_of("gpt2", True, **changes)
    assert not any(steps(engine, "gpt2", range(4)))
    engine.close()
