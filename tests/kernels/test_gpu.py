"""The same promises on a CUDA device, and what only a card can show. `make gpu-check` runs these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import reference
import zoo
from ebbtide.bench.gpu_check import batch, gpt
from harness import LR, batch_of, config_of, expected, run, with_budget
from test_regions import Listed, Read
from test_regions import batch as rows

pytestmark = pytest.mark.gpu
STEPS = 4
CUDA = {"kind": "cuda"}
Loop = Callable[[Any, int], torch.Tensor]
"""A model or its engine, and a step: its loss."""

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unclipped": {"clip": None},
    "page": {"layout": "page"},
    "tensor": {"layout": "tensor"},
    "separate": {"master": "separate"},
    "updates-on-the-host": {"placement": "host"},
    "lru": {"eviction": "lru"},
    "no-prefetch": {"prefetch": False},
    "fp32": {"precision": "fp32"},
    "in-backward": {"updates": "in-backward", "clip": None},
    "accumulate": {"accumulate": 3},
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Flash attention and the embedding's backward use atomics otherwise."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(name: str, mode: str, config: dict[str, Any]) -> dict[str, Any]:
    done = run(name, mode, STEPS, config)
    clip, accumulate = config.get("clip"), config.get("accumulate", 1)
    sha, losses = expected(name, mode, STEPS, config.get("precision", "bf16"), clip, accumulate, "cuda")
    assert tuple(done.losses) == losses
    assert done.sha == sha
    return done.stats


@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_resident_and_tight(name: str, mode: str) -> None:
    config = config_of(device=CUDA)
    free = check(name, mode, config)
    budget = free["non_model_peak"] + sum(free["tags"]["device"].values()) // 6
    tight = check(name, mode, with_budget(config, budget))
    assert tight["moved_bytes"]["host_to_device"] > 0
    assert tight["peak_bytes"]["device"] <= budget


@pytest.mark.parametrize(
    ("mode", "which"), [("none", "all"), ("non-reentrant", "checkpoints"), ("reentrant", "all")]
)
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_offloaded_activations(name: str, mode: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.tracing.saved_storages.SMALLEST", 1024)
    free = check(name, mode, config_of(device=CUDA))
    budget = free["non_model_peak"] + sum(free["tags"]["device"].values()) // 6
    config = config_of(device=CUDA, offload_activations=which)
    tight = check(name, mode, with_budget(config, budget))
    assert tight["offloaded_bytes"] > 0
    assert tight["peak_bytes"]["device"] <= budget


@pytest.mark.parametrize("change", list(CHANGES))
def test_settings(change: str) -> None:
    config = config_of(device=CUDA, **CHANGES[change])
    free = check("gpt2", "none", config)
    model_data = sum(free["tags"]["device"].values())
    for share in (2, 8):
        check("gpt2", "none", with_budget(config, free["non_model_peak"] + model_data // share))


@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
def test_the_allocator_stays_within_the_budget(held: bool) -> None:
    """An independent count: what torch's allocator says, against the budget and the stated fixed cost. `held`: the loop
    keeps what passes give, and evaluates more than it trains with."""
    free = check("gpt2", "none", config_of(device=CUDA))
    budget = free["non_model_peak"] + sum(free["tags"]["device"].values()) // (2 if held else 4)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = ebbtide.initialize(zoo.build("gpt2"), with_budget(config_of(device=CUDA), budget))
    kept: list[Any] = []
    try:
        for step in range(STEPS):
            out = engine(**batch_of("gpt2", step, torch.bfloat16, engine.device))
            if not held:
                out = {"loss": out.loss}
            engine.backward(out["loss"])
            engine.step()
            large = batch_of("gpt2", step + 50, torch.bfloat16, engine.device)
            for rows in (2, 3, 3) if held else ():
                with torch.no_grad():
                    kept[:] = [engine(**{key: torch.cat([value] * rows) for key, value in large.items()})]
            engine.check_integrity()
        assert torch.cuda.max_memory_allocated() - before <= budget + engine.stats()["fixed_bytes"]
    finally:
        engine.close()


def tokens(step: int) -> dict[str, Any]:
    return batch_of("gpt2", step, torch.bfloat16, "cuda")


def one_of_three(run: Any, step: int) -> torch.Tensor:
    """Nobody goes back from the first, which is there while the next begins, nor from an evaluation."""
    loss = run(**tokens(step + 40)).loss
    with torch.no_grad():
        run(**tokens(step + 50))
    loss = run(**tokens(step)).loss
    return loss


def summed(run: Any, step: int) -> torch.Tensor:
    return run(**tokens(step)).loss + 0.5 * run(**tokens(step + 60)).loss


class Around(nn.Module):
    """Several passes of the model, as one of a module for the plain loop."""

    def __init__(self, loss_of: Loop) -> None:
        super().__init__()
        self.model, self.loss_of = zoo.build("gpt2").cuda(), loss_of

    def named_parameters(self, *given: Any, **named: Any) -> Any:
        return self.model.named_parameters(*given, **named)

    def forward(self, step: int) -> zoo.Loss:
        return zoo.Loss(self.loss_of(self.model, step), ())


def anywhere(build: Callable[[], nn.Module], loss_of: Loop, sha: str, changes: dict[str, Any]) -> None:
    """The same weights, and the budget kept, with everything on the card and with a third of it."""

    def trained(**device: Any) -> dict[str, Any]:
        engine = ebbtide.initialize(build(), config_of(device=CUDA | device, **changes))
        try:
            for step in range(STEPS):
                engine.backward(loss_of(engine, step))
                engine.step()
            engine.check_integrity()
            assert engine.weights_sha256() == sha
            return engine.stats()
        finally:
            engine.close()

    free = trained()
    budget = free["non_model_peak"] + sum(free["tags"]["device"].values()) // 3
    tight = trained(memory=budget)
    assert tight["moved_bytes"]["host_to_device"] > free["moved_bytes"]["host_to_device"]
    assert tight["peak_bytes"]["device"] <= budget


@pytest.mark.parametrize("loss_of", [one_of_three, summed])
def test_several_passes_for_a_step(loss_of: Loop) -> None:
    sha = reference.train(Around(loss_of), lambda step: {"step": step}, STEPS, lr=LR)[0]
    anywhere(lambda: zoo.build("gpt2"), loss_of, sha, {"clip": None})


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [Listed, Read])
def test_regions_that_read_weights(kind: Any, trained: bool) -> None:
    def given(step: int) -> dict[str, Any]:
        return {key: value.cuda() for key, value in rows(step).items()}

    sha = reference.train(kind(trained).cuda(), given, STEPS, precision="fp32", lr=LR)[0]
    config = {"precision": "fp32", "clip": None, "layout": "tensor"}
    anywhere(lambda: kind(trained), lambda engine, step: engine(**given(step)).loss, sha, config)


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_large_moves(updates: str) -> None:
    """Copies that take as long as what is computed beside them: whoever does not wait for one reads something else."""
    clip = 1.0 if updates == "exact" else None
    config = {"updates": updates, "clip": clip, "poison": True, "optimizer": {"lr": LR}}
    model = gpt(4, 1536).build(0)

    def trained(**changes: Any) -> tuple[str, dict[str, Any]]:
        engine = ebbtide.initialize(deepcopy(model), config | {"device": CUDA} | changes)
        given = {key: value.to(engine.device) for key, value in batch(2, 512).items()}
        try:
            for _ in range(STEPS):
                engine.backward(engine(**given).loss)
                engine.step()
            return engine.weights_sha256(), engine.stats()
        finally:
            engine.close()

    sha, free = trained()
    model_data = sum(free["tags"]["device"].values())
    for share in (2, 4):
        tight = {"device": {**CUDA, "memory": free["non_model_peak"] + model_data // share}}
        for change in ({}, {"prefetch": False}, {"placement": "host"}):
            found, stats = trained(**tight, **change)
            assert found == sha
            assert stats["moved_bytes"]["host_to_device"] > 0


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_card_decides_about_updates_as_the_host_does(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host looks first where passes are followed. One step is refused, and changes nothing."""
    from ebbtide.kernels import gpu

    decided: list[Any] = []
    decision = gpu._Guarded.decision
    monkeypatch.setattr(gpu._Guarded, "decision", lambda self: decided.append(decision(self)) or decided[-1])
    found = []
    for rests in (True, False):
        config = config_of(device=CUDA, clip=clip, nonfinite="continue", accumulate=2)
        engine = ebbtide.initialize(zoo.build("gpt2"), config)
        if not rests:
            engine._session.resting.rule_out()
        results, shas = [], []
        for step in range(9):
            for micro in range(2):
                loss = engine(**batch_of("gpt2", 2 * step + micro, torch.bfloat16, engine.device)).loss
                engine.backward(loss * (float("inf") if step == 6 else 1.0))
            results.append(engine.step())
            shas.append(engine.weights_sha256())
        engine.check_integrity()
        found.append((results, shas, engine.steps))
        engine.close()
        assert bool(decided) is rests and (None in decided) is rests
        decided.clear()
    assert found[0] == found[1]
    assert results[6].skipped and shas[6] == shas[5] != shas[7]


