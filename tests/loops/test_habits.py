"""What people write in a training loop: each habit trains to a plain loop's bits, or is refused by name in time.

`HABITS` says which of them trains and which is refused, with what message. Loops drawn from such habits at random follow
(`make test-all` draws hundreds).
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.errors import BudgetError, EbbtideError
from harness import config_of
from plain_loop import PlainAdamW

WIDTH, CLASSES, LR = 32, 4, 1e-2
TIGHT, ROOMY = 84_000, "auto"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.calls = 0
        self.fails = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails:
            raise ZeroDivisionError("on purpose")
        return self.head(self.encode(x))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(8, WIDTH, generator=drawn), torch.randint(0, CLASSES, (8,), generator=drawn)


class Side:
    """One of the two that run the same loop: with an engine, or without."""

    def __init__(self, memory: Any = None, **changes: Any) -> None:
        """`memory`: the engine's budget; None: the plain loop."""
        self.module = Net()
        self.engine: Any = None
        self.plain: Any = None
        self.averages: list[Any] = []
        self.roomy = memory == ROOMY or (memory is not None and memory > 200_000)
        self.accumulate = changes.get("accumulate", 1)
        if memory is None:
            self.plain = PlainAdamW(self.module, lr=LR)
            return
        budget = {} if memory == "auto" else {"memory": memory}
        given = changes.pop("optimizer", None)
        config = config_of(precision="fp32", clip=None, chunk_size="8KiB", device=budget, **changes)
        config["optimizer"] = {"lr": LR}
        if given is not None:
            del config["optimizer"]
            given = given(self.module)
        self.handed = given
        self.engine = ebbtide.initialize(self.module, config, given)

    def out(self, number: int, way: str = "module") -> torch.Tensor:
        x, _ = batch(number)
        if self.engine is None or way == "module":
            return self.module(x)
        if way == "engine":
            return self.engine(x)
        return self.engine.run(lambda module, x: module.head(module.encode(x)), self.module, x)

    def loss(self, number: int, way: str = "module") -> torch.Tensor:
        return F.cross_entropy(self.out(number, way), batch(number)[1])

    def backward(self, loss: torch.Tensor, way: str = "loss", **kwargs: Any) -> None:
        if self.engine is None or way == "loss":
            loss.backward(**kwargs)
        else:
            self.engine.backward(loss, **kwargs)

    def step(self, clip: float | None = None, scale: float = 1.0) -> Any:
        if self.engine is not None:
            return self.engine.step()
        return self.plain.step(clip, scale)

    def train(self, numbers: range, way: str = "module", backward: str = "loss") -> None:
        for number in numbers:
            self.backward(self.loss(number, way), backward)
            self.step()

    def sha256(self) -> str:
        return str(self.plain.sha256() if self.engine is None else self.engine.weights_sha256())

    def close(self) -> None:
        if self.engine is not None:
            self.engine.check_integrity()
            self.engine.close()


# -- the habits -------------------------------------------------------------------------------------------


def everything_through_the_engine(side: Side) -> None:
    side.train(range(4), "engine", "engine")


def the_module_is_called(side: Side) -> None:
    side.train(range(4), "module", "engine")


def loss_backward(side: Side) -> None:
    side.train(range(4), "engine", "loss")


def a_plain_loop(side: Side) -> None:
    side.train(range(4), "module", "loss")


def a_method_is_run(side: Side) -> None:
    side.train(range(4), "run", "loss")


def losses_of_two_calls(side: Side) -> None:
    for number in range(0, 6, 2):
        (side.loss(number) + 0.5 * side.loss(number + 1)).backward()
        side.step()


def accumulation_by_hand(side: Side) -> None:
    """With a window that is shorter at the end."""
    for window in ((0, 1, 2), (3, 4, 5), (6,)):
        for number in window:
            (side.loss(number) / len(window)).backward()
        side.step()


def accumulation_in_the_config(side: Side) -> None:
    for number in range(6):
        side.loss(number).backward()
        if side.engine is not None:
            assert side.engine.step().updated is (number % 2 == 1)
        elif number % 2:
            side.step(scale=0.5)


