"""A budget in one try: the engine names one that is enough for a loop, or finds it as it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import ebbtide
import zoo
from ebbtide.config import Config
from ebbtide.engine import open_tiers
from ebbtide.engine.training import Engine
from ebbtide.errors import BudgetError, ConfigError, UnsupportedError
from harness import Count, config_of

IMAGINES = True

WIDTH, ROWS, STEPS = 64, 16, 4
Budget = int | str


class Deep(nn.Module):
    def __init__(self, seed: int, out: int = WIDTH, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Checkpointed(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


def drawn(number: int, *shape: int) -> torch.Tensor:
    """A batch: what it took to make it is the loader's, and it counts from when the pass begins."""
    with _disable_current_modes():
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(number))
    for count in COUNTS:
        count._see(made)
    return made


COUNTS: list[Count] = []


class Engines:
    """Those of one loop, which share a budget."""

    def __init__(self, budget: Budget) -> None:
        config = config_of(precision="fp32", chunk_size="16KiB", clip=None, device={"memory": budget})
        self._settings = Config.read(config)
        self._tiers = open_tiers(self._settings)
        self.made: list[Engine] = []

    def __call__(self, module: nn.Module) -> Engine:
        self.made.append(Engine(module, self._settings, tiers=self._tiers))
        return self.made[-1]

    def close(self) -> None:
        for engine in self.made:
            engine.close()


Loop = Callable[[Engines], tuple[Any, Callable[[int], None]]]
LOOPS: dict[str, Loop] = {}


def loop(make: Loop) -> Loop:
    """It makes its engines, and gives what they say is enough and a step."""
    LOOPS[make.__name__] = make
    return make


@loop
def a_gan(engines: Engines) -> tuple[Any, Callable[[int], None]]:
    maker, judge = engines(Deep(1)), engines(Deep(2, out=1))
    x = drawn(0, ROWS, WIDTH)

    def judged(real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return F.softplus(-judge.module(real)).mean() + F.softplus(judge.module(made)).mean()

    fit = maker.fit(x, loss=lambda out: out.mean()) + judge.fit((x, x), run=judged)

    def step(number: int) -> None:
        real, noise = drawn(number, ROWS, WIDTH), drawn(100 + number, ROWS, WIDTH)
        made = maker(noise)
        judge.backward(F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean())
        judge.step()
        judge.optimizer.zero_grad()
        maker.backward(F.softplus(-judge(made)).mean())
        maker.step()
        judge.optimizer.zero_grad()

    return fit, step


@loop
def a_policy_with_its_reference(engines: Engines) -> tuple[Any, Callable[[int], None]]:
    return beside_its_reference(engines, Deep(1))


@loop
def a_checkpointed_policy_with_its_reference(engines: Engines) -> tuple[Any, Callable[[int], None]]:
    """Backward takes far more than what waits for it, and chunks of the reference have its place meanwhile."""
    return beside_its_reference(engines, Checkpointed(1), 8 * ROWS)


def beside_its_reference(
    engines: Engines, model: nn.Module, rows: int = ROWS
) -> tuple[Any, Callable[[int], None]]:
    reference = Deep(1).requires_grad_(False)
    policy, frozen = engines(model), engines(reference)
    x = drawn(0, rows, WIDTH)
    fit = policy.fit(x, loss=lambda out: F.softplus(-out.log_softmax(-1).sum(-1)).mean()) + frozen.fit(
        evaluate=[x]
    )

    def step(number: int) -> None:
        x = drawn(number, rows, WIDTH)
        found = policy(x).log_softmax(-1).sum(-1)
        with torch.no_grad():
            before = frozen(x).log_softmax(-1).sum(-1)
        policy.backward(F.softplus(before - found).mean())
        policy.step()

    return fit, step


@loop
def an_actor_and_its_critic(engines: Engines) -> tuple[Any, Callable[[int], None]]:
    actor, critic = engines(Deep(1, out=4)), engines(Deep(2, out=1))
    x = drawn(0, ROWS, WIDTH)
    fit = actor.fit(x, loss=lambda out: out.log_softmax(-1).mean()) + critic.fit(
        x, loss=lambda out: out.square().mean()
    )

    def step(number: int) -> None:
        x = drawn(number, ROWS, WIDTH)
        values, policy = critic(x)[:, 0], actor(x).log_softmax(-1)
        advantage = (1.0 - values).detach()
        actor.backward(-(policy[:, 0] * advantage).mean())
        critic.backward((values - 1.0).square().mean())
        actor.step()
        critic.step()

    return fit, step


@loop
def a_validation_of_twice_the_batch(engines: Engines) -> tuple[Any, Callable[[int], None]]:
    engine = engines(Deep(1))
    fit = engine.fit(
        drawn(0, ROWS, WIDTH), loss=lambda out: out.square().mean(), evaluate=[drawn(0, 8 * ROWS, WIDTH)]
    )

    held: list[torch.Tensor] = [torch.empty(0)]

    def step(number: int) -> None:
        engine.backward(engine(drawn(number, ROWS, WIDTH)).square().mean())
        engine.step()
        with torch.no_grad():
            for _ in range(2):
                held[0] = engine(drawn(number, 8 * ROWS, WIDTH))  # the last one is there until then
        held[0] = torch.empty(0)

    return fit, step


@loop
def an_lstm_with_a_loss_outside(engines: Engines) -> tuple[Any, Callable[[int], None]]:
    engine = engines(Recurrent())
    targets = torch.zeros(ROWS, 12, dtype=torch.long)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.transpose(1, 2), targets)

    fit = engine.fit(drawn(0, ROWS, 12, WIDTH), loss=loss)

    def step(number: int) -> None:
        engine.backward(loss(engine(drawn(number, ROWS, 12, WIDTH))))
        engine.step()

    return fit, step


