"""What loops and modules do seldom, beside torch.optim.AdamW over the same module: the same values, or a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.errors import EbbtideWarning, StateError
from harness import config_of

LR, WIDTH = 1e-2, 32
PLACES: dict[str, dict[str, Any]] = {
    "everything fits": {"device": {"memory": "1GiB"}},
    "half": {"device": {"memory": "half"}, "host": {"memory": "64MiB"}},
    "chunks move": {"device": {"memory": 120_000}, "host": {"memory": "64MiB"}, "chunk_size": 4096},
}
Loop = Callable[[nn.Module, Any, Callable[[], Any]], None]
"""The module, its optimizer, and what takes a step."""


def rows(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def layers(seed: int = 0, count: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def by_torch(module: nn.Module, loop: Loop) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    loop(module, optimizer, optimizer.step)
    return {name: value.detach() for name, value in module.named_parameters()}


def by_engine(module: nn.Module, loop: Loop, **config: Any) -> dict[str, torch.Tensor]:
    optimizer = {"name": "adamw", "lr": LR}
    engine = ebbtide.initialize(
        module, config_of(**{"precision": "fp32", "clip": None, "optimizer": optimizer} | config)
    )
    loop(module, engine.optimizer, engine.step)
    engine.check_integrity()
    found = engine.state_dict()
    engine.close()
    return found


def require_alike(build: Callable[[], nn.Module], loop: Loop, **config: Any) -> None:
    expected, found = by_torch(build(), loop), by_engine(build(), loop, **config)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda said, n=name: f"{n}: {said}"
        )


def plainly(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
    for number in range(4):
        module(rows(number)).pow(2).mean().backward()
        step()
        optimizer.zero_grad()


def engines_own(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
    """With engine.backward where there is an engine."""
    engine = getattr(step, "__self__", None)
    for number in range(4):
        loss = module(rows(number)).pow(2).mean()
        engine.backward(loss) if isinstance(engine, ebbtide.Engine) else loss.backward()
        step()
        optimizer.zero_grad()


class Bias(nn.Module):
    """Its part of the gradient is a view of the gradient of what it is added to."""

    def __init__(self, values: nn.Parameter) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.values.view(4, WIDTH)


def two_of_one_bias() -> nn.Module:
    torch.manual_seed(0)
    values = nn.Parameter(0.1 * torch.randn(4 * WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Bias(values), Bias(values), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loop", [plainly, engines_own])
def test_a_parameter_of_two_modules_whose_gradient_is_a_view_of_anothers(loop: Loop, place: str) -> None:
    require_alike(two_of_one_bias, loop, **PLACES[place])


def normed() -> nn.Module:
    module = layers()
    for part in module[::2]:
        parametrizations.weight_norm(part)
    return module


def cached(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
    for number in range(3):
        with parametrize.cached():
            module(rows(number)).pow(2).mean().backward()
        step()
        optimizer.zero_grad()


@pytest.mark.parametrize("place", PLACES)
def test_weights_that_torch_keeps_for_a_pass(place: str) -> None:
    require_alike(normed, cached, **PLACES[place])


class Kept(nn.Module):
    """Keeps a tensor of its first pass where nobody looks for it."""

    kept: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(count=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = parametrize.__dict__.setdefault("_of_this_test", [])
        cache.append(self.body[0].weight * 2) if not cache else None
        return nn.functional.linear(self.body(x), cache[0])


def test_an_imagined_tensor_that_reaches_loss_backward_is_refused_and_crashes_nothing() -> None:
    module = Kept()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None, **PLACES["chunks move"]))
    try:
        with pytest.raises(StateError, match="only imagined"), pytest.warns(EbbtideWarning):
            module(rows(0)).pow(2).mean().backward()
    finally:
        parametrize.__dict__.pop("_of_this_test", None)
        engine.close()


def test_autocast_keeps_nothing_of_an_imagined_pass(recwarn: pytest.WarningsRecorder) -> None:
    def loop(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
        for number in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(rows(number)).float().pow(2).mean()
            loss.backward()
            step()
            optimizer.zero_grad()

    require_alike(layers, loop, **PLACES["chunks move"])
    assert not [one for one in recwarn if issubclass(one.category, EbbtideWarning)]


class Checkpointed(nn.Module):
    """All that is trained lies within reentrant checkpoints, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(WIDTH, WIDTH), layers(1), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).requires_grad_()
        for place in range(0, len(self.body), 2):
            x = checkpoint(self.body[place : place + 2], x, use_reentrant=True)
        return self.last(x)