def engine_clips(side: Side) -> None:
    for number in range(4):
        side.loss(number).backward()
        if side.engine is not None:
            norm = float(side.engine.clip_grad_norm_(0.5))
            assert math.isclose(norm, side.engine.step().grad_norm, rel_tol=1e-6)
            assert side.engine.last_step.updated and not side.engine.optimizer.step_was_skipped
        else:
            side.step(clip=0.5)


def torch_clips(side: Side) -> None:
    side.loss(0).backward()
    torch.nn.utils.clip_grad_norm_(side.module.parameters(), 0.5)


def torch_clips_values(side: Side) -> None:
    side.loss(0).backward()
    torch.nn.utils.clip_grad_value_(side.module.parameters(), 0.5)


def zero_grad_at_the_usual_place(side: Side) -> None:
    for number in range(4):
        if side.engine is not None:
            (side.engine.optimizer, side.module, side.engine)[number % 3].zero_grad()
        side.loss(number).backward()
        side.step()


def a_batch_is_dropped(side: Side) -> None:
    """Gradients are set to None after backward, in the ways there are."""
    for number in range(6):
        side.loss(number).backward()
        if number % 2 == 0:
            for parameter in side.module.parameters():
                parameter.grad = None
        elif number == 3:
            side.module.zero_grad()
        else:
            side.step()


def gradients_of_some_are_dropped(side: Side) -> None:
    for number in range(4):
        side.loss(number).backward()
        side.module.head.weight.grad = None
        side.step()


def evaluation_between(side: Side) -> None:
    for number in range(4):
        side.loss(number).backward()
        side.module.eval()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            seen = side.loss(90)
        assert seen.isfinite() and not seen.requires_grad
        side.module.train()
        side.step()


def evaluation_with_gradients(side: Side) -> None:
    """Without torch.no_grad: nobody goes back from it."""
    for number in range(4):
        side.loss(90)
        side.loss(number).backward()
        side.step()
        side.loss(91)


def an_average_of_the_engines(side: Side) -> None:
    average = side.engine.ema(0.9) if side.engine is not None else None
    side.train(range(4))
    if average is not None:
        with average.swapped_in(), torch.no_grad():
            assert side.loss(90).isfinite()


def an_average_by_hand(side: Side) -> None:
    average = {}
    for number in range(4):
        side.train(range(number, number + 1))
        if side.engine is None:
            continue
        with side.engine.resident(), torch.no_grad():
            for name, parameter in side.module.named_parameters():
                average.setdefault(name, parameter.clone()).lerp_(parameter, 0.1)
    assert all(value.isfinite().all() for value in average.values())


def values_are_read_anywhere(side: Side) -> None:
    side.train(range(2))
    sum(parameter.norm() for parameter in side.module.parameters())


def values_are_read_by_name(side: Side) -> None:
    side.train(range(2))
    if side.engine is not None:
        with side.engine.weights() as weights:
            assert set(weights) == {name for name, _ in side.module.named_parameters()}
            assert all(value.isfinite().all() for value in weights.values())
    side.train(range(2, 4))


def values_are_written_through_data(side: Side) -> None:
    """As adapters are merged, and reference models follow."""
    for number in range(3):
        side.train(range(number, number + 1))
        if side.engine is not None:
            with side.engine.resident(write=True):
                side.module.layers[2].weight.data += 0.25
        else:
            side.plain.masters["layers.2.weight"] += 0.25
            side.plain.refresh()


def scheduled(side: Side, optimizer: Any) -> None:
    """`optimizer`: what the scheduler is on, beside an engine."""
    scheduler = None if side.engine is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(4):
        side.train(range(number, number + 1))
        if scheduler is not None:
            scheduler.step()
        else:
            side.plain.lr *= 0.5


def a_scheduler(side: Side) -> None:
    scheduled(side, side.engine and side.engine.optimizer)


