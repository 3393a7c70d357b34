"""Forward passes without gradients that are larger than training's: foreseen, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebbtide
from ebbtide.config import Config
from ebbtide.engine import Engine, open_tiers
from ebbtide.errors import BudgetError
from ebbtide.runtime.planning.evaluation_memory import larger
from group import group_of
from harness import Count, config_of
from sampling import everything, few, some

WIDTH, TOKENS = 32, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.runs = 0

    def forward(self, ids: torch.Tensor, cache: list[object] | None = None) -> torch.Tensor:
        self.runs += 1
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids(rows: int, length: int = 8) -> torch.Tensor:
    return torch.randint(0, TOKENS, (rows, length), generator=torch.Generator().manual_seed(rows))


def engine_of(memory: int, host: int | str = "64MB") -> ebbtide.Engine:
    tight = {"device": {"memory": memory}, "host": {"memory": host}, "chunk_size": "4KiB"}
    settings = Config.read(config_of(precision="fp32", **tight))
    return Engine(Net(), settings, tiers=open_tiers(settings))


def train(engine: ebbtide.Engine, rows: int = 2) -> None:
    engine.backward(engine(ids(rows)))
    engine.step()


def evaluate(engine: ebbtide.Engine, given: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """The loss, or None where it is refused; the most bytes that were there, by a count of its own."""
    with Count(engine) as count, torch.no_grad():
        count.given({"ids": given})
        try:
            return engine(given), count.peak
        except BudgetError:
            return None, count.peak


def noted(engine: ebbtide.Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signatures of passes that are imagined from here on."""
    imagined: list[str] = []
    imagine = engine._session.imagining.imagine
    monkeypatch.setattr(
        engine._session.imagining, "imagine", lambda *given: imagined.append(given[0]) or imagine(*given)
    )
    return imagined


@pytest.mark.parametrize("first", [False, True], ids=["after a step", "first"])
@pytest.mark.parametrize("memory", [60_000, 100_000, 200_000, 400_000])
def test_no_budget_is_passed(memory: int, first: bool) -> None:
    engine, plain = engine_of(memory), engine_of(8_000_000)
    taken = list[int]()
    for number in range(3):
        if number or not first:
            train(engine)
            train(plain)
        for rows in (1, 2, 3, 8, 16, 17, 32, 64, 200):
            loss, peak = evaluate(engine, ids(rows))
            assert peak <= memory, rows
            if loss is not None:
                taken.append(rows)
                assert torch.equal(loss, evaluate(plain, ids(rows))[0])  # type: ignore[arg-type]
            engine.check_integrity()
    train(engine)
    train(plain)
    assert engine.weights_sha256() == plain.weights_sha256()
    assert {1, 2, 3, 8} <= set(taken) and (200 in taken) is False
    assert memory < 200_000 or {16, 17} <= set(taken)
    engine.close()
    plain.close()


@pytest.mark.parametrize("between", [False, True], ids=["after a step", "before it"])
def test_what_is_refused_has_not_run(between: bool) -> None:
    """Not for want of room for its activations, and not for that of the weights beside them."""
    ran, refused = set[int](), set[int]()
    engine = engine_of(60_000)
    for rows in range(2, 26):
        engine.backward(engine(ids(2)))
        if not between:
            engine.step()
        net = engine.module
        assert isinstance(net, Net)
        before = net.runs
        loss, peak = evaluate(engine, ids(rows))
        assert peak <= 60_000
        (refused if loss is None else ran).add(rows)
        assert net.runs == before + (loss is not None)
        if between:
            engine.step()
    assert ran and refused and max(ran) < min(refused)
    engine.close()


