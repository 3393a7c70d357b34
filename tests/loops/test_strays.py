# ruff: noqa: F811
"""Habits at the edges: what a review of the engine's surface by fresh eyes found, each with what happens now."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.errors import StateError, UnsupportedError
from test_habits import LR, ROOMY, TIGHT, WIDTH, Net, Side, batch
from test_surface import make, plain_hash, step  # noqa: F401

Engines = Callable[..., ebbtide.Engine]
HALF: list[Any] = [("fp32", "auto"), ("bf16", "split"), ("bf16", "separate")]


def loss_of(engine: ebbtide.Engine, number: int) -> torch.Tensor:
    x, y = batch(number)
    return F.cross_entropy(engine.module(x.to(next(engine.parameters()).dtype)).float(), y)


# -- averages and gradients that are held -----------------------------------------------------------------


@pytest.mark.parametrize("precision, master", HALF)
@pytest.mark.parametrize("memory", [2 * TIGHT, ROOMY])
def test_an_average_is_read_between_backward_and_step(
    make: Engines, memory: Any, precision: str, master: str
) -> None:
    """With a separate master gradients lie where parameters were; they were taken for weights."""
    shas = []
    for read in (False, True):
        host = {} if memory == ROOMY else {"memory": "64MiB"}
        engine = make(memory=memory, precision=precision, master=master, host=host)
        average = engine.ema(0.5)
        for number in range(3):
            loss_of(engine, number).backward()
            if read:
                average.state_dict()
                with average.swapped_in(), torch.no_grad():
                    loss_of(engine, 90)
            engine.step()
        shas.append((engine.weights_sha256(), [v.sum().item() for v in average.state_dict().values()]))
        engine.close()
    assert shas[0] == shas[1]


def test_an_average_that_is_swapped_in_is_not_closed(make: Engines) -> None:
    engine = make(memory=ROOMY)
    first, second = engine.ema(0.5), engine.ema(0.9)
    step(engine, 0)
    sha = engine.weights_sha256()
    with first.swapped_in():
        with pytest.raises(StateError, match=r"end swapped_in\(\) before close"):
            first.close()
        with engine.resident(write=True):
            pass
    assert engine.weights_sha256() == sha
    first.close()
    step(engine, 1)
    assert all(value.isfinite().all() for value in second.state_dict().values())


# -- writes that PyTorch does not count -------------------------------------------------------------------


@pytest.mark.parametrize("memory", [TIGHT, 2 * TIGHT, ROOMY])
@pytest.mark.parametrize("held", [False, True])
def test_a_write_through_data_between_passes_counts_or_raises(make: Engines, memory: Any, held: bool) -> None:
    """As a critic's weights are clamped."""
    engine, plain = make(memory=memory), Side()
    parameters = list(engine.parameters())
    refused = False
    for number in range(3):
        step(engine, number)
        plain.train(range(number, number + 1))
        try:
            for parameter in parameters if held else engine.parameters():
                parameter.data.clamp_(-0.05, 0.05)
        except StateError as error:
            assert "engine.resident()" in str(error) and "write=True" in str(error)
            refused = True
            with engine.resident(write=True) if memory != TIGHT else engine.weights(write=True) as weights:
                for value in engine.parameters() if weights is None else weights.values():
                    value.data.clamp_(-0.05, 0.05)
        for value in plain.plain.masters.values():
            value.clamp_(-0.05, 0.05)
        plain.plain.refresh()
    assert engine.weights_sha256() == plain.sha256() and (memory != ROOMY or not refused)


@pytest.mark.parametrize("precision, master", HALF)
def test_zeros_through_data_are_zeros(make: Engines, precision: str, master: str) -> None:
    engine = make(memory=ROOMY, precision=precision, master=master)
    step(engine, 0)
    engine.module.layers[0].weight.data.zero_()
    assert not engine.state_dict()["layers.0.weight"].any()
    step(engine, 1)
    assert all(value.isfinite().all() for value in engine.state_dict().values())


def test_parameters_in_place_are_ordinary_in_passes_and_for_copies(make: Engines, tmp_path: Path) -> None:
    engine = make(memory=ROOMY)
    seen: list[type] = []
    engine.module.layers[0].register_forward_pre_hook(lambda module, _: seen.append(type(module.weight)))
    step(engine, 0)
    assert seen and set(seen) == {nn.Parameter}
    with engine.resident():
        assert {type(p) for p in engine.parameters()} == {nn.Parameter}
    one = next(engine.parameters())
    assert isinstance(one, nn.Parameter) and type(copy.deepcopy(one)) is nn.Parameter
    assert torch.equal(one + 0, one.detach()) and type(one.detach()) is torch.Tensor
    torch.save(list(engine.parameters()), tmp_path / "parameters.pt")
    loaded = torch.load(tmp_path / "parameters.pt", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(loaded, engine.parameters(), strict=True))
    loaded[0].grad = torch.ones_like(loaded[0])
    torch.optim.SGD(loaded, lr=1.0).step()  # they are nobody's
    step(engine, 1)
    assert engine.weights_sha256() == plain_hash(2)