class Drawing(nn.Module):
    """Draws on values that are known while the pass is imagined."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.bernoulli(torch.full((64,), 0.5, device=x.device))
        return self.two(torch.tanh(self.one(x)) * mask).float().square().mean()


def drawn(memory: int | str, **changes: Any) -> str:
    with torch.device("cpu"):
        model = Drawing()
    tiers = {"device": CUDA | {"memory": memory}, "host": {"memory": "64MB"}}
    engine = ebbtide.initialize(model, config_of(**tiers, chunk_size="16KiB", **changes))
    torch.cuda.manual_seed(0)
    for _ in range(3):
        engine.backward(engine(torch.ones(8, 64, dtype=torch.bfloat16, device="cuda")))
        engine.step()
    sha = engine.weights_sha256()
    engine.close()
    return sha


def test_an_imagined_pass_draws_nothing_from_the_cards_generator() -> None:
    assert drawn("8GB") == drawn(200_000)


@pytest.mark.parametrize("name", ["plain", "separate"])
def test_a_default_device_that_is_the_card_changes_nothing(name: str) -> None:
    usual = drawn(200_000, **CHANGES[name])
    torch.set_default_device("cuda")
    try:
        assert drawn(200_000, **CHANGES[name]) == usual
    finally:
        torch.set_default_device(None)