def evaluated(memory: int, between: bool) -> tuple[set[int], set[int], set[int]]:
    """By rows of an evaluation on ranks: which ran, which were refused, and which of these had run in part."""
    engine = ebbtide.initialize(
        Net(),
        config_of(precision="fp32", device={"memory": memory}, host={"memory": "64MB"}, chunk_size="4KiB"),
    )
    net, found = engine.module, (set[int](), set[int](), set[int]())
    for rows in range(2, 26):
        engine.backward(engine(ids(2)))
        if not between:
            engine.step()
        before = net.runs
        loss, peak = evaluate(engine, ids(rows))
        assert peak <= memory
        found[loss is None].add(rows)
        if loss is None and net.runs != before:
            found[2].add(rows)
        if between:
            engine.step()
    engine.close()
    return found


@pytest.mark.parametrize(("memory", "between"), some(product([66_000, 68_000, 70_000], [False, True]), 1))
def test_on_ranks_what_is_refused_has_not_run(memory: int, between: bool) -> None:
    for ran, refused, begun in group_of(2).run(evaluated, memory, between):
        assert ran and refused and max(ran) < min(refused) and not begun


def test_only_what_is_new_and_large_is_imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(400_000)
    train(engine)
    imagined = noted(engine, monkeypatch)
    for given in (ids(2), ids(1), ids(2, 5), ids(2, 9), ids(3)):
        assert evaluate(engine, given)[0] is not None
    assert len(imagined) == 1  # the others are as large as that one, or nearly
    for length in range(12, 48):
        assert evaluate(engine, ids(2, length))[0] is not None
    assert 1 < len(imagined) < 7
    count = len(imagined)
    with torch.no_grad():
        engine(ids(40), cache=[object()])  # may be changed by a pass: not imagined
    assert len(imagined) == count
    engine.close()


class Idle(Net):
    """Gives all logits of an evaluation, and of training the loss."""

    def forward(self, ids: torch.Tensor, times: int = 1, name: str = "") -> torch.Tensor:  # type: ignore[override]
        x = self.table(ids)
        if not torch.is_grad_enabled():
            return self.head(x).repeat(times, 1, 1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_an_evaluation_that_takes_more_than_training_with_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits, a number that makes it larger, another function: each passed the budget in silence."""
    monkeypatch.setattr("test_evaluations.TOKENS", 1024)
    tight = {"device": {"memory": 1_400_000}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
    engine = ebbtide.initialize(Idle(), config_of(precision="fp32", **tight))
    found = list[bool]()
    for times in (1, 2, 40, 3, 30):
        train(engine, 8)
        with Count(engine) as count, torch.no_grad():
            count.given({"ids": ids(8)})
            try:
                engine(ids(8), times=times)
                found.append(True)
            except BudgetError:
                found.append(False)
        assert count.peak <= 1_400_000, times
    assert found == [True, True, False, True, False]
    with torch.no_grad(), pytest.raises(BudgetError):
        engine.run(lambda x: engine.module(x, times=40), ids(8))
    engine.close()


def test_numbers_and_texts_that_make_no_difference_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ebbtide.initialize(
        Named(),
        config_of(precision="fp32", device={"memory": 100_000}, host={"memory": "64MB"}, chunk_size="4KiB"),
    )
    imagined = noted(engine, monkeypatch)
    for number in range(6):
        engine.backward(engine(ids(2), number, f"file {number}"))
        engine.step()
    assert len(imagined) == 2
    for number in range(6):
        with torch.no_grad():
            engine(ids(2), number, f"file {number}")
    assert len(imagined) == 4
    engine.close()


class Named(Net):
    def forward(self, ids: torch.Tensor, number: int, name: str) -> torch.Tensor:  # type: ignore[override]
        assert name == f"file {number}"
        return super().forward(ids)


class Odd(Net):
    """Cannot be imagined."""

    def forward(self, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return super().forward(ids) * (1.0 if ids.float().mean().item() >= 0 else 2.0)


@pytest.mark.parametrize("kind", [Net, Odd])
def test_after_a_smaller_batch_one_as_large_as_others_were(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room was that of the plan at hand: of an epoch's last batch, which is smaller."""
    monkeypatch.setattr("test_evaluations.TOKENS", 1024)  # logits take more than what is saved
    ran = 0
    for memory in range(1_860_000, 2_000_000, 20_000):
        tight = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "16KiB"}
        engine = ebbtide.initialize(kind(), config_of(precision="fp32", **tight))
        try:
            for rows in (16, 1) * 2:
                train(engine, rows)
            loss, peak = evaluate(engine, ids(16))
        except BudgetError:
            continue
        finally:
            engine.close()
        assert peak <= memory and loss is not None
        ran += 1
    assert ran > 3


