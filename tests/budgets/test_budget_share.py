"""Engines that train in turns in one process share a budget: whatever each alone would take, both go on, and no number
changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
import zoo
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import BudgetError
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from harness import Count, config_of
from sampling import crossed, some

Make = Callable[..., list[Engine]]
SEEDS = (0, 1)


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[Engine] = []

    def start(memory: int | str, count: int = 2, **changes: Any) -> list[Engine]:
        device = {"memory": memory} | changes.pop("device", {})
        config = ebbtide.Config.read(config_of(device=device, **changes))
        tiers = open_tiers(config)
        found = [Engine(zoo.build("gpt2", seed=seed), config, tiers=tiers) for seed in SEEDS[:count]]
        engines.extend(found)
        return found

    yield start
    for engine in engines:
        engine.close()


def batch(number: int, times: int = 1) -> dict[str, Any]:
    return {key: torch.cat([value] * times) for key, value in zoo.ZOO["gpt2"].batch(number).items()}


def turn(engine: Engine, number: int, times: int = 1, micro: int = 1) -> None:
    for part in range(micro):
        engine.backward(engine(**batch(10 * number + part, times)).loss)
    engine.step()
    engine.check_integrity()


def alone(make: Make, turns: list[int], **changes: Any) -> list[str]:
    """Weights of engines that have everything. `turns`: by step, how many times the zoo's batch."""
    found = []
    for engine in make("auto", **changes):
        for number, times in enumerate(turns):
            turn(engine, number, times, changes.get("accumulate", 1))
        found.append(engine.weights_sha256())
    return found


def joined_late(make: Make, first: int, steps: int, times: int, **changes: Any) -> list[str]:
    """Weights of engines that have everything: one of all steps, one that begins at step `first` with larger batches."""
    whole, other = make("auto", **changes)
    for number in range(steps):
        turn(whole, number)
    for number in range(first, steps):
        turn(other, number, times)
    return [whole.weights_sha256(), other.weights_sha256()]


def held(engine: Engine) -> int:
    return int(engine.stats()["device_state_chunks"])


@pytest.mark.parametrize(
    ("memory", "changes"),
    crossed(
        [1_600_000, 2_200_000, 3_000_000, 4_000_000, 6_000_000],
        [
            pytest.param({}, id="exact"),
            pytest.param({"updates": "in-backward", "clip": None}, id="in-backward"),
            pytest.param({"master": "separate"}, id="separate"),
            pytest.param({"layout": "page"}, id="page"),
        ],
    ),
)
def test_in_turns_under_any_budget(make: Make, memory: int, changes: dict[str, Any]) -> None:
    steps = 4
    expected = alone(make, [1] * steps, **changes)
    engines = make(memory, **changes)
    homes = []
    with Count(engines[0]) as count:
        for number in range(steps):
            for engine in engines:
                turn(engine, number)
            homes.append([held(engine) for engine in engines])
    assert [engine.weights_sha256() for engine in engines] == expected
    assert max(count.peak, *(engine.stats()["peak_bytes"]["device"] for engine in engines)) <= memory
    assert homes[-1] == homes[-2], "state goes to and fro"
    assert engines[0].stats()["moved_bytes"]["host_to_device"]


def test_micro_batches_in_turns(make: Make) -> None:
    """State may have to leave while gradients wait for more."""
    expected = alone(make, [1] * 3, accumulate=2)
    engines = make(3_000_000, accumulate=2)
    for number in range(3):
        for part in range(2):
            for engine in engines:
                engine.backward(engine(**batch(10 * number + part)).loss)
        for engine in engines:
            engine.step()
            engine.check_integrity()
    assert [engine.weights_sha256() for engine in engines] == expected


@pytest.mark.parametrize("updates", ["exact", "in-backward", "lock-free"])
def test_one_that_needs_more_gets_it(make: Make, updates: str) -> None:
    """The first engine has taken what its small batches leave; the other's large ones do not fit beside that."""
    changes = {"updates": updates, "clip": None}
    first, second = make(4_000_000, **changes)
    for number in range(3):
        turn(first, number)
    before = held(first)
    for number in range(3, 7):
        turn(second, number, times=2)
        turn(first, number)
    assert 0 < held(first) < before or updates == "lock-free"
    if updates != "lock-free":  # there numbers depend on who was faster
        found = [first.weights_sha256(), second.weights_sha256()]
        assert found == joined_late(make, 3, 7, 2, **changes)


def test_what_one_leaves_the_other_has(make: Make) -> None:
    first, second = make(4_000_000)
    for number in range(3):
        turn(second, number)
        turn(first, number)
    before = held(first)
    second.close()
    for number in range(3, 6):
        turn(first, number)
    assert held(first) > before
    (whole,) = make("auto", count=1)
    for number in range(6):
        turn(whole, number)
    assert first.weights_sha256() == whole.weights_sha256()


def forward(engine: Engine, number: int) -> torch.Tensor:
    loss: torch.Tensor = engine(**batch(10 * number)).loss
    return loss


