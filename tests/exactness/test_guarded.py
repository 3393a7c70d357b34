"""Updates that a device is given before the host knows whether all gradients are finite, as on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsFloat

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ebbtide
import zoo
from ebbtide.engine import opening
from ebbtide.errors import ConfigError, NonFiniteError, StateError
from ebbtide.kernels import Decision, FallbackKernels, Operands, Rule, Scaling
from harness import config_of
from sampling import crossed

Pieces = Iterable[tuple[Operands, Sequence[float]]]
BESIDE_A_HOST = {"host": {"memory": 8_000_000}, "clip": None}


class Late:
    """Updates as a GPU does them: it finds out how, and whether, when it comes to them, and tells who asks."""

    def __init__(
        self, kernels: LateKernels, sums: Sequence[float], losses: Sequence[torch.Tensor], scaling: Scaling
    ) -> None:
        self._kernels, self._deeds = kernels, kernels.deeds
        self._found = scaling.decide(sum(sums)) if all(map(math.isfinite, [*sums, *losses])) else None

    def update_all(self, rule: Rule, pieces: Pieces) -> None:
        self._deeds.append("update")
        if self._found is not None:
            scale = torch.tensor(self._found.factor, dtype=torch.float32).item()
            self._kernels.update_all(rule, [(o, (scale, *coefficients[1:])) for o, coefficients in pieces])

    def decision(self) -> Decision | None:
        self._deeds.append("look")
        if "interrupt" in self._deeds:
            self._deeds.remove("interrupt")
            raise KeyboardInterrupt
        return self._found


class LateKernels(FallbackKernels):
    def __init__(self) -> None:
        self.deeds: list[str] = []

    def guarded(
        self, rule: Rule, sums: Sequence[SupportsFloat], losses: Sequence[torch.Tensor], scaling: Scaling
    ) -> Late:
        return Late(self, [float(one) for one in sums], losses, scaling)


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the device was given to do, and when the host looked."""
    kernels = LateKernels()
    monkeypatch.setattr(opening, "cpu_kernels", lambda: kernels)
    return kernels.deeds


def engine_of(name: str, rests: bool, **changes: Any) -> ebbtide.Engine:
    engine = ebbtide.initialize(zoo.build(name), config_of(**BESIDE_A_HOST | changes))
    engine._session.resting._possible = rests
    return engine


def steps(
    engine: ebbtide.Engine, numbers: Iterable[int], name: str = "gpt2", factor: float = 1.0
) -> list[Any]:
    found = []
    for number in numbers:
        for micro in range(engine.config.accumulate):
            engine.backward(engine(**zoo.ZOO[name].batch(10 * number + micro)).loss * factor)
        found.append(engine.step())
    return found


def both(deed: Callable[[ebbtide.Engine, bool], None], **changes: Any) -> None:
    """The same weights, whether the device knows by itself or the host looks first."""
    shas = []
    for rests in (True, False):
        engine = engine_of("gpt2", rests, **changes)
        deed(engine, rests)
        engine.check_integrity()
        shas.append((engine.steps, engine.weights_sha256()))
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize(
    ("name", "changes"), crossed(zoo.ZOO, [{}, {"accumulate": 2}, {"precision": "fp32"}, {"clip": 0.5}])
)
def test_numbers_and_counts_are_those_of_steps_that_look_first(
    name: str, changes: dict[str, Any], deeds: list[str]
) -> None:
    shas, said = [], []
    for rests in (True, False):
        engine = engine_of(name, rests, **changes)
        results = steps(engine, range(3), name)
        deeds.clear()
        results += steps(engine, range(3, 6), name)
        said.append(results)
        assert ("update" in deeds) is rests
        assert deeds.count("look") == (3 if rests else 0)
        assert not rests or (deeds[0], deeds[-1]) == ("update", "look")
        engine.check_integrity()
        found = engine.stats()
        assert found["peak_bytes"]["device"] <= found["budget_bytes"]["device"]
        shas.append((engine.weights_sha256(), found["moved_bytes"], found["traces"]))
        engine.close()
    assert shas[0] == shas[1]
    assert said[0] == said[1] and all(result.updated for result in said[0][3:])
    assert said[0][-1].grad_norm is not None


def refused_loss(engine: ebbtide.Engine) -> None:
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(7)).loss * float("inf"))


def refused_gradient(engine: ebbtide.Engine) -> None:
    weight = engine.module.transformer.h[1].mlp.c_fc.weight
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(7)).loss)
    handle.remove()


def refused_term(engine: ebbtide.Engine) -> None:
    """Its gradients are finite."""
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(7)).loss + float("inf"))


REFUSED = pytest.mark.parametrize("backward", [refused_loss, refused_gradient, refused_term])


@REFUSED
def test_what_is_not_finite_changes_nothing(
    backward: Callable[[ebbtide.Engine], None], deeds: list[str]
) -> None:
    said = []

    def deed(engine: ebbtide.Engine, rests: bool) -> None:
        steps(engine, range(4))
        before = engine.weights_sha256()
        deeds.clear()
        backward(engine)
        with pytest.raises(NonFiniteError) as caught:
            engine.step()
        assert ("update" in deeds) is rests
        said.append(str(caught.value))
        assert engine.weights_sha256() == before
        steps(engine, range(8, 11))

    both(deed)
    assert said[0] == said[1] and "step 5" in said[0]