def test_one_that_just_fits_is_imagined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(100_000)
    train(engine)
    imagined = noted(engine, monkeypatch)
    for rows in (8, 12, 32):
        for _ in range(3):
            evaluate(engine, ids(rows))
    assert len(imagined) == len(set(imagined)) > 0
    engine.close()


def test_one_that_cannot_be_imagined_runs_as_far_as_there_is_room() -> None:
    tight = {"device": {"memory": 200_000}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
    engine = ebbtide.initialize(Odd(), config_of(precision="fp32", **tight))
    train(engine)
    loss, peak = evaluate(engine, ids(16))
    assert loss is not None and peak <= 200_000
    engine.close()


def test_how_much_larger() -> None:
    assert larger(((2, 8), (3,)), ((2, 8), (3,))) == 1.0
    assert larger(((1, 8), (3,)), ((2, 8), (3,))) == 1.0
    assert larger(((3, 12), (3,)), ((2, 8), (3,))) == 2.25
    assert larger(((4, 2), (9,)), ((2, 8), (3,))) == 3.0
    assert larger(((4, 2),), ((2, 8), (3,))) == float("inf")
    assert larger((), ()) == 1.0


class Deep(nn.Module):
    """More parameters than activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(torch.cat([x] * 4, -1)[:, :64] + layer(x))
        return x.square().mean()


def test_what_is_evaluated_while_all_parameters_stay_is_foreseen() -> None:
    """There is less room then than training has: a batch of training's size passed the budget silently."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    refused, least = [], None
    for memory in few(range(770_000, 850_000, 4_000), 8):
        tight = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "16KiB"}
        settings = Config.read(config_of(precision="fp32", **tight))
        engine = Engine(Deep(), settings, tiers=open_tiers(settings))
        try:
            for _ in range(2):
                engine.backward(engine(x))
                engine.step()
            resident = engine.resident()
            try:
                with resident:
                    loss, most = evaluate(engine, x)
            except BudgetError:
                loss, most = None, 0  # not even the parameters have room
            assert most <= memory, (most, memory)
            refused.append(loss is None)
            if loss is not None and least is None:
                least = memory
                assert memory - most < (16_000 if everything() else 24_000), "refused where it had room"
            plain, most = evaluate(engine, x)
            assert plain is not None and most <= memory
            engine.backward(engine(x))
            engine.step()
        finally:
            engine.close()
    assert True in refused and False in refused


def test_on_a_device_alone() -> None:
    """Nothing can leave, and what is larger than there is room for is refused all the same."""
    taken = set[int]()
    for memory in (300_000, 400_000, 800_000):
        engine = engine_of(memory, host=0)
        for _ in range(2):
            train(engine)
            for rows in (2, 8, 32, 200):
                loss, peak = evaluate(engine, ids(rows))
                assert peak <= memory, rows
                taken |= set() if loss is None else {rows}
        train(engine)
        engine.check_integrity()
        engine.close()
    assert taken == {2, 8, 32}