def an_optimizer_of_torchs_with_its_scheduler(side: Side) -> None:
    scheduled(side, side.engine and side.handed)


def a_scheduler_of_another_optimizer(side: Side) -> None:
    other = torch.optim.AdamW(side.module.parameters(), lr=LR)
    side.train(range(1))
    torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    other.param_groups[0]["lr"] *= 0.5
    side.train(range(1, 2))


def another_optimizer_steps(side: Side) -> None:
    other = torch.optim.SGD(side.module.parameters(), lr=LR)
    side.loss(0).backward()
    other.step()


def forward_raises(side: Side) -> None:
    for number in range(4):
        side.module.fails = number == 1
        try:
            side.loss(number).backward()
            side.step()
        except ZeroDivisionError:
            assert number == 1


def backward_raises(side: Side) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    for number in range(4):
        handle = side.module.layers[3].weight.register_hook(fail) if number == 1 else None
        try:
            side.loss(number).backward()
            side.step()
        except ZeroDivisionError:
            assert number == 1
            side.module.zero_grad()
        if handle is not None:
            handle.remove()


def a_closure(side: Side) -> None:
    for number in range(4):

        def closure(number: int = number) -> torch.Tensor:
            side.module.zero_grad()
            loss = side.loss(number)
            loss.backward()
            return loss

        if side.engine is not None:
            assert float(side.engine.optimizer.step(closure)) > 0
        else:
            closure()
            side.step()


def the_graph_is_kept(side: Side) -> None:
    for number in range(3):
        loss = side.loss(number)
        loss.backward(retain_graph=True)
        loss.backward()
        side.step()


def a_gradient_of_a_gradient(side: Side) -> None:
    side.loss(0).backward(create_graph=True)


def gradients_of_inputs(side: Side) -> None:
    for number in range(3):
        x, y = batch(number)
        x.requires_grad_()
        loss = F.cross_entropy(side.module(x), y)
        [found] = torch.autograd.grad(loss, x, retain_graph=True)
        assert found.isfinite().all()
        loss.backward()
        side.step()


def backward_on_another_thread(side: Side) -> None:
    for number in range(3):
        thread = threading.Thread(target=side.loss(number).backward)
        thread.start()
        thread.join()
        side.step()


def a_part_is_called_by_itself(side: Side) -> None:
    x, _ = batch(0)
    side.module.encode(x).square().mean().backward()


def a_grad_scaler(side: Side) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(side.loss(0)).backward()
    scaler.step(side.engine.optimizer)


def no_backward_at_all(side: Side) -> None:
    side.loss(0)
    side.step()


def everything_is_frozen(side: Side) -> None:
    x, _ = batch(0)
    side.module.requires_grad_(False)
    try:
        (side.module(x.requires_grad_())).square().mean().backward()
        side.step()
    finally:
        side.module.requires_grad_(True)


@dataclass(frozen=True)
class Habit:
    run: Callable[[Side], None]
    refusal: str = ""
    """What the refusal says; nothing: it trains."""
    where: tuple[Any, ...] = (TIGHT, ROOMY)
    changes: tuple[tuple[str, Any], ...] = ()