@contextlib.contextmanager
def counted(engines: Engines) -> Iterator[Count | None]:
    with Count(engines.made[0]) as count:  # type: ignore[arg-type]
        COUNTS.append(count)
        try:
            yield count
        finally:
            COUNTS.clear()


def run(make: Loop, budget: Budget) -> tuple[list[str], Any, int, dict[str, Any]]:
    engines = Engines(budget)
    try:
        fit, step = make(engines)
        most = 0
        for number in range(STEPS):
            with counted(engines) as count:
                step(number)
            assert count is not None
            if number:  # what a loop computes outside of the module shows in its first step (documented)
                most = max(most, count.peak)
            for engine in engines.made:
                engine.check_integrity()
        stats = engines.made[0].stats()
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        return [one.weights_sha256() for one in engines.made], fit, most, stats
    finally:
        engines.close()


@pytest.mark.parametrize("name", LOOPS)
def test_the_budget_that_is_named_is_enough(name: str) -> None:
    expected, fit, _, _ = run(LOOPS[name], 64_000_000)
    shas, again, most, _ = run(LOOPS[name], fit.least)
    assert shas == expected and most <= fit.least and again.least == fit.least
    assert fit.least < fit.half < fit.whole
    shas, _, most, _ = run(LOOPS[name], fit.half)
    assert shas == expected and most <= fit.half
    assert str(fit).startswith(f"device.memory = {fit.least} is enough")


