"""Update rules beside Adam's: the same bits wherever chunks are, torch's numbers, and what the forecast says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
import reference
import zoo
from ebbtide.checkpoint import resume
from ebbtide.errors import ConfigError
from harness import batch_of, config_of, facts, run, with_budget
from reference import f32

STEPS = 4
LR, DECAY = 1e-2, 0.1


def lion(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    direction = m * f32(0.9) + g * f32(1 - 0.9)
    m.copy_(m * f32(0.99) + g * f32(1 - 0.99))
    p.copy_(p * f32(1 - LR * DECAY) - direction.sign() * f32(LR))


def sgd(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    m.copy_(m * f32(0.9) + (g + p * f32(DECAY)))
    p.copy_(p - m * f32(LR))


RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lion": (lion, {"name": "lion", "lr": LR, "weight_decay": DECAY}),
    "sgd": (sgd, {"name": "sgd", "lr": LR, "momentum": 0.9, "weight_decay": DECAY}),
}


def expected(rule: str, precision: str, clip: float | None) -> tuple[str, list[float]]:
    dtype = reference.ROUND[precision]
    return reference.train(
        zoo.build("gpt2"),
        lambda step: batch_of("gpt2", step, dtype, "cpu"),
        STEPS,
        precision,
        clip=clip,
        update=RULES[rule][0],
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"master": "separate"}, {"precision": "fp32"}, {"updates": "in-backward", "clip": None}],
    ids=["split", "separate", "fp32", "in-backward"],
)
@pytest.mark.parametrize("rule", RULES)
def test_bits_are_those_of_a_plain_loop(rule: str, changes: dict[str, Any], folder: Path) -> None:
    config = config_of(optimizer=RULES[rule][1], **changes)
    wanted = expected(rule, config.get("precision", "bf16"), config["clip"])
    peak, model_data, _ = facts("gpt2", "none", config)
    for share in (None, 2, 6):
        one = config if share is None else with_budget(config, peak + model_data // share)
        done = run("gpt2", "none", STEPS, one)
        assert (done.sha, done.losses) == wanted, share
    on_ssd = {
        "device": {"kind": "cpu", "memory": peak + model_data // 6},
        "host": {"memory": model_data},
        "ssd": {"folder": str(folder), "memory": "8MiB"},
    }
    done = run("gpt2", "none", STEPS, config | on_ssd)
    assert (done.sha, done.losses) == wanted


@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulate": 2}, {"updates": "in-backward"}, {"precision": "fp16"}],
    ids=["split", "accumulate", "in-backward", "fp16"],
)
def test_elements_of_the_gradient_are_kept_within_a_value(changes: dict[str, Any]) -> None:
    """Of the mean gradient, and on no placement otherwise than on another."""
    value, precision = 1e-3, changes.get("precision", "bf16")
    config = config_of(clip=None, clip_value=value, **changes)
    peak, model_data, _ = facts("gpt2", "none", config)
    budgets = [with_budget(config, peak + model_data // share) for share in (2, 6)]
    found = [run("gpt2", "none", STEPS, one) for one in (config, *budgets)]
    assert len({done.sha for done in found}) == 1
    if precision == "bf16":
        dtype, times = reference.ROUND[precision], changes.get("accumulate", 1)
        wanted = reference.train(
            zoo.build("gpt2"),
            lambda step: batch_of("gpt2", step, dtype, "cpu"),
            STEPS,
            accumulate=times,
            clip_value=value,
        )
        assert (found[0].sha, found[0].losses) == wanted
    free = run("gpt2", "none", STEPS, config | {"clip_value": 0})
    assert free.sha != found[0].sha


def test_a_clipped_gradient_is_torchs() -> None:
    value = 1e-3
    model, mine = zoo.build("gpt2"), zoo.build("gpt2")
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = {"name": "sgd", "lr": LR}
    config = config_of(precision="fp32", clip=None, clip_value=value, optimizer=optimizer)
    engine = ebbtide.initialize(mine, config)
    try:
        for step in range(2):
            batch = zoo.ZOO["gpt2"].batch(step)
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), value)
            plain.step()
            plain.zero_grad()
            engine.backward(engine(**batch).loss)
            assert engine.step().grad_norm is not None
        for name, tensor in engine.state_dict().items():
            assert torch.allclose(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-7), name
    finally:
        engine.close()


def test_sgd_is_torchs() -> None:
    model, mine = zoo.build("gpt2"), zoo.build("gpt2")
    plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    handed = torch.optim.SGD(mine.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    engine = ebbtide.initialize(mine, config_of(precision="fp32", clip=None), handed)
    try:
        assert engine.config.optimizer.name == "sgd" and engine.config.optimizer.momentum == 0.9
        for step in range(STEPS):
            batch = zoo.ZOO["gpt2"].batch(step)
            model(**batch).loss.backward()
            plain.step()
            plain.zero_grad()
            engine.backward(engine(**batch).loss)
            engine.step()
        for name, value in engine.state_dict().items():
            assert torch.allclose(value, model.state_dict()[name], rtol=1e-5, atol=1e-6), name
        engine.optimizer.load_state_dict(plain.state_dict())
        theirs = plain.state_dict()["state"]
        assert theirs and engine.steps == 0
    finally:
        engine.close()


@pytest.mark.parametrize("setting", ["nesterov", "dampening"])
def test_what_the_rule_has_not_is_refused_by_name(setting: str) -> None:
    model = zoo.build("gpt2")
    value: Any = True if setting == "nesterov" else 0.5
    handed = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, **{setting: value})
    with pytest.raises(ConfigError, match=f"expected {setting} = "):
        ebbtide.initialize(model, config_of(), handed)


@pytest.mark.parametrize("rule", ["adamw", *RULES])
def test_the_forecast_counts_the_state_that_the_engine_has(rule: str) -> None:
    settings = RULES[rule][1] if rule in RULES else {"name": rule}
    one_tier = {"device": {"memory": "1GB"}, "host": {"memory": 0}}
    config = config_of(precision="fp32", optimizer=settings, **one_tier)
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    try:
        batch = zoo.ZOO["gpt2"].batch(0)
        engine.backward(engine(**batch).loss)
        engine.step()
        tags = engine.stats()["tags"]["device"]
        here = tags["momentum"] + tags.get("variance", 0)
        foreseen = ebbtide.forecast(zoo.build("gpt2"), "pc-8gb", example=batch, config=config)
        assert sum(foreseen.outlook.bytes[tier].get("state", 0) for tier in foreseen.outlook.bytes) == here
    finally:
        engine.close()


BETWEEN = [("lion", "sgd"), ("adamw", "lion"), ("adamw", "adam"), ("adam", "adamw"), ("sgd", "adamw")]


@pytest.mark.parametrize(("saved", "loads"), BETWEEN)
def test_a_checkpoint_of_another_rule_is_refused(saved: str, loads: str, tmp_path: Path) -> None:
    first, second = stepped(saved), stepped(loads)
    try:
        first.save(tmp_path)
        before = second.weights_sha256()
        with pytest.raises(ConfigError, match=f"of another update rule.*optimizer.name = '{saved}'"):
            second.load(tmp_path)
        assert second.weights_sha256() == before != first.weights_sha256()
        second.load_weights(tmp_path)
        assert second.weights_sha256() == first.weights_sha256()
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(("saved", "loads"), [two for two in BETWEEN if set(two) != {"adam", "adamw"}])
def test_one_that_does_not_name_its_rule_is_refused_by_its_state(
    saved: str, loads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As checkpoints did not always. Adam's two forms cannot be told apart there."""
    first, second = stepped(saved), stepped(loads)
    of = resume.facts_of

    def without(*given: Any) -> dict[str, Any]:
        return {key: value for key, value in of(*given).items() if key != "rule"}

    monkeypatch.setattr(resume, "facts_of", without)
    try:
        first.save(tmp_path)
        before = second.weights_sha256()
        with pytest.raises(ConfigError, match="of another update rule"):
            second.load(tmp_path)
        assert second.weights_sha256() == before
    finally:
        first.close()
        second.close()


def test_one_that_lacks_a_setting_of_its_rule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, the step would read this engine's own: another training than the one that was saved."""
    first, second = stepped("lion"), stepped("lion")
    of = resume.facts_of

    def without(*given: Any) -> dict[str, Any]:
        facts = of(*given)
        for group in facts["groups"]:
            del group["settings"]["betas"]
        return facts

    monkeypatch.setattr(resume, "facts_of", without)
    try:
        first.save(tmp_path)
        before = second.weights_sha256()
        with pytest.raises(ConfigError, match="it has no 'betas', which lion reads"):
            second.load(tmp_path)
        assert second.weights_sha256() == before
    finally:
        first.close()
        second.close()


def stepped(rule: str) -> ebbtide.Engine:
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(optimizer={"name": rule, "lr": 1e-3}))
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(0)).loss)
    engine.step()
    return engine
