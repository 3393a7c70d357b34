"""Forward passes that wait for backward while others come, and such as nobody goes back from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import reference
from ebbtide.errors import BudgetError
from harness import LR, Count, config_of
from sampling import crossed, few
from zoo import Loss

WIDTH = 32


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> Loss:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return Loss(x.square().mean(), ())


def batch(number: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def rows_of(number: int) -> int:
    return 10 + 8 * number


def validate(engine: Any, number: int) -> list[float]:
    """Without torch.no_grad: while one batch runs, the last one's loss is still there."""
    found = []
    for rows in (40, 20, 50):
        loss = engine(batch(100 + number, rows)).loss
        found.append(loss.item())
    return found


def dropped(engine: Any, number: int) -> list[float]:
    return [engine(batch(100 + number, 45)).loss.item()]


def summed(engine: Any, number: int) -> torch.Tensor:
    """Two losses, of which now the first is larger, now the second."""
    return engine(batch(number, 16 + 5 * number)).loss + engine(batch(50 + number, 22)).loss


Before = Callable[[Any, int], list[float]]
MEMORY = (*range(30_000, 260_000, 10_000), 4_000_000)
UPDATES = pytest.mark.parametrize("updates", ["exact", "in-backward"])


def engine_of(memory: int, updates: str) -> ebbtide.Engine:
    tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
    return ebbtide.initialize(Deep(), config_of(precision="fp32", clip=None, updates=updates, **tiers))


def train(engine: ebbtide.Engine, before: Before, memory: int) -> list[list[float]]:
    losses = []
    for number in range(4):
        with Count(engine) as count:
            losses.append(before(engine, number))
            loss = engine(batch(number, rows_of(number))).loss
            engine.backward(loss)
            losses.append([loss.item()])
            engine.step()
            del loss
        assert count.peak <= memory, (memory, number, count.peak - memory)
    engine.check_integrity()
    return losses


class Around(nn.Module):
    """The plain loop's, of a loss of several passes."""

    def __init__(self, loss_of: Callable[[Deep, int], torch.Tensor]) -> None:
        super().__init__()
        self.deep, self.loss_of = Deep(), loss_of

    def named_parameters(self, *given: Any, **named: Any) -> Any:
        return self.deep.named_parameters(*given, **named)

    def forward(self, number: int) -> Loss:
        return Loss(self.loss_of(self.deep, number), ())


def plain(loss_of: Callable[[Deep, int], torch.Tensor]) -> str:
    return reference.train(Around(loss_of), lambda n: {"number": n}, 4, precision="fp32", lr=LR)[0]


def losses_of(engine: Any, number: int, rows: tuple[int, ...]) -> list[torch.Tensor]:
    return [engine(batch(number + 20 * k, count)).loss for k, count in enumerate(rows)]


@UPDATES
@pytest.mark.parametrize("before", [validate, dropped])
def test_of_those_nobody_goes_back_from_nothing_stays(before: Before, updates: str) -> None:
    """All is as without them, within the budget in every step."""
    engine = engine_of(MEMORY[-1], updates)
    alone = train(engine, lambda engine, number: [], MEMORY[-1])
    expected = engine.weights_sha256()
    engine.close()
    ran, found = 0, []
    for memory in few(MEMORY, 8):
        engine = engine_of(memory, updates)
        try:
            found.append(train(engine, before, memory))
            assert engine.weights_sha256() == expected
            ran += 1
        except BudgetError as error:
            assert error.short > 0
        finally:
            engine.close()
    assert ran > 3
    assert all(losses == found[0] and losses[1::2] == alone[1::2] for losses in found)


def test_two_that_wait_are_foreseen_in_the_first_step_too() -> None:
    """Of different sizes, and more in some steps than in others."""
    expected = plain(summed)
    ran = 0
    for memory in few(MEMORY, 8):
        engine = engine_of(memory, "exact")
        try:
            for number in range(4):
                with Count(engine) as count:
                    if number == 2:
                        dropped(engine, number)
                    loss = summed(engine, number)
                    engine.backward(loss)
                    engine.step()
                    del loss
                assert count.peak <= memory, (memory, number, count.peak - memory)
            assert engine.weights_sha256() == expected
            engine.check_integrity()
            ran += 1
        except BudgetError as error:
            assert error.short > 0
        finally:
            engine.close()
    assert ran > 3


@pytest.mark.parametrize(
    ("rows", "last_first"), crossed([(24, 4), (24, 14), (14, 24), (20, 20, 6)], [False, True])
)
def test_each_may_have_a_backward_of_its_own(rows: tuple[int, ...], last_first: bool) -> None:
    """In any order, and whichever is the largest."""
    expected = plain(lambda deep, n: sum(losses_of(deep, n, rows), start=torch.zeros(())))
    ran = 0
    for memory in few(MEMORY, 8):
        engine = engine_of(memory, "exact")
        try:
            for number in range(4):
                with Count(engine) as count:
                    losses = losses_of(engine, number, rows)
                    while losses:
                        engine.backward(losses.pop(-1 if last_first else 0))
                    engine.step()
                assert count.peak <= memory, (memory, number, count.peak - memory)
            engine.check_integrity()
            assert not last_first or engine.weights_sha256() == expected
            ran += 1
        except BudgetError as error:
            assert error.short > 0
        finally:
            engine.close()
    assert ran > 3


@pytest.mark.parametrize("memory", [60_000, 4_000_000])
def test_one_that_does_not_fit_beside_another_changes_nothing(memory: int) -> None:
    engine, refused = engine_of(memory, "exact"), 0
    for number in range(4):
        waits = engine(batch(number, 10)).loss
        try:
            engine(batch(60 + number, 20))
        except BudgetError as error:
            refused += 1
            assert error.tier == "device" and error.short > 0
        del waits
        engine.backward(engine(batch(number, 10)).loss)
        engine.step()
    engine.check_integrity()
    assert refused == (4 if memory == 60_000 else 0)
    assert engine.weights_sha256() == plain(lambda deep, number: deep(batch(number, 10)).loss)
    engine.close()


def probed(run: Any, module: Deep, number: int) -> torch.Tensor:
    """Outputs are dropped, and one goes back all the same."""
    seen: list[torch.Tensor] = []
    handle = module.layers[3].register_forward_hook(lambda _, args, out: seen.append(out))
    for part in range(2):
        run(batch(number + 30 * part, 12))
    handle.remove()
    return sum((one.square().mean() for one in seen), start=torch.zeros(()))


@pytest.mark.parametrize("offload", ["off", "all"])
def test_a_loss_of_what_a_hook_kept(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.tracing.saved_storages.SMALLEST", 1024)
    expected = plain(lambda deep, number: probed(deep, deep, number))
    for memory in (63_000, 120_000, 4_000_000):
        tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
        config = config_of(precision="fp32", clip=None, offload_activations=offload, **tiers)
        engine = ebbtide.initialize(Deep(), config)
        for number in range(4):
            engine.backward(probed(engine, engine.module, number))
            engine.step()
        assert engine.weights_sha256() == expected
        engine.check_integrity()
        engine.close()