def checkpointed() -> nn.Module:
    torch.manual_seed(2)
    return Checkpointed()


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
@pytest.mark.parametrize("place", PLACES)
def test_all_that_is_trained_lies_within_reentrant_checkpoints(place: str, updates: str) -> None:
    require_alike(checkpointed, plainly, updates=updates, **PLACES[place])


def test_gradients_of_some_inputs_go_where_the_caller_wants_them() -> None:
    place = PLACES["chunks move"] | {"device": {"memory": 40_000}}
    module = layers(count=6)
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None, **place))
    for number in range(2):
        module(rows(number)).pow(2).mean().backward()
        engine.step()
    first = list(module[0].parameters())
    module(rows(3)).pow(2).mean().backward(inputs=first)
    torch.autograd.backward(module(rows(4)).pow(2).mean(), inputs=first)
    assert engine.step().updated
    engine.check_integrity()
    engine.close()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = nn.Embedding(50, WIDTH, sparse=True), layers(count=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(x[:, 0].abs().mul(10).long()))


@pytest.mark.parametrize("where", [{"host_modules": ["table"]}, {"unmanaged": ["table.*"]}])
def test_sparse_gradients_outside_the_chunks(where: dict[str, Any]) -> None:
    def dense() -> nn.Module:
        module = Embedded()
        module.table.sparse = False
        return module

    expected = by_torch(dense(), plainly)
    found = by_engine(Embedded(), plainly, **PLACES["everything fits"], **where)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layers(1, 2), layers(2, 2)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return sum(getattr(self, one)(x) for one in which)


def test_a_gradient_that_is_set_by_hand_is_not_dropped_in_silence() -> None:
    module = Branches()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None))
    before = engine.weights_sha256()
    for with_backward in (True, False):
        if with_backward:
            module(rows(0), "a").pow(2).mean().backward()
        loss = module(rows(1), "b").pow(2).mean()
        parameters = list(module.b.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        with pytest.raises(StateError, match=r"b\.0\.weight has a gradient in \.grad"):
            engine.step()
        assert engine.weights_sha256() == before
        engine.zero_grad()
    module(rows(2), "ab").pow(2).mean().backward()
    assert engine.step().updated
    engine.close()


@pytest.mark.parametrize("by", ["module", "optimizer"])
def test_zeros_in_place_of_none_are_told_where_they_make_a_difference(by: str) -> None:
    module = Branches()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None))

    def step(which: str, zeros: bool) -> None:
        module(rows(0), which).pow(2).mean().backward()
        engine.step()
        (module if by == "module" else engine.optimizer).zero_grad(set_to_none=not zeros)

    step("ab", True)
    step("ab", True)
    with pytest.warns(EbbtideWarning, match=r"set_to_none=False.*b\.0\.weight and 3 others"):
        step("a", False)
    step("a", True)
    engine.close()