def interleaved(engines: list[Engine], number: int, order: str) -> None:
    """Forward, backward and step of both engines, each written as its letter and its number."""
    losses: dict[str, torch.Tensor] = {}
    for deed, which in order.split():
        engine = engines[int(which)]
        if deed == "f":
            losses[which] = forward(engine, number)
        elif deed == "b":
            engine.backward(losses.pop(which))
        else:
            engine.step()
        engine.check_integrity()


ORDERS = ["f0 f1 b0 b1 s0 s1", "f0 f1 b1 b0 s1 s0", "f0 b0 f1 s0 b1 s1", "f0 f1 b1 s1 b0 s0"]


@pytest.mark.parametrize(("memory", "order"), crossed([3_000_000, 4_000_000, 6_000_000], ORDERS))
def test_passes_within_each_other(make: Make, memory: int, order: str) -> None:
    """What one has saved for backward counts while the other computes."""
    expected = alone(make, [1] * 4)
    engines = make(memory)
    with Count(engines[0]) as count:
        for number in range(4):
            interleaved(engines, number, order)
    assert [engine.weights_sha256() for engine in engines] == expected
    assert max(count.peak, *(engine.stats()["peak_bytes"]["device"] for engine in engines)) <= memory


def test_evaluation_within_anothers_pass(make: Make) -> None:
    (whole,) = make("auto", count=1)
    for number in range(4):
        turn(whole, number)
    memory = 2_400_000
    (trained,) = make(memory, count=1)
    teacher = zoo.build("gpt2", seed=1).requires_grad_(False)
    config = ebbtide.Config.read(config_of(device={"memory": "auto"}))
    frozen = Engine(teacher, config, tiers=trained._tiers)
    try:
        with Count(trained) as count:
            for number in range(4):
                loss = forward(trained, number)
                with torch.no_grad():
                    frozen(**batch(number))
                trained.backward(loss)
                trained.step()
                trained.check_integrity()
                frozen.check_integrity()
        assert trained.weights_sha256() == whole.weights_sha256()
        assert count.peak <= memory
        (single,) = make(memory, count=1)
        for number in range(4):
            turn(single, number)
        assert held(trained) == held(single) > 0, "nobody gives up state for what an evaluation may take"
    finally:
        frozen.close()


def test_passes_that_do_not_fit_within_each_other_are_refused(make: Make) -> None:
    """The engine that asks for more is, the other's pass goes on."""
    expected = alone(make, [1] * 3)
    engines = make(1_600_000)
    for number in range(3):
        loss = forward(engines[0], number)
        with pytest.raises(BudgetError, match="device: this iteration needs at least"):
            forward(engines[1], number)
        engines[0].backward(loss)
        engines[0].step()
        turn(engines[1], number)
        engines[0].check_integrity()
    assert [engine.weights_sha256() for engine in engines] == expected


def test_an_engine_that_is_closed_within_anothers_pass(make: Make) -> None:
    first, second = make(3_000_000)
    for number in range(3):
        interleaved([first, second], number, ORDERS[0])
    loss = forward(first, 3)
    forward(second, 3)
    second.close()
    first.backward(loss)
    first.step()
    for number in range(4, 6):
        turn(first, number)
    (single,) = make(3_000_000, count=1)
    for number in range(3):
        turn(single, number)
    assert held(first) == held(single)


def test_an_engine_in_place_of_another(make: Make) -> None:
    """Between two passes of the first: it has what the other had."""
    first, second = make(4_000_000)
    for number in range(3):
        turn(second, number)
        turn(first, number)
    before = held(first)
    second.close()
    config = ebbtide.Config.read(config_of(device={"memory": "auto"}))
    small = Engine(torch.nn.Linear(8, 8), config, tiers=first._tiers)
    try:
        for number in range(3, 6):
            turn(first, number)
        assert held(first) > before
    finally:
        small.close()


def test_a_forward_pass_that_led_nowhere(make: Make) -> None:
    """What it kept from the other engine is of use again when the next pass is over."""
    engines = make(3_000_000)
    for number in range(3):
        for engine in engines:
            turn(engine, number)
    before = sum(held(engine) for engine in engines)
    forward(engines[0], 3)
    for number in range(3, 6):
        for engine in reversed(engines):
            turn(engine, number)
    for number in range(6, 8):
        for engine in engines:
            turn(engine, number)
    assert sum(held(engine) for engine in engines) == before


def test_values_are_read_beside_a_pass_that_nobody_has_foreseen(make: Make) -> None:
    (first,) = make(2_400_000, count=1, master="separate")
    turn(first, 0)
    config = ebbtide.Config.read(config_of(device={"memory": "auto"}))
    second = Engine(Wayward(zoo.build("gpt2", seed=1)), config, tiers=first._tiers)
    try:
        loss = forward(second, 0)
        found = first.weights_sha256()
        assert first.stats()["peak_bytes"]["device"] < 2_390_000, "a guess is no use"
        second.backward(loss)
        second.step()
    finally:
        second.close()
    (whole,) = make("auto", count=1, master="separate")
    turn(whole, 0)
    assert found == whole.weights_sha256()


