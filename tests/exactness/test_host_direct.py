"""Gradients whose update is on the host go there as they arrive: no chunk for them on the device, the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import harness
import zoo
from ebbtide.errors import BudgetError
from sampling import crossed, few

STEPS = 4
TOO_SMALL = 600_000
ROOMY: dict[str, Any] = {"device": {"memory": "64MiB"}}


def _bytes_moved(engine: ebbtide.Engine) -> int:
    return int(engine.stats()["moved_bytes"]["device_to_host"])


def _train(engine: ebbtide.Engine, seen: list[int], accumulate: int) -> list[int]:
    """Bytes that go to the host, by step. `seen`: gradients on the device when the last layer of backward begins."""
    moved = []

    def look(gradient: torch.Tensor) -> None:
        seen.append(engine.stats()["tags"]["device"].get("grad", 0))

    for step in range(STEPS):
        before = _bytes_moved(engine)
        for part in range(accumulate):
            batch = harness.batch_of("gpt2", step * accumulate + part, torch.bfloat16, "cpu")
            out = engine(**batch, output_hidden_states=True)
            out.hidden_states[0].register_hook(look)
            engine.backward(out.loss)
        moved.append(_bytes_moved(engine) - before)
        engine.step()
    return moved


@pytest.mark.parametrize(
    ("layout", "accumulate", "offload"), crossed(["chunk", "page", "tensor"], [1, 2], ["off", "all"])
)
def test_gradients_are_copied_once(layout: str, accumulate: int, offload: str) -> None:
    config = harness.config_of(
        layout=layout, placement="host", accumulate=accumulate, offload_activations=offload, **ROOMY
    )
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    seen: list[int] = []
    try:
        moved = _train(engine, seen, accumulate)
        assert seen == [0] * STEPS * accumulate
        assert moved == [accumulate * sum(2 * p.numel() for p in engine.module.parameters())] * STEPS
        plan = engine._session.cursor.plan
        assert plan is not None and not engine.stats()["diverged"]
        assert plan.residency.to_host == moved[-1]
        sha, _ = harness.expected("gpt2", "none", STEPS, accumulate=accumulate)
        assert engine.weights_sha256() == sha
        engine.check_integrity()
    finally:
        engine.close()


def test_of_chunks_that_are_partly_frozen_what_arrives_is_counted() -> None:
    model = zoo.build("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "ln_" in name or "wpe" in name
    engine = ebbtide.initialize(model, harness.config_of(placement="host", accumulate=2, **ROOMY))
    try:
        moved = _train(engine, [], 2)
        plan = engine._session.cursor.plan
        trained = sum(2 * p.numel() for p in model.parameters() if p.requires_grad)
        assert plan is not None and plan.residency.to_host == moved[-1] == 2 * trained
    finally:
        engine.close()


def test_where_the_host_is_full_against_the_plan_gradients_wait_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ebbtide.initialize(zoo.build("gpt2"), harness.config_of(placement="host", **ROOMY))
    try:
        for number in range(STEPS):
            batch = harness.batch_of("gpt2", number, torch.bfloat16, "cpu")
            with monkeypatch.context() as patch:
                if number == 2:
                    patch.setattr("ebbtide.runtime.gradients.destinations.HostDirect._fits", lambda *_: False)
                engine.backward(engine(**batch).loss)
            assert (engine._session.ledger.tags["device"]["grad"] > 0) == (number == 2)
            engine.step()
            engine.check_integrity()
        assert engine.weights_sha256() == harness.expected("gpt2", "none", STEPS)[0]
    finally:
        engine.close()


@pytest.mark.parametrize("layout", ["chunk", "page"])
def test_gradients_laid_otherwise_go_straight_too(layout: str) -> None:
    """A sparse one is made dense, not laid like its parameter."""
    shas: list[str] = []
    for placement in ("host", "auto"):
        config = harness.config_of(placement=placement, layout=layout, **ROOMY)
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Embedding(64, 96, sparse=True), torch.nn.Linear(96, 32))
        module[0].weight = torch.nn.Parameter(torch.randn(96, 64).t())
        engine = ebbtide.initialize(module, config)
        try:
            for step in range(STEPS):
                ids = torch.arange(8) + step
                engine.backward(engine(ids).float().square().mean())
                on_device = engine._session.ledger.tags["device"]["grad"]
                assert (on_device == 0) == (placement == "host")
                engine.step()
            assert module[0].weight.stride() == (1, 64)
            shas.append(engine.weights_sha256())
            engine.check_integrity()
        finally:
            engine.close()
    assert shas[0] == shas[1]


class Transposed(torch.nn.Module):
    """Its embedding's gradient comes laid otherwise than the weight, and is most of what the device has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2048, 64)
        self.embedding.weight = torch.nn.Parameter(torch.randn(64, 2048).t())
        self.head = torch.nn.Linear(64, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.embedding(ids))).flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, ids.flatten() % 16)


@pytest.mark.parametrize("layout", ["chunk", "page"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_copy_of_them_is_made_beside_the_budget(layout: str, accumulate: int) -> None:
    config = harness.config_of(
        precision="fp32", layout=layout, placement="host", accumulate=accumulate, clip=None
    )
    budget = 64 << 20
    shas: list[str] = []
    while len(shas) < 2:
        torch.manual_seed(0)
        engine = ebbtide.initialize(Transposed(), harness.with_budget(config, budget))
        try:
            with harness.Count(engine) as count:
                for number in range(3 * accumulate):
                    ids = torch.arange(8)[None] + 8 * number
                    count.given({"ids": ids})
                    try:
                        loss = engine(ids)
                    except BudgetError as error:
                        assert number == 0 and budget == TOO_SMALL
                        budget += error.short
                        break
                    engine.backward(loss)
                    engine.step()
                else:
                    assert count.peak <= budget
                    shas.append(engine.weights_sha256())
                    budget = TOO_SMALL
        finally:
            engine.close()
    assert shas[0] == shas[1]


def leave_copies(engine: ebbtide.Engine) -> int:
    """On the host, of parameters that the plan has on the device throughout: as another shape's plan does."""
    session, found = engine._session, 0
    for index in range(len(session.data.members)):
        chunk = session.data.parameter_chunk(index)
        room = session.ledger.room("host") >= session.store.room_needed(chunk, "host")
        if session.cursor.stays("param", index) and chunk.device_valid and chunk.host is None and room:
            session.room.evict(chunk)
            session.store.settle(chunk)
            session.places.bring(chunk)
            found += 1
    return found


def test_copies_that_another_plan_has_left_do_not_keep_gradients_from_the_host() -> None:
    """They stayed on the device, where no plan has them."""
    copies = 0
    budgets = itertools.product(range(60_000, 200_000, 20_000), range(20_000, 140_000, 8_192))
    for device, host in few(budgets, 25):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        tiers = {"device": {"memory": device}, "host": {"memory": host}}
        config = harness.config_of(precision="fp32", chunk_size="4KiB", accumulate=2, **tiers)
        try:
            engine = ebbtide.initialize(model, config)
        except BudgetError:
            continue
        try:
            for number in range(4):
                loss = engine(torch.ones(20, 32)).square().mean()
                copies += leave_copies(engine) if number % 2 else 0
                engine.backward(loss)
                away = [i for i, home in enumerate(engine._session.store.state_homes) if home == "host"]
                assert all(engine._session.store.chunks["grad", i].device is None for i in away)
                if number % 2:
                    engine.step()
            engine.check_integrity()
        except BudgetError as error:
            assert "this iteration" in str(error) or "model data" in str(error)
        finally:
            engine.close()
    assert copies