class Whole(nn.Module):
    """A reentrant checkpoint around all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=True)


def adversarial(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
    """Frozen, a backward for the input alone; then one that trains."""
    for number in range(4):
        x = rows(number).requires_grad_()
        module.requires_grad_(False)
        module(x).pow(2).mean().backward()
        module.requires_grad_(True)
        assert x.grad is not None
        other = (x + 0.1 * x.grad.sign()).detach().requires_grad_()
        module(other).pow(2).mean().backward()
        step()
        optimizer.zero_grad()


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_a_backward_through_a_frozen_checkpoint_counts_for_nothing(updates: str) -> None:
    require_alike(Whole, adversarial, updates=updates, **PLACES["everything fits"])


def test_a_backward_through_a_frozen_checkpoint_is_no_micro_batch() -> None:
    updated = []
    engine = ebbtide.initialize(Whole(), config_of(precision="fp32", clip=None, accumulate=2))
    for _ in range(2):
        x = rows(0).requires_grad_()
        for trained in (False, True):
            engine.module.requires_grad_(trained)
            engine.module(x).pow(2).mean().backward()
        updated.append(engine.step().updated)
    assert updated == [False, True]
    engine.close()


def added_later(after: Callable[[nn.Module, Any], None]) -> Loop:
    def loop(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
        for number in range(2):
            module(rows(number), "ab").pow(2).mean().backward()
            step()
            optimizer.zero_grad()
        optimizer.add_param_group({"params": list(module.b.parameters())})
        optimizer.zero_grad()
        after(module, optimizer)
        module(rows(2), "ab").pow(2).mean().backward()
        step()
        optimizer.zero_grad()

    return loop


def other_branch(module: nn.Module, optimizer: Any) -> None:
    """The first loss does not reach what has just been added."""
    module(rows(7), "a").pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("after", [lambda module, optimizer: None, other_branch])
def test_zero_grad_drops_what_came_before_a_parameter_was_in_a_group(after: Any) -> None:
    def run(module: nn.Module, engine: bool) -> dict[str, torch.Tensor]:
        loop = added_later(after)
        if engine:
            optimizer = {"name": "adamw", "lr": LR}
            made = ebbtide.initialize(
                module,
                config_of(precision="fp32", clip=None, optimizer=optimizer),
                list(module.a.parameters()),
            )
            loop(module, made.optimizer, made.step)
            found = made.state_dict()
            made.close()
            return found
        theirs = torch.optim.AdamW(module.a.parameters(), lr=LR)
        loop(module, theirs, theirs.step)
        return {name: value.detach() for name, value in module.named_parameters()}

    expected, found = run(Branches(), False), run(Branches(), True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_group_that_comes_between_backward_and_step_does_not_lose_its_gradient_in_silence() -> None:
    module = Branches()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None), list(module.a.parameters()))
    module(rows(0), "ab").pow(2).mean().backward()
    engine.optimizer.add_param_group({"params": list(module.b.parameters())})
    with pytest.raises(StateError, match=r"b\.0\.weight has a gradient in \.grad"):
        engine.step()
    engine.zero_grad()
    module(rows(0), "ab").pow(2).mean().backward()
    assert engine.step().updated
    engine.close()


def test_a_penalty_before_the_first_pass_counts() -> None:
    def loop(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
        for number in range(3):
            (module.b[0].weight ** 2).sum().backward()
            module(rows(number), "a").pow(2).mean().backward()
            step()
            optimizer.zero_grad()

    require_alike(Branches, loop, **PLACES["everything fits"])


def test_a_clip_outlives_a_step_that_was_not_taken() -> None:
    def run(fails: bool) -> str:
        module = layers()
        engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None))
        module(rows(0)).pow(2).mean().backward()
        engine.clip_grad_norm_(1e-3)
        if fails:

            def hook(*_: Any) -> None:
                raise ValueError("mine")

            handle = engine.optimizer.register_step_pre_hook(hook)
            with pytest.raises(ValueError, match="mine"):
                engine.step()
            handle.remove()
        engine.step()
        sha = engine.weights_sha256()
        engine.close()
        return sha

    assert run(True) == run(False)


def test_zeros_are_told_of_outside_the_chunks_too() -> None:
    module = Branches()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None, unmanaged=["b.*"]))
    for which in ("ab", "a"):
        module(rows(0), which).pow(2).mean().backward()
        if which == "a":
            with pytest.warns(EbbtideWarning, match=r"b\.0\.weight and 3 others had no gradient"):
                engine.step()
        else:
            engine.step()
        engine.zero_grad(set_to_none=False)
    engine.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("since", [0, 2])
def test_hooks_that_change_a_gradient_have_it_first_whenever_they_came(since: int, place: str) -> None:
    """Registered after initialize(), before the first pass and later."""

    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-4, 1e-4)

    def loop(module: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
        for number in range(4):
            loss = module(rows(number)).pow(2).mean() if number != since else None
            if number == since:
                module[2].weight.register_post_accumulate_grad_hook(clamp)
                loss = module(rows(number)).pow(2).mean()
                module[4].weight.register_post_accumulate_grad_hook(clamp)  # within the pass
            assert loss is not None
            loss.backward()
            step()
            optimizer.zero_grad()

    require_alike(layers, loop, **PLACES[place])


def test_a_micro_batch_that_reaches_nothing_trained_counts_as_with_engine_backward() -> None:
    module = Checkpointed()
    other = nn.Linear(WIDTH, WIDTH)
    module.add_module("other", other)
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None, accumulate=2))

    def frozen(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module.last, x.requires_grad_(), use_reentrant=True)

    for own in (True, False):
        loss = engine.run(frozen, rows(0)).pow(2).mean()
        loss.backward() if own else engine.backward(loss)
        assert not engine.step().updated
        engine.backward(engine(rows(1)).pow(2).mean())
        assert engine.step().updated
    engine.close()


def test_a_hook_that_drops_the_step_leaves_no_clip_behind() -> None:
    module = layers()
    engine = ebbtide.initialize(module, config_of(precision="fp32", clip=None))
    module(rows(0)).pow(2).mean().backward()
    engine.clip_grad_norm_(1.0)
    handle = engine.optimizer.register_step_pre_hook(lambda *_: engine.zero_grad())
    with pytest.raises(StateError, match="without a backward pass"):
        engine.step()
    handle.remove()
    module(rows(0)).pow(2).mean().backward()
    assert engine.step().updated
    engine.close()