@pytest.mark.parametrize("wish", ["least", "half"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_budget_that_is_found(name: str, wish: str) -> None:
    expected, fit, _, _ = run(LOOPS[name], 64_000_000)
    shas, _, most, stats = run(LOOPS[name], wish)
    assert shas == expected
    assert most <= stats["budget_bytes"]["device"] <= fit.whole * 1.05
    if wish == "least":
        assert stats["budget_bytes"]["device"] <= fit.least * (1.5 if name == "a_gan" else 1)


def test_a_reference_has_the_room_that_its_policy_leaves_while_it_waits() -> None:
    """Not the peak of one beside the peak of the other."""
    engines = Engines(64_000_000)
    try:
        policy, frozen = engines(Deep(1)), engines(Deep(1).requires_grad_(False))
        x = drawn(0, ROWS, WIDTH)
        alone, beside = policy.fit(x, loss=lambda out: out.log_softmax(-1).mean()), frozen.fit(evaluate=[x])
        assert beside.stays < beside.least // 3
        assert (alone + beside).least == (beside + alone).least == alone.least + beside.stays
        assert (alone + alone).least == 2 * alone.least  # each may go back through the other
    finally:
        engines.close()


def test_chunks_of_a_reference_leave_before_its_policy_is_said_to_take_their_place() -> None:
    """The policy's level is that of its backward all the while, as in a pass whose plan it has left."""
    engines = Engines(700_000)
    try:
        policy, frozen = engines(Deep(1)), engines(Deep(1).requires_grad_(False))
        policy.backward(policy(drawn(0, ROWS, WIDTH)).mean())
        policy.step()
        loss = policy(drawn(1, ROWS, WIDTH)).mean()
        room = policy._session.room
        room.claims.while_waiting = room.claims.level
        room.raise_level(300_000)
        with torch.no_grad():
            frozen(drawn(1, ROWS, WIDTH))
        policy.backward(loss)
        policy.step()
        assert policy.stats()["peak_bytes"]["device"] <= 700_000
        policy.check_integrity()
    finally:
        engines.close()


def test_another_engine_of_the_same_config_shares_a_budget_that_has_grown() -> None:
    """On a CPU the device's grows at the host's cost, and the second engine asks for all of that."""
    config = config_of(precision="fp32", device={"memory": "least"}, host={"memory": "64MB"}, clip=None)
    first = ebbtide.initialize(Deep(1), config)
    try:
        first.backward(first(drawn(0, ROWS, WIDTH)).mean())
        first.step()
        second = ebbtide.initialize(Deep(2).requires_grad_(False), config)
        with torch.no_grad():
            assert second(drawn(0, ROWS, WIDTH)).isfinite().all()
        second.close()
    finally:
        first.close()


def test_the_least_is_not_far_from_what_a_refusal_names() -> None:
    fit = run(LOOPS["a_validation_of_twice_the_batch"], 64_000_000)[1]
    with pytest.raises(BudgetError):
        run(LOOPS["a_validation_of_twice_the_batch"], fit.least - 60_000)


def test_what_cannot_be_said() -> None:
    engines = Engines(64_000_000)
    engine = engines(Deep(1))
    try:
        with pytest.raises(ConfigError, match="at least one batch"):
            engine.fit()
        assert "fit((x, y))" in str(engine.fit(drawn(0, ROWS, WIDTH), drawn(1, ROWS, WIDTH)))
        assert "fit((x, y))" not in str(engine.fit(drawn(0, ROWS, WIDTH)))
        twice = engine.fit(evaluate=[drawn(0, ROWS, WIDTH)], run=lambda x: engine.module(torch.cat([x, x])))
        assert twice.least > engine.fit(evaluate=[drawn(0, ROWS, WIDTH)]).least
        engine.module.head.forward = lambda x: x * x.sum().item()  # type: ignore[method-assign]
        with pytest.raises(UnsupportedError, match=r"cannot be imagined.*least"):
            engine.fit(drawn(0, ROWS, WIDTH))
    finally:
        engines.close()


def test_words_for_a_budget() -> None:
    with pytest.raises(ConfigError, match=r"'auto', 'least', 'half' or a size.*did you mean 'least'"):
        Config.read({"device": {"memory": "leas"}})
    engine = ebbtide.initialize(Deep(1), config_of(precision="fp32", device={"memory": "least"}))
    try:
        with pytest.raises(ConfigError, match="has least, this one asks for half"):
            ebbtide.initialize(Deep(2), config_of(precision="fp32", device={"memory": "half"}))
    finally:
        engine.close()


def test_a_budget_that_is_found_takes_nothing_of_a_host_that_was_set(tmp_path: Path) -> None:
    """RAM is both, and the host has a size of its own: beside SSD it is a small one."""
    config = {
        "precision": "fp32",
        "device": {"kind": "cpu", "memory": "least"},
        "host": {"memory": "4MB"},
        "ssd": {"memory": "64MB", "folder": str(tmp_path)},
        "chunk_size": "32KiB",
    }
    batch = zoo.ZOO["gpt2"].batch(0)
    with ebbtide.initialize(zoo.build("gpt2"), config) as engine:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        stats = engine.stats()
        assert stats["budget_bytes"]["host"] == 4_000_000
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
        assert stats["peak_bytes"]["device"] > 0
