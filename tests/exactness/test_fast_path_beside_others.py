"""Passes that are not followed, beside what else reaches their parameters: other backward passes, hooks, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from harness import config_of

WIDTH = 32


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)).relu()
        return x.float().square().mean()


def engine_of(module: nn.Module, rests: bool, **changes: Any) -> ebbtide.Engine:
    groups = changes.pop("groups", None)
    settings = config_of(**{"precision": "fp32", "chunk_size": "16KiB", "clip": 0.5, **changes})
    engine = ebbtide.initialize(module, settings, groups)
    if not rests:
        engine._session.resting.rule_out()
    return engine


Deed = Callable[[ebbtide.Engine], None]


def nothing(engine: ebbtide.Engine) -> None: ...


def penalty(engine: ebbtide.Engine) -> None:
    (engine.module.layers[1].weight.square().sum() * 0.01).backward()


def looked_at(engine: ebbtide.Engine) -> None:
    """What the loss says of an input, by a backward of the user's; its gradients of weights are dropped."""
    engine.module(batch(1000)).backward()
    engine.optimizer.zero_grad()


def trained(
    rests: bool, before: Deed = nothing, within: Deed = nothing, after: Deed = nothing, **changes: Any
) -> tuple[str, list[bool]]:
    engine = engine_of(changes.pop("module", None) or Net(), rests, **changes)
    rested = []
    for number in range(6 * engine.config.accumulate):
        if number % engine.config.accumulate == 0:
            before(engine)
        loss = engine(batch(number))
        within(engine)
        engine.backward(loss)
        rested.append(engine._session.resting.now)
        after(engine)
        engine.step()
    engine.check_integrity()
    sha = engine.weights_sha256()
    engine.close()
    return sha, rested


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_gradients_of_a_backward_of_the_users_count(when: str, accumulate: int) -> None:
    sha, rested = trained(True, accumulate=accumulate, **{when: penalty})
    followed, _ = trained(False, accumulate=accumulate, **{when: penalty})
    assert sha == followed != trained(False, accumulate=accumulate)[0]
    assert (
        rested.count(True) > 1 if when != "within" else rested.count(True) == 1
    )  # from then on it is followed


def test_gradients_that_are_dropped_are_gone() -> None:
    sha, rested = trained(True, before=looked_at)
    assert any(rested)
    assert sha == trained(False, before=looked_at)[0] == trained(False)[0]


def test_a_loss_through_another_engines_model() -> None:
    """What the generator's loss leaves in the discriminator is dropped, or was not computed at all."""

    def trained(rests: bool, computed: bool) -> tuple[str, str]:
        judge = engine_of(Net(), rests)
        generator = engine_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), rests)
        for number in range(8):
            judge.module.requires_grad_(computed)
            generator.backward(-judge(generator(batch(number))))
            generator.step()
            judge.optimizer.zero_grad()
            judge.module.requires_grad_(True)
            with torch.no_grad():
                made = generator(batch(number))
            judge.backward(judge(made) - judge(batch(100 + number)))
            judge.step()
        shas = generator.weights_sha256(), judge.weights_sha256()
        judge.close()
        generator.close()
        return shas

    assert len({trained(rests, computed) for rests in (True, False) for computed in (True, False)}) == 1


@pytest.mark.parametrize("layout", ["chunk", "tensor"])
def test_what_was_in_a_frozen_weights_gradient_is_not_taken_for_a_new_one(layout: str) -> None:
    shas = []
    for rests in (True, False):
        module = Net()
        module(batch(0)).backward()
        for index, layer in enumerate(module.layers):
            for parameter in layer.parameters():
                parameter.requires_grad_(index != 1)
                parameter.grad = parameter.grad if index == 1 else None
        frozen = module.layers[1].weight.detach().clone()
        more = {} if layout == "chunk" else {"chunk_size": "auto"}
        engine = engine_of(module, rests, groups=[{"params": [*module.parameters()]}], layout=layout, **more)
        for number in range(6):
            engine.backward(engine(batch(number)))
            engine.step()
        with engine.weights("layers.1.weight") as values:
            assert torch.equal(values["layers.1.weight"], frozen)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_graph_of_one_pass_goes_back_in_another(checkpointed: bool) -> None:
    """The next micro-batch runs forward before the last one has gone back, so some passes have two."""
    shas = []
    for rests in (True, False):
        engine = engine_of(Net(checkpointed), rests, accumulate=6)
        rested, number = [], 0
        for _ in range(4):
            loss = engine(batch(number).requires_grad_())
            for micro in range(1, 7):
                number += 1
                following = engine(batch(number).requires_grad_()) if micro < 6 else None
                engine.backward(loss)
                rested.append(engine._session.resting.now)
                engine.step()
                loss = following
        assert any(rested) is (rests and not checkpointed)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_sparse_gradients_add_up_alike_with_and_without_a_budget() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, WIDTH, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.table((x[:, 0] > 0).long()))

    free, _ = trained(True, module=Sparse(), accumulate=3)
    assert free == trained(True, module=Sparse(), accumulate=3, device={"memory": 200_000})[0]


def clamped(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def test_hooks_on_gradients_see_what_they_see_in_passes_that_are_followed() -> None:
    shas = []
    for rests in (True, False):
        module = Net()
        module.layers[1].weight.register_post_accumulate_grad_hook(clamped)
        sha, rested = trained(rests, module=module, accumulate=2)
        assert not any(rested)
        shas.append(sha)
    assert shas[0] == shas[1]


def test_backward_in_inference_mode() -> None:
    shas = []
    for rests in (True, False):
        engine = engine_of(Net(), rests, accumulate=2)
        for number in range(12):
            loss = engine(batch(number))
            with torch.inference_mode():
                engine.backward(loss)
            assert engine._session.resting.now is (rests and number > 1)
            engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_an_interrupt_after_autograd_adds_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd has added to held gradients is not known any more, so the step begins anew."""

    def interrupted() -> set[int]:
        raise KeyboardInterrupt

    engine = engine_of(Net(), True, accumulate=2)
    for number in range(12):
        engine.backward(engine(batch(number)))
        if number == 8:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                loss = engine(batch(number + 1))
                assert engine._session.resting.now
                patch.setattr(engine._session.resting._untold, "take_in", interrupted)
                engine.backward(loss)
            assert engine._session.micro == 0
            engine.backward(engine(batch(number)))
        engine.step()
    assert engine.weights_sha256() == trained(False, accumulate=2)[0]
    engine.close()


def test_passes_in_pieces_are_followed() -> None:
    engine = engine_of(Net(), True)
    for number in range(4):
        losses = [engine.forward_of_pass(batch(2 * number + piece)) for piece in range(2)]
        for loss in losses:
            with engine.backpropagating(last=loss is losses[-1]):
                loss.backward()
            assert not engine._session.resting.now
        engine.step()
    engine.close()
