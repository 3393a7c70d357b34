"""The optimizer's face: param groups change between steps as in plain PyTorch, and what it cannot do it says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ebbtide
import zoo
from ebbtide.errors import ConfigError, EbbtideWarning, StateError, UnsupportedError
from harness import config_of


def engine_of(groups: Any = None, **changes: Any) -> ebbtide.Engine:
    model = zoo.build("gpt2")
    changes = {"precision": "fp32", "device": {"memory": 2_500_000}} | changes
    return ebbtide.initialize(model, config_of(**changes), None if groups is None else groups(model))


def step(engine: ebbtide.Engine, number: int) -> None:
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
    engine.step()
    engine.check_integrity()


@pytest.mark.parametrize("updates", ["exact", "in-backward", "lock-free"])
def test_a_parameter_that_leaves_its_group_is_trained_no_more(updates: str) -> None:
    engine = engine_of(updates=updates, clip=None)
    name = "transformer.h.1.mlp.c_fc.weight"
    try:
        step(engine, 0)
        step(engine, 1)
        group = engine.optimizer.param_groups[0]
        gone = dict(engine.module.named_parameters())[name]
        group["params"] = [p for p in group["params"] if p is not gone]
        before = engine.state_dict()
        step(engine, 2)
        step(engine, 3)
        after = engine.state_dict()
        other = "transformer.h.1.mlp.c_proj.weight"
        assert torch.equal(before[name], after[name]) and not torch.equal(before[other], after[other])
        group["params"].append(gone)
        gone.grad = None
        step(engine, 4)
        assert not torch.equal(engine.state_dict()[name], after[name])
    finally:
        engine.close()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    late = [p for n, p in model.named_parameters() if ".h.2." in n]
    return [{"params": [p for n, p in model.named_parameters() if ".h.2." not in n]}, {"params": late}]


@pytest.mark.parametrize("updates", ["exact", "in-backward", "lock-free"])
def test_a_group_goes_and_another_comes(updates: str) -> None:
    """The same weights as where it stays and learns nothing."""
    shas = []
    for removed in (False, True):
        engine = engine_of(two_groups, updates=updates, clip=None)
        try:
            step(engine, 0)
            group = engine.optimizer.param_groups[0]
            rate = group["lr"]
            if removed:
                engine.optimizer.param_groups.pop(0)
            else:
                group["lr"] = 0.0
                group["weight_decay"] = 0.0
            step(engine, 1)
            engine.synchronize()
            before = engine.state_dict()["transformer.h.0.mlp.c_fc.weight"]
            step(engine, 2)
            engine.synchronize()
            after = engine.state_dict()
            assert torch.equal(after["transformer.h.0.mlp.c_fc.weight"], before)
            shas.append({key: value for key, value in after.items() if ".h.2." in key})
            assert rate > 0
        finally:
            engine.close()
    if updates != "lock-free":  # there, when updates are seen is not the same twice
        assert all(torch.equal(shas[0][key], shas[1][key]) for key in shas[0])


def test_a_gradient_that_waits_keeps_its_group() -> None:
    engine = engine_of(two_groups)
    try:
        step(engine, 0)
        sha = engine.weights_sha256()
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(1)).loss)
        group = engine.optimizer.param_groups.pop(0)
        with pytest.raises(StateError, match=r"has left the optimizer's param groups"):
            engine.step()
        assert engine.weights_sha256() == sha
        engine.optimizer.param_groups.insert(0, group)
        engine.step()
        engine.check_integrity()
        assert engine.weights_sha256() != sha
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
        engine.optimizer.param_groups.pop(0)
        engine.optimizer.zero_grad()
        step(engine, 2)
    finally:
        engine.close()


def test_moments_of_torchs_optimizer_are_taken_in() -> None:
    """As training that began elsewhere goes on: the next step is the one that torch would take."""
    model = zoo.build("gpt2")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(2):
        model(**zoo.ZOO["gpt2"].batch(number)).loss.backward()
        plain.step()
        plain.zero_grad()
    engine = ebbtide.initialize(
        zoo.build("gpt2"), config_of(precision="fp32", clip=None, device={"memory": 2_200_000})
    )
    try:
        step(engine, 5)  # other moments, which go
        engine.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, strict=False
        )
        engine.optimizer.load_state_dict(plain.state_dict())
        assert engine.steps == 2 and not engine.optimizer.state
        model(**zoo.ZOO["gpt2"].batch(3)).loss.backward()
        plain.step()
        step(engine, 3)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-7)
        engine.check_integrity()
    finally:
        engine.close()


def test_what_is_loaded_into_the_optimizer_that_was_handed_over_goes_to_the_engine() -> None:
    """It lay there unused, and what was saved of it had no moments, without a word."""
    model = zoo.build("gpt2")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**zoo.ZOO["gpt2"].batch(0)).loss.backward()
    plain.step()
    module = zoo.build("gpt2")
    handed = torch.optim.AdamW(module.parameters(), lr=1e-3)
    config = config_of(precision="fp32", clip=None, device={"memory": 2_200_000})
    del config["optimizer"]
    engine = ebbtide.initialize(module, config, handed)
    try:
        handed.load_state_dict(plain.state_dict())
        assert engine.steps == 1 and not handed.state and not engine.optimizer.state
        assert handed.param_groups is engine.optimizer.param_groups and handed.param_groups[0]["lr"] == 1e-2
        engine.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, strict=False
        )
        plain.zero_grad()
        model(**zoo.ZOO["gpt2"].batch(3)).loss.backward()
        plain.step()
        step(engine, 3)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)
        with pytest.warns(UserWarning, match=r"no moments; engine\.save"):
            handed.state_dict()
        with pytest.raises(UnsupportedError, match="was handed over"):
            handed.step()
    finally:
        engine.close()


def test_state_of_another_optimizer_is_refused() -> None:
    model = zoo.build("gpt2")
    engine = engine_of()
    try:
        step(engine, 0)
        before = engine.weights_sha256()
        for other, said in (
            (torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), "momentum_buffer"),
            (torch.optim.AdamW(list(model.parameters())[1:], lr=1e-3), "groups of"),
        ):
            model(**zoo.ZOO["gpt2"].batch(0)).loss.backward()
            other.step()
            with pytest.raises(ConfigError, match=said):
                engine.optimizer.load_state_dict(other.state_dict())
        assert not engine.optimizer.state and engine.weights_sha256() == before
        engine.optimizer.param_groups[0]["lr"] = 0.25
        with pytest.warns(UserWarning, match=r"engine\.save"):
            groups = engine.optimizer.state_dict()
        engine.optimizer.param_groups[0]["lr"] = 0.5
        engine.optimizer.load_state_dict(groups)
        assert engine.optimizer.param_groups[0]["lr"] == 0.25
        step(engine, 1)
    finally:
        engine.close()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(way: Any) -> None:
    engine = engine_of()
    try:
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            way(engine.optimizer)
        step(engine, 0)
    finally:
        engine.close()


BAD = {
    "lr": [None, "x", float("nan"), 1e39],
    "betas": [(1.0, 0.9), (0.9, 0.99, 0.999), 0.9],
    "eps": [-1.0, float("inf")],
    "weight_decay": [None],
}


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_a_setting_that_cannot_be_is_refused_before_anything_is_updated(updates: str) -> None:
    """The update began with it, raised, and left an engine that said it was half-way."""
    engine = engine_of(updates=updates, clip=None)
    step(engine, 0)
    before = engine.weights_sha256()
    group = engine.optimizer.param_groups[0]
    for key, values in BAD.items():
        good = group[key]
        for value in values:
            group[key] = value
            with pytest.raises(ConfigError, match=rf"param_groups\[0\].*'{key}'"):
                step(engine, 1)
            engine.optimizer.zero_grad()
        del group[key]
        with pytest.raises(ConfigError, match=rf"'{key}', found nothing"):
            step(engine, 1)
        group[key] = good
        engine.optimizer.zero_grad()
    assert engine.weights_sha256() == before
    step(engine, 1)
    assert engine.weights_sha256() != before
    engine.close()


def test_groups_that_come_later_are_looked_at_like_the_first() -> None:
    engine = engine_of(two_groups)
    outside = nn.Parameter(torch.ones(()))
    own = engine.optimizer.param_groups[1]["params"].pop()
    with pytest.raises(ConfigError, match=r"param_groups\[2\] has 1 parameters that are not the module's"):
        engine.optimizer.add_param_group({"params": [outside]})
    for key in ("maximize", "amsgrad"):
        with pytest.raises(ConfigError, match=f"param_groups\\[2\\]: expected {key} = False, found True"):
            engine.optimizer.add_param_group({"params": [own], key: True})
    with pytest.raises(ConfigError, match=r"param_groups\[2\].*'betas'"):
        engine.optimizer.add_param_group({"params": [own], "betas": (1.0, 0.9)})
    engine.optimizer.add_param_group({"params": own, "lr": 1e-3})
    step(engine, 0)
    engine.close()


def listed(model: nn.Module) -> Any:
    return list(model.parameters())


def by_name(model: nn.Module) -> Any:
    return model.named_parameters()


def in_a_group(model: nn.Module) -> Any:
    return [{"params": model.named_parameters()}]


@pytest.mark.parametrize("groups", [listed, by_name, in_a_group])
def test_parameters_are_given_as_to_torch(groups: Any) -> None:
    engine, plain = engine_of(groups), engine_of()
    for one in (engine, plain):
        step(one, 0)
    assert engine.weights_sha256() == plain.weights_sha256()
    engine.close()
    plain.close()


@pytest.mark.parametrize(
    ("precision", "updates"), [("fp32", "exact"), ("fp16", "exact"), ("fp32", "in-backward")]
)
def test_a_hook_of_the_optimizers_that_raises_breaks_nothing(precision: str, updates: str) -> None:
    """Before the step nothing has been updated, after it everything: neither is half-way."""
    engine = engine_of(precision=precision, updates=updates, clip=None)
    plain = engine_of(precision=precision, updates=updates, clip=None)
    for one in (engine, plain):
        step(one, 0)

    def raises(*_: Any) -> None:
        raise ValueError("mine")

    for register in (engine.optimizer.register_step_pre_hook, engine.optimizer.register_step_post_hook):
        handle = register(raises)
        with pytest.raises(ValueError, match="mine"):
            step(engine, 1)
        handle.remove()
        if register == engine.optimizer.register_step_pre_hook:
            engine.step()  # the gradients are still there
            step(plain, 1)
            step(plain, 1)
    assert engine.steps == plain.steps == 3
    for one in (engine, plain):
        step(one, 2)
    assert engine.weights_sha256() == plain.weights_sha256()
    assert engine.loss_scale == plain.loss_scale
    engine.close()
    plain.close()


@pytest.mark.parametrize("by", ["engine", "optimizer"])
def test_hooks_of_a_step_run_once(by: str) -> None:
    """Whoever is called: a hook that halves the rate, or counts, would else do so twice."""
    engine, plain = engine_of(clip=None), engine_of(clip=None)
    called: list[str] = []

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        called.append("before")
        for group in optimizer.param_groups:
            group["lr"] /= 2

    engine.optimizer.register_step_pre_hook(halve)
    engine.optimizer.register_step_post_hook(lambda *_: called.append("after"))
    everywhere = register_optimizer_step_post_hook(
        lambda optimizer, *_: called.append("global") if optimizer is engine.optimizer else None
    )
    try:
        for number in range(3):
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
            engine.step() if by == "engine" else engine.optimizer.step()
            assert called == ["before", "after", "global"]
            halve(plain.optimizer)
            step(plain, number)
            called.clear()
    finally:
        everywhere.remove()
    assert engine.steps == 3
    assert engine.weights_sha256() == plain.weights_sha256()
    engine.close()
    plain.close()


def test_settings_that_are_loaded_mean_what_they_say() -> None:
    """A state_dict of an optimizer of torch's that has what the engine's rules have not."""
    engine = engine_of(clip=None)
    before = copy.deepcopy([{**group, "params": []} for group in engine.optimizer.param_groups])
    with pytest.warns(EbbtideWarning, match="no moments"):
        good = engine.optimizer.state_dict()
    for setting, value in {"amsgrad": True, "maximize": True, "momentom": 0.9}.items():
        bad = {**good, "param_groups": [{**group, setting: value} for group in good["param_groups"]]}
        with pytest.raises(ConfigError, match=rf"param_groups\[0\].*{setting}"):
            engine.optimizer.load_state_dict(bad)
    assert [{**group, "params": []} for group in engine.optimizer.param_groups] == before
    fine = [{**group, "amsgrad": False, "correct_bias": True, "lr": 0.5} for group in good["param_groups"]]
    engine.optimizer.load_state_dict({**good, "param_groups": fine})
    assert engine.optimizer.param_groups[0]["lr"] == 0.5 and "amsgrad" not in engine.optimizer.param_groups[0]
    coupled = torch.optim.Adam(engine.module.parameters(), weight_decay=0.1).state_dict()
    with pytest.raises(ConfigError, match="decoupled_weight_decay = True"):
        engine.optimizer.load_state_dict(coupled)
    engine.close()


def test_what_a_loop_has_put_into_the_groups_is_loaded_with_them() -> None:
    engine = engine_of(clip=None)
    torch.optim.swa_utils.SWALR(engine.optimizer, swa_lr=0.05)
    engine.optimizer.param_groups[0]["lr_scale"] = 0.5
    with pytest.warns(EbbtideWarning, match="no moments"):
        saved = copy.deepcopy(engine.optimizer.state_dict())
    engine.optimizer.param_groups[0]["lr_scale"] = 1.0
    engine.optimizer.load_state_dict(saved)
    assert engine.optimizer.param_groups[0]["lr_scale"] == 0.5
    assert engine.optimizer.param_groups[0]["swa_lr"] == 0.05
    engine.close()