def test_steps_that_are_skipped_are_no_steps(deeds: list[str]) -> None:
    def deed(engine: ebbtide.Engine, rests: bool) -> None:
        steps(engine, range(4))
        deeds.clear()
        [result] = steps(engine, [4], factor=float("inf"))
        assert (result.updated, result.skipped) == (False, True)
        assert ("update" in deeds) is rests
        steps(engine, range(5, 8))

    both(deed, nonfinite="continue")


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def test_whoever_listens_to_the_optimizer_may_still_change_its_settings(deeds: list[str]) -> None:
    def deed(engine: ebbtide.Engine, _: bool) -> None:
        steps(engine, range(4))
        deeds.clear()
        handle = engine.optimizer.register_step_pre_hook(halve)
        steps(engine, range(4, 6))
        handle.remove()
        handle = register_optimizer_step_pre_hook(halve)
        steps(engine, range(6, 8))
        handle.remove()
        step = engine.optimizer.step

        def halved() -> None:
            halve(engine.optimizer)
            step()

        engine.optimizer.step = halved  # type: ignore[method-assign,assignment]
        steps(engine, range(8, 10))
        assert not deeds and engine.optimizer.param_groups[0]["lr"] == 1e-3 / 64
        del engine.optimizer.step

    both(deed)


def test_schedulers_are_no_hindrance(deeds: list[str]) -> None:
    def deed(engine: ebbtide.Engine, rests: bool) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.9**step)
        for number in range(6):
            deeds.clear()
            steps(engine, [number])
            scheduler.step()
        assert ("update" in deeds) is rests

    both(deed)


def clamp(engine: ebbtide.Engine) -> None:
    with torch.no_grad():
        engine.module.transformer.h[0].mlp.c_fc.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (lambda engine: halve(engine.optimizer), "settings have been changed"),
        (clamp, "values have been written"),
    ],
    ids=["settings", "weights"],
)
def test_what_changes_behind_the_update_is_refused(
    deed: Callable[[ebbtide.Engine], None], said: str, deeds: list[str]
) -> None:
    """By code that looks like a scheduler's. The update has been made with what was there before."""
    engine = engine_of("gpt2", True)
    steps(engine, range(4))
    torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
    step = engine.optimizer.step

    @functools.wraps(step)
    def changed() -> None:
        deed(engine)
        step()

    engine.optimizer.step = changed  # type: ignore[method-assign]
    with pytest.raises(StateError, match=said + r" inside optimizer.step\(\)"):
        steps(engine, [4])
    with pytest.raises(StateError, match="left some parameters updated"):
        steps(engine, [5])
    engine.close()


@pytest.mark.parametrize("setting", ["lr", "eps", "weight_decay"])
def test_settings_that_are_no_numbers_are_refused(setting: str, deeds: list[str]) -> None:
    def deed(engine: ebbtide.Engine, _: bool) -> None:
        steps(engine, range(4))
        good = engine.optimizer.param_groups[0][setting]
        engine.optimizer.param_groups[0][setting] = math.nan
        with pytest.raises(ConfigError, match=f"'{setting}', found nan; nothing was updated"):
            steps(engine, [4])
        engine.optimizer.param_groups[0][setting] = good
        engine.optimizer.zero_grad()
        steps(engine, [5])

    both(deed)


def test_an_interrupt_while_the_device_is_waited_for_comes_after_the_step(deeds: list[str]) -> None:
    def deed(engine: ebbtide.Engine, rests: bool) -> None:
        steps(engine, range(4))
        if rests:
            deeds.append("interrupt")
            with pytest.raises(KeyboardInterrupt):
                steps(engine, [4])
        else:
            steps(engine, [4])
        assert engine.steps == 5
        steps(engine, range(5, 8))

    both(deed)


@REFUSED
def test_an_interrupt_before_a_step_that_is_refused_leaves_it_to_be_refused(
    backward: Callable[[ebbtide.Engine], None], deeds: list[str]
) -> None:
    engine = engine_of("gpt2", True)
    steps(engine, range(4))
    before = engine.weights_sha256()
    backward(engine)
    deeds.append("interrupt")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(NonFiniteError):
        engine.step()
    assert (engine.weights_sha256(), engine.steps) == (before, 4)
    steps(engine, [4])
    engine.close()


def test_weights_written_between_backward_and_step_are_updated_from_what_was_written(
    deeds: list[str],
) -> None:
    def deed(engine: ebbtide.Engine, rests: bool) -> None:
        steps(engine, range(4))
        for number in range(4, 7):
            deeds.clear()
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
            with torch.no_grad():
                engine.module.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
            engine.step()
            assert ("look" in deeds) is rests

    both(deed)


def test_parameters_outside_the_chunks_are_looked_at_by_the_host(deeds: list[str]) -> None:
    def deed(engine: ebbtide.Engine, _: bool) -> None:
        steps(engine, range(4))
        refused_loss(engine)
        with pytest.raises(NonFiniteError):
            engine.step()
        steps(engine, range(4, 7))
        assert not deeds

    both(deed, unmanaged=["transformer.ln_f.*"])


def test_loss_scaling_skips_backs_off_and_grows_alike(deeds: list[str]) -> None:
    said = []

    def deed(engine: ebbtide.Engine, rests: bool) -> None:
        engine._core.scaler.interval = 3  # type: ignore[union-attr]
        steps(engine, range(3))
        deeds.clear()
        said.append(steps(engine, range(3, 12)))
        said[-1] += steps(engine, [12], factor=1e30) + steps(engine, range(13, 16))
        assert ("update" in deeds) is rests

    both(deed, precision="fp16", accumulate=2, clip=0.5)
    assert said[0] == said[1]
    assert (
        len({result.loss_scale for result in said[0]}) > 1 and said[0][-1].updated and said[0][-1].grad_norm
    )
    assert any(result.skipped for result in said[0])