HABITS = [
    Habit(everything_through_the_engine),
    Habit(the_module_is_called),
    Habit(loss_backward),
    Habit(a_plain_loop),
    Habit(a_method_is_run),
    Habit(losses_of_two_calls),
    Habit(accumulation_by_hand),
    Habit(accumulation_in_the_config, changes=(("accumulate", 2),)),
    Habit(engine_clips),
    Habit(torch_clips, r"engine\.clip_grad_norm_\(max_norm\)"),
    Habit(torch_clips_values, r"engine\.clip_grad_norm_\(max_norm\)"),
    Habit(zero_grad_at_the_usual_place),
    Habit(a_batch_is_dropped),
    Habit(gradients_of_some_are_dropped),
    Habit(evaluation_between),
    Habit(evaluation_with_gradients),
    Habit(an_average_of_the_engines),
    Habit(an_average_by_hand),
    Habit(values_are_read_anywhere, r"is away: norm needs its values.*engine\.weights", where=(TIGHT,)),
    Habit(values_are_read_by_name),
    Habit(values_are_written_through_data),
    Habit(a_scheduler),
    Habit(
        an_optimizer_of_torchs_with_its_scheduler,
        changes=(
            ("optimizer", lambda module: torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.01)),
        ),
    ),
    Habit(a_scheduler_of_another_optimizer, r"give the scheduler engine\.optimizer"),
    Habit(another_optimizer_steps, r"SGD\.step\(\): layers\.0\.weight.*Call engine\.step"),
    Habit(forward_raises),
    Habit(backward_raises),
    Habit(a_closure),
    Habit(the_graph_is_kept),
    Habit(a_gradient_of_a_gradient, r"create_graph=True"),
    Habit(gradients_of_inputs),
    Habit(backward_on_another_thread),
    Habit(a_part_is_called_by_itself, r"called by itself.*engine\.run\(model\.encode, x\)"),
    Habit(a_grad_scaler, r"GradScaler"),
    Habit(no_backward_at_all, r"without a backward pass"),
    Habit(everything_is_frozen, r"brought no gradient to a parameter"),
]
CASES = [(habit, memory) for habit in HABITS for memory in habit.where]


@pytest.mark.parametrize(("habit", "memory"), CASES, ids=[f"{h.run.__name__}-{m}" for h, m in CASES])
def test_a_habit_trains_or_is_refused_by_name(habit: Habit, memory: Any) -> None:
    side = Side(memory, **dict(habit.changes))
    try:
        if not habit.refusal:
            plain = Side()
            habit.run(plain)
            habit.run(side)
        else:
            plain = Side()
            before = side.sha256()
            with pytest.raises(EbbtideError, match=re.compile(habit.refusal, re.DOTALL)):
                habit.run(side)
            if side.engine.steps == 0:
                assert side.sha256() == before
            else:
                plain.train(range(side.engine.steps))
            side.engine.optimizer.zero_grad()
        if side.accumulate == 1:
            for one in (side, plain):  # and the engine goes on, whatever was refused
                one.train(range(50, 52))
        assert side.sha256() == plain.sha256()
    finally:
        side.close()


def test_at_least_twenty_habits_train() -> None:
    assert sum(not habit.refusal for habit in HABITS) >= 20


# -- loops drawn at random --------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Side], Any]] = {
    "torch clips": lambda side: torch.nn.utils.clip_grad_norm_(side.module.parameters(), 1.0),
    "another optimizer steps": lambda side: torch.optim.SGD(side.module.parameters(), lr=1.0).step(),
    "a part by itself": lambda side: side.module.encode(batch(70)[0]).sum().backward(),
    "a gradient of a gradient": lambda side: side.loss(71).backward(create_graph=True),
    "converted": lambda side: side.module.layers[0].half(),
    "pickled": lambda side: __import__("pickle").dumps(side.module),
    "unknown name": lambda side: side.engine.weights("nothing.*").__enter__(),
    "no tensor": lambda side: side.engine.backward(1.0),
}
BETWEEN = (
    "forward and nothing",
    "evaluate",
    "evaluate in inference mode",
    "read",
    "write",
    "state dict",
    "average",
)
WINDOWS = st.lists(
    st.tuples(
        st.sampled_from(["module", "engine", "run"]), st.sampled_from(["loss", "engine", "thread", "twice"])
    ),
    min_size=1,
    max_size=3,
)


@dataclass(frozen=True)
class Step:
    windows: tuple[tuple[str, str], ...]
    clip: float | None
    before: str
    """What is done before the step's passes; nothing: ''."""
    inside: str
    """Between backward and the step."""
    ends: str
    """'step', 'optimizer', 'closure'; 'drop': gradients are set to None. 'raises': forward of one more batch does."""


