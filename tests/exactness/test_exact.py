"""The promise: placement never changes a number. Weights are hashed against a plain loop that moves nothing."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from ebbtide.kernels import FallbackKernels
from harness import config_of, expected, facts, least_budget, run, with_budget
from sampling import crossed

MODES = ("none", "non-reentrant", "reentrant")
STEPS = 4

CHANGES: dict[str, dict[str, Any]] = {
    "page": {"layout": "page"},
    "tensor": {"layout": "tensor"},
    "separate": {"master": "separate"},
    "separate-page": {"master": "separate", "layout": "page"},
    "host": {"placement": "host"},
    "lru": {"eviction": "lru"},
    "list-order": {"eviction": "list-order"},
    "no-prefetch": {"prefetch": False},
    "fp32": {"precision": "fp32"},
    "in-backward": {"updates": "in-backward", "clip": None},
    "in-backward-separate": {"updates": "in-backward", "clip": None, "master": "separate"},
    "accumulate": {"accumulate": 3},
    "accumulate-separate": {"accumulate": 2, "master": "separate"},
}


def check(name: str, mode: str, steps: int, config: dict[str, Any], budget: int | None) -> dict[str, Any]:
    if budget is not None:
        config = with_budget(config, budget)
    done = run(name, mode, steps, config)
    clip, accumulate = config.get("clip"), config.get("accumulate", 1)
    sha, losses = expected(name, mode, steps, config.get("precision", "bf16"), clip, accumulate)
    assert tuple(done.losses) == losses
    assert done.sha == sha
    if budget is not None:
        assert done.counted <= budget, f"{done.counted} bytes counted, {budget} allowed"
        assert done.stats["peak_bytes"]["device"] <= budget
    return done.stats


@pytest.mark.parametrize(("name", "mode"), crossed(zoo.ZOO, MODES))
def test_resident_and_least(name: str, mode: str) -> None:
    config = config_of()
    check(name, mode, STEPS, config, None)
    budget, done = least_budget(name, mode, STEPS, config)
    sha, losses = expected(name, mode, STEPS)
    assert done.sha == sha and tuple(done.losses) == losses
    assert done.counted <= budget, f"{done.counted} bytes counted, {budget} allowed"
    assert all(done.stats["moved_bytes"][link] > 0 for link in ("host_to_device", "device_to_host"))


@pytest.mark.parametrize(("name", "share"), crossed(zoo.ZOO, [2, 4, 8]))
def test_shares_of_model_data(name: str, share: int) -> None:
    config = config_of()
    peak, model_data, _ = facts(name, "none", config)
    stats = check(name, "none", STEPS, config, peak + model_data // share)
    assert stats["moved_bytes"]["host_to_device"] > 0
    assert stats["traces"] == 2 and not stats["diverged"]


@pytest.mark.parametrize(("name", "change"), crossed(["gpt2", "attention"], CHANGES))
def test_settings(name: str, change: str) -> None:
    config = config_of(**CHANGES[change])
    peak, model_data, _ = facts(name, "none", config | {"placement": "auto"})
    for share in (3, 8):
        check(name, "none", STEPS, config, peak + model_data // share)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_static_partition(name: str) -> None:
    config = config_of(placement="static")
    peak, _, parameters = facts(name, "none", config)
    check(name, "none", STEPS, config, peak + 2 * parameters)


@pytest.mark.parametrize(
    ("name", "change"), crossed(["gpt2", "attention"], ["split", "separate", "in-backward", "fp32"])
)
def test_without_a_compiler(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback kernels, through the engine."""
    used = []
    fallback = FallbackKernels()
    monkeypatch.setattr("ebbtide.engine.opening.cpu_kernels", lambda: used.append(fallback) or fallback)
    config = config_of(**CHANGES.get(change, {}))
    peak, model_data, _ = facts(name, "none", config)
    check(name, "none", STEPS, config, None)
    check(name, "none", STEPS, config, peak + model_data // 4)
    assert used


@pytest.mark.heavy
@pytest.mark.parametrize("change", ["plain", *CHANGES])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_everything(name: str, mode: str, change: str) -> None:
    config = config_of(**CHANGES.get(change, {}))
    peak, model_data, parameters = facts(name, mode, config | {"placement": "auto"})
    check(name, mode, 20, config, None)
    for share in (2, 4, 8):
        budget = peak + model_data // share
        stats = check(name, mode, 20, config, budget)
        if budget < parameters:
            assert stats["moved_bytes"]["host_to_device"] > 0
    if change == "plain":
        budget, done = least_budget(name, mode, 20, config)
        assert (done.sha, tuple(done.losses)) == expected(name, mode, 20)
        assert done.counted <= budget


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_static_everywhere(name: str, mode: str) -> None:
    config = config_of(placement="static")
    peak, _, parameters = facts(name, mode, config)
    check(name, mode, 20, config, peak + 2 * parameters)