@pytest.mark.parametrize("way", ["step", "weights", "average"])
@pytest.mark.parametrize("memory", [3 * TIGHT, ROOMY])
def test_a_write_after_the_engines_own_counts(make: Engines, memory: Any, way: str) -> None:
    engine = make(memory=memory)
    average = engine.ema(0.5)
    step(engine, 0)
    with engine.resident(write=True):
        if way == "step":
            step(engine, 1)
        elif way == "weights":
            with engine.weights("head.*", write=True) as weights:
                weights["head.weight"].mul_(3.0)
        else:
            average.state_dict()
        engine.module.head.weight.data.mul_(0.5)
        expected = engine.module.head.weight.detach().clone()
    assert torch.equal(engine.state_dict()["head.weight"], expected)


def test_contexts_within_each_other_lose_no_write(make: Engines) -> None:
    engine = make(memory=ROOMY, precision="bf16")
    step(engine, 0)
    with engine.resident():
        engine.module.layers[0].weight.data.zero_()
        with engine.resident(write=True):
            engine.module.layers[1].weight.data.zero_()
    state = engine.state_dict()
    assert not state["layers.0.weight"].any() and not state["layers.1.weight"].any()


# -- backward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [2 * TIGHT, ROOMY])
@pytest.mark.parametrize("create", [False, True])
def test_gradients_of_parameters_are_given(make: Engines, memory: Any, create: bool) -> None:
    engine = make(memory=memory)
    for number in range(2):
        loss = loss_of(engine, number)
        wanted = [engine.module.head.weight] if create else list(engine.parameters())
        found = torch.autograd.grad(loss, wanted, retain_graph=True, create_graph=create)
        assert all(one.isfinite().all() for one in found)
        loss.backward()
        engine.step()
    assert engine.weights_sha256() == plain_hash(2)


@pytest.mark.parametrize("way", ["engine", "loss"])
def test_backward_under_no_grad(make: Engines, way: str) -> None:
    engine = make()
    for number in range(2):
        loss = loss_of(engine, number)
        with torch.no_grad():
            loss.backward() if way == "loss" else engine.backward(loss)
        engine.step()
    assert engine.weights_sha256() == plain_hash(2)


def test_in_backward_applies_nothing_that_comes_by_no_pass(make: Engines) -> None:
    engine = make(updates="in-backward")
    step(engine, 0)
    sha = engine.weights_sha256()
    with pytest.raises(UnsupportedError, match="by no output of a pass"):
        engine.module.head.weight.pow(2).sum().backward()
    assert engine.weights_sha256() == sha
    loss_of(engine, 1).backward()
    with pytest.raises(StateError, match="has applied the gradients"):
        engine.module.zero_grad()
    engine.step()
    assert engine.weights_sha256() == plain_hash(2)


def test_fp16_takes_no_gradient_without_its_scale(make: Engines) -> None:
    engine = make(precision="fp16", memory=ROOMY)
    x, y = batch(0)
    engine.backward(F.cross_entropy(engine.module(x.half()).float(), y))
    with pytest.raises(UnsupportedError, match="without the loss scale"):
        engine.module.head.weight.float().pow(2).sum().backward()
    engine.step()


def test_a_clip_is_for_the_gradients_that_it_was_asked_for(make: Engines) -> None:
    engine = make(memory=ROOMY)
    assert float(engine.clip_grad_norm_(0.01)) == 0.0
    step(engine, 0)
    loss_of(engine, 5).backward()
    engine.clip_grad_norm_(0.01)
    for parameter in engine.parameters():
        parameter.grad = None
    step(engine, 1)
    assert engine.weights_sha256() == plain_hash(2)
    loss_of(engine, 2).backward()
    engine.clip_grad_norm_(0.5)
    with pytest.raises(StateError, match="after the last backward"):
        loss_of(engine, 3).backward()
    engine.zero_grad()
    step(engine, 2)
    assert engine.weights_sha256() == plain_hash(3)


def test_engines_on_two_threads_have_passes_of_their_own(make: Engines) -> None:
    first, second = make(memory=ROOMY), make(memory=ROOMY)
    inside, goes_on = threading.Event(), threading.Event()

    def wait(gradient: torch.Tensor) -> None:
        inside.set()
        goes_on.wait(20)

    def train() -> None:
        loss = loss_of(first, 0)
        first.module.head.weight.register_hook(wait)
        first.backward(loss)
        first.step()

    thread = threading.Thread(target=train)
    thread.start()
    assert inside.wait(20)
    step(second, 0)
    goes_on.set()
    thread.join()
    assert first.weights_sha256() == second.weights_sha256() == plain_hash(1)


class Listed(list):  # type: ignore[type-arg]
    pass


class Named(dict):  # type: ignore[type-arg]
    pass


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


@dataclass
class Ringed:
    logits: torch.Tensor
    parent: Any = None

    def __post_init__(self) -> None:
        self.parent = self


WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda out: Listed([out]), lambda found: found[0]),
    "dict": (lambda out: Named(logits=out), lambda found: found["logits"]),
    "slots": (Slotted, lambda found: found.logits),
    "ring": (Ringed, lambda found: found.logits),
    "distribution": (lambda out: torch.distributions.Categorical(logits=out), lambda found: found.logits),
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_found_in_whatever_forward_returns(make: Engines, way: str) -> None:
    wrap, unwrap = WAYS[way]

    class Wrapping(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    engine, plain = make(Wrapping(), memory=ROOMY), Wrapping()
    optimizer = ebbtide_plain(plain)
    for number in range(2):
        for model in (engine.module, plain):
            F.cross_entropy(unwrap(model(batch(number)[0])), batch(number)[1]).backward()
        engine.step()
        optimizer.step()
    assert engine.weights_sha256() == optimizer.sha256()


def ebbtide_plain(model: nn.Module) -> Any:
    from plain_loop import PlainAdamW

    return PlainAdamW(model, lr=LR)


def test_a_step_that_is_refused_leaves_no_gradient_behind(make: Engines) -> None:
    engine = make(memory=ROOMY)
    kept: list[torch.Tensor] = []
    handle = engine.module.layers[4].register_forward_hook(lambda *given: kept.append(given[2]))
    engine.module(batch(7)[0]).detach()
    kept[0].sum().backward()
    with pytest.raises(StateError, match="from no output of a pass"):
        engine.step()
    handle.remove()
    step(engine, 0)
    assert engine.weights_sha256() == plain_hash(1)


@pytest.mark.parametrize("of", ["module", "engine"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("memory", [2 * TIGHT, ROOMY])
def test_a_checkpoint_around_the_whole_model(make: Engines, memory: Any, of: str, reentrant: bool) -> None:
    engine = make(memory=memory)
    for number in range(4):
        x, y = batch(number)
        called = engine.module if of == "module" else engine
        x.requires_grad_(reentrant)
        F.cross_entropy(checkpoint(called, x, use_reentrant=reentrant), y).backward()
        engine.step()
    assert engine.weights_sha256() == plain_hash(4)


def test_zero_grad_after_a_backward_that_raised_early(make: Engines) -> None:
    engine = make(memory=ROOMY)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = engine.module.head.register_forward_hook(lambda *given: given[2].register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        loss_of(engine, 0).backward()
    handle.remove()
    engine.zero_grad()
    step(engine, 0)
    assert engine.weights_sha256() == plain_hash(1)


def test_a_gradient_is_not_zeroed_by_itself(make: Engines) -> None:
    engine = make()
    loss_of(engine, 0).backward()
    with pytest.raises(StateError, match="engine holds"):
        engine.module.head.weight.grad.zero_()
    engine.module.zero_grad(set_to_none=False)
    step(engine, 0)
    assert engine.weights_sha256() == plain_hash(1)


def test_a_gradient_set_by_hand_keeps_what_was_dropped(make: Engines) -> None:
    engine, plain = make(), Side()
    for side in (engine.module, plain.module):
        F.cross_entropy(side(batch(0)[0]), batch(0)[1]).backward()
        side.layers[2].weight.grad = None
        side.head.weight.grad = torch.zeros(4, WIDTH)
    with pytest.raises(StateError, match="set by hand"):
        engine.step()
    for side in (engine.module, plain.module):
        side.head.weight.grad = None
    engine.step()
    plain.step()
    assert engine.weights_sha256() == plain.sha256()


# -- settings, loading, copies ----------------------------------------------------------------------------


def test_groups_that_are_loaded_stay_those_of_the_optimizer_that_was_handed_over(make: Engines) -> None:
    model = Net()
    handed = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = make(model, groups=handed)
    step(engine, 0)
    with pytest.warns(UserWarning, match="moments"):
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    handed.param_groups[0]["lr"] = 0.5
    assert engine.optimizer.param_groups[0]["lr"] == 0.5


def test_schedulers_of_two_engines_do_not_disturb_each_other(make: Engines) -> None:
    models = [Net(), Net()]
    handed = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    engines = [make(m, groups=o, memory=ROOMY) for m, o in zip(models, handed, strict=True)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in handed]
    for number in range(3):
        for engine, scheduler in zip(engines, schedulers, strict=True):
            step(engine, number)
            scheduler.step()
    assert engines[0].weights_sha256() == engines[1].weights_sha256()


def test_a_refused_load_changes_no_buffer(make: Engines) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, affine=False)
            self._modules.move_to_end("norm", last=False) if hasattr(self._modules, "move_to_end") else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x))

    engine = make(Normed(), memory=ROOMY)
    state = {name: torch.ones_like(value) for name, value in engine.state_dict().items()}
    before = engine.module.norm.running_mean.clone()
    with pytest.raises(UnsupportedError, match=r"engine\.load_state_dict"):
        engine.module.load_state_dict(state)
    assert torch.equal(engine.module.norm.running_mean, before)