STEPS = st.lists(
    st.builds(
        Step,
        WINDOWS.map(tuple),
        st.sampled_from([None, None, 0.3]),
        st.sampled_from(["", "", *BETWEEN, *sorted(set(REFUSED) - {"torch clips"})]),
        st.sampled_from(
            ["", "", "evaluate", "state dict", "torch clips", "another optimizer steps", "no tensor"]
        ),
        st.sampled_from(["step", "step", "optimizer", "closure", "drop", "raises"]),
    ),
    min_size=1,
    max_size=5,
)
PLACES: list[dict[str, Any]] = [
    {"memory": TIGHT},
    {"memory": ROOMY},
    {"memory": 300_000},
    {"memory": TIGHT, "layout": "page", "placement": "host"},
    {"memory": 100_000, "eviction": "lru", "prefetch": False},
]


def between(side: Side, what: str, number: int) -> None:
    if what in REFUSED:
        if side.engine is not None:
            with pytest.raises(EbbtideError):
                REFUSED[what](side)
    elif what == "forward and nothing":
        side.loss(200 + number)
    elif what.startswith("evaluate"):
        with torch.inference_mode() if what.endswith("mode") else torch.no_grad():
            assert side.loss(300 + number).isfinite()
    elif what == "state dict":
        assert all(value.isfinite().all() for value in side.module.state_dict().values())
    elif what == "average":
        for one in side.averages:
            with one.swapped_in(), torch.no_grad():
                assert side.loss(400 + number).isfinite()
    elif what == "read" and side.engine is not None:
        with suppress(BudgetError), side.engine.resident():  # it needs room for all of them
            assert all(parameter.isfinite().all() for parameter in side.module.parameters())
    elif what == "write":
        name = f"layers.{number % 8}.weight"
        if side.engine is None:
            side.plain.masters[name] *= 0.5
            side.plain.refresh()
        elif number % 2 or not side.roomy:
            with side.engine.weights(name, write=True) as weights:
                weights[name] *= 0.5
        else:
            with side.engine.resident(write=True):
                side.module.get_parameter(name).data.mul_(0.5)


def go_back(side: Side, loss: torch.Tensor, way: str) -> None:
    if way == "thread":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    elif way == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        side.backward(loss, way)


def take(side: Side, step: Step, number: int) -> None:
    between(side, step.before, number)
    for place, (call, back) in enumerate(step.windows):
        go_back(side, side.loss(number + place, call) / len(step.windows), back)
    between(side, step.inside, number)
    if step.ends == "raises":
        side.module.fails = True
        with pytest.raises(ZeroDivisionError):
            side.loss(0)
        side.module.fails = False
    if step.ends == "drop":
        for parameter in side.module.parameters():
            parameter.grad = None
        return
    if side.engine is None:
        side.step(clip=step.clip)
        return
    if step.clip is not None:
        side.engine.clip_grad_norm_(step.clip)
    if step.ends == "optimizer":
        side.engine.optimizer.step()
    elif step.ends == "closure":
        assert side.engine.optimizer.step(lambda: 7) == 7
    else:
        assert side.engine.step().updated


def compared(steps: list[Step], place: dict[str, Any], averaged: bool) -> None:
    plain, side = Side(), Side(**place)
    try:
        side.averages = [side.engine.ema(0.9)] if averaged else []
        for one in (plain, side):
            for number, step in enumerate(steps):
                take(one, step, 10 * number)
        assert side.sha256() == plain.sha256()
    finally:
        side.close()


UNHURRIED: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=12, **UNHURRIED)
@given(STEPS, st.sampled_from(PLACES), st.booleans())
def test_loops_of_habits_train_to_a_plain_loops_bits(
    steps: list[Step], place: dict[str, Any], averaged: bool
) -> None:
    compared(steps, place, averaged)


@pytest.mark.heavy
@settings(max_examples=300, **UNHURRIED)
@given(STEPS, st.sampled_from(PLACES), st.booleans())
def test_many_loops_of_habits_train_to_a_plain_loops_bits(
    steps: list[Step], place: dict[str, Any], averaged: bool
) -> None:
    note(f"{steps} {place}")
    compared(steps, place, averaged)