class Wayward(torch.nn.Module):
    """Looks at numbers on its way, so that its first pass is not imagined."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if float(input_ids.float().sum()) < 0:
            raise ValueError("ids are positive")
        return self.inner(input_ids=input_ids, labels=labels)


def test_in_the_middle_of_a_pass_that_nobody_has_foreseen(make: Make) -> None:
    (first,) = make(2_400_000, count=1)
    for number in range(3):
        turn(first, number)
    assert held(first)
    config = ebbtide.Config.read(config_of(device={"memory": "auto"}))
    second = Engine(Wayward(zoo.build("gpt2", seed=1)), config, tiers=first._tiers)
    try:
        for number in range(3, 6):
            turn(second, number)
            turn(first, number)
        found = second.weights_sha256()
        assert second.stats()["peak_bytes"]["device"] <= 2_400_000
    finally:
        second.close()
    assert [first.weights_sha256(), found] == joined_late(make, 3, 6, 1)


def test_what_fits_nowhere_is_refused_and_both_go_on(make: Make) -> None:
    expected = alone(make, [1] * 4)
    engines = make(3_000_000)
    for number in range(4):
        for engine in engines:
            with pytest.raises(BudgetError, match="device: this iteration needs at least"):
                engine(**batch(number, times=8))
            engine.check_integrity()
            turn(engine, number)
    assert [engine.weights_sha256() for engine in engines] == expected


def test_an_interrupt_while_state_leaves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(4_000_000)
    for number in range(3):
        turn(first, number)
    go_home, calls = FetchOnDemand.go_home, []

    def interrupted(self: FetchOnDemand, chunk: Any, tier: str) -> None:
        calls.append(chunk)
        if len(calls) == 2:
            raise KeyboardInterrupt
        go_home(self, chunk, tier)

    monkeypatch.setattr(FetchOnDemand, "go_home", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second(**batch(3, times=2))
    monkeypatch.undo()
    for engine in (first, second):
        engine.check_integrity()
    for number in range(3, 6):
        turn(second, number, times=2)
        turn(first, number)
    found = [first.weights_sha256(), second.weights_sha256()]
    assert found == joined_late(make, 3, 6, 2)


@pytest.mark.parametrize("host", [0, 3_000_000])
def test_with_ssd(make: Make, folder: Path, host: int) -> None:
    expected = alone(make, [1] * 4)
    places = {"host": {"memory": host}, "ssd": {"memory": 64 << 20, "folder": str(folder)}}
    engines = make(4_500_000, **places)
    for number in range(4):
        for engine in engines:
            turn(engine, number)
    assert [engine.weights_sha256() for engine in engines] == expected


@pytest.mark.parametrize(
    "host", some([3_000_000, 3_850_000, 4_000_000, 4_200_000, 4_400_000, 4_600_000, 4_800_000], 3)
)
def test_a_host_without_room_for_what_is_given_up(make: Make, host: int) -> None:
    """What leaves only in part comes back, whatever that makes of the one who asked."""
    first, second = make(4_000_000, host={"memory": host})
    for number in range(3):
        turn(first, number)
    for number in range(3, 6):
        try:
            turn(second, number, times=2)
        except BudgetError:
            second.check_integrity()
        homes = first._session.homes
        for index, home in enumerate(first._session.store.state_homes):
            for chunk in first._session.store.state_chunks(index):
                assert chunk.valid_on(home) or not homes._settled
        turn(first, number)
    (whole,) = make("auto", count=1)
    for number in range(6):
        turn(whole, number)
    assert first.weights_sha256() == whole.weights_sha256()


def test_copies_that_another_engine_can_drop_refuse_nobody(make: Make) -> None:
    """Parameters were on the device and on the host, and one more engine was told that there is no room."""
    engines = make(1_500_000)
    for number in range(2):
        for engine in engines:
            turn(engine, number)
    with engines[0].resident(), engines[1].resident():
        pass
    for engine in engines:
        engine.synchronize()
    tiers = engines[0]._tiers
    wide = torch.nn.Sequential(torch.nn.Linear(140, 1024), torch.nn.Linear(1024, 8))
    free = tiers.ledger.budgets["device"] - tiers.ledger.reserved["device"]
    assert free < 4 * 140 * 1024, "else it would have room anyway"
    config = ebbtide.Config.read(config_of(device={"memory": 1_500_000}, precision="fp32"))
    third = Engine(wide, config, tiers=tiers)
    try:
        for number in range(2, 4):
            third.backward(third(torch.randn(4, 140)).square().mean())
            third.step()
            for engine in engines:
                turn(engine, number)
    finally:
        third.close()
    assert [engine.weights_sha256() for engine in engines] == alone(make, [1] * 4)