class Brief(nn.Module):
    """What it takes, it takes in the middle of forward, and saves nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + x.detach().repeat(1, 32).sum()


@pytest.mark.parametrize("host", [0, 200_000, "64MB"])
def test_beside_gradients_that_wait_for_their_step(host: int | str) -> None:
    """As large as training's batch, which had its room when there were none."""
    ran = evaluated = refused = 0
    for memory in few(range(40_000, 500_000, 10_000), 12):
        tiers = {"device": {"memory": memory}, "host": {"memory": host}, "chunk_size": "4KiB"}
        settings = Config.read(config_of(precision="fp32", **tiers))
        try:
            engine = Engine(Brief(), settings, tiers=open_tiers(settings))
        except BudgetError:
            continue
        x = torch.ones(8, 64)
        try:
            for _ in range(2):
                with Count(engine) as count:
                    engine.backward(engine(count.given({"x": x})["x"]))
                    try:
                        with torch.no_grad():
                            engine(x)
                        evaluated += 1
                    except BudgetError as error:
                        assert error.short > 0
                        refused += 1
                    engine.step()
                assert count.peak <= memory, (memory, count.peak - memory)
            engine.check_integrity()
            ran += 1
        except BudgetError as error:
            assert "this iteration" in str(error) or "model data" in str(error)
        finally:
            engine.close()
    least = (5, 10) if everything() else (2, 5)
    assert ran > least[0] and evaluated > least[1]
    assert not refused or host != "64MB"


class Says(nn.Module):
    """Its outputs are the largest of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(16))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten())}


def before_the_step(engine: ebbtide.Engine) -> Iterator[None]:
    while True:
        out = engine(ids(2))
        engine.backward(out["loss"])
        with torch.no_grad():
            engine(ids(2))
        engine.step()
        del out
        yield


def after_the_step(engine: ebbtide.Engine) -> Iterator[None]:
    """The next step has what was evaluated last."""
    while True:
        out = engine(ids(2))
        engine.backward(out["loss"])
        engine.step()
        with torch.no_grad():
            for rows in (4, 8, 8, 6):
                seen = engine(ids(rows))
        yield
        assert seen is not None


def by_one_name(engine: ebbtide.Engine) -> Iterator[None]:
    while True:
        for rows in (2, 3, 5, 2, 5, 3):
            out = engine(ids(rows))
            engine.backward(out["loss"])
            engine.step()
        yield
        with torch.no_grad():
            for _ in range(2):
                out = engine(ids(9))
        assert out is not None


@pytest.mark.parametrize(
    ("loop", "unmanaged"),
    [(before_the_step, []), (before_the_step, ["table.weight"]), (after_the_step, []), (by_one_name, [])],
)
def test_beside_outputs_that_are_still_held(loop: Any, unmanaged: list[str]) -> None:
    """Those of the training pass, of the evaluation before, and of another batch."""
    ran = refused = 0
    for memory in few((*range(60_000, 520_000, 46_000), 700_000), 5):
        tiers = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
        settings = Config.read(config_of(precision="fp32", unmanaged=unmanaged, **tiers))
        engine = Engine(Says(), settings, tiers=open_tiers(settings))
        turns = loop(engine)
        try:
            for _ in range(3):
                with Count(engine) as count:
                    next(turns)
                assert count.peak <= memory, (memory, count.peak - memory)
            engine.check_integrity()
            ran += 1
        except BudgetError as error:
            assert error.short > 0
            refused += 1
        finally:
            engine.close()
    assert (ran > 3 and refused > 1) if everything() else (ran and refused)


def test_state_leaves_for_a_larger_evaluation_and_comes_back() -> None:
    """It was refused where optimizer state had the room that it needed."""
    left = 0
    for memory in few(range(380_000, 620_000, 30_000), 3):
        found: list[Any] = []
        for size in (memory, 8_000_000):
            tiers = {"device": {"memory": size}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
            settings = Config.read(config_of(precision="fp32", **tiers))
            engine = Engine(Says(), settings, tiers=open_tiers(settings))
            losses = []
            for _ in range(3):
                with Count(engine) as count:
                    loss = engine(ids(2))["loss"]
                    engine.backward(loss)
                    engine.step()
                    homes = list(engine._session.store.state_homes)
                    with torch.no_grad():
                        losses += [loss.item(), engine(ids(14))["loss"].item()]
                assert count.peak <= size
                if size == memory:
                    left += homes.count("device") > engine._session.store.state_homes.count("device")
            engine.check_integrity()
            found.append((losses, homes, engine.weights_sha256()))
            engine.close()
        assert found[0][::2] == found[1][::2]
    assert left > (3 if everything() else 0)
