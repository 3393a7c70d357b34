"""The third tier keeps the promise: weights are those of a plain loop, at any split, and each tier keeps its budget."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import reference
import zoo
from ebbtide.errors import BudgetError, ConfigError
from harness import LR, Count, Run, batch_of, config_of, expected, run
from sampling import crossed, everything, few, some
from test_exact import CHANGES, MODES

STEPS = 4
SPLITS = {
    "one tier of RAM": (200_000, 0),
    "three tiers": (200_000, 100_000),
    "host and SSD": (200_000, 1_500_000),
}
"""Budgets of device and host to begin with: what is refused says what is short."""


def follow(
    name: str, mode: str, steps: int, config: dict[str, Any], split: tuple[int, int]
) -> tuple[int, int, Run]:
    """The least budgets from `split` on that work, found by following the refusals' advice, and their run."""
    budgets = {"device": split[0], "host": split[1]}
    for _ in range(16):
        tiers = {tier: {**config.get(tier, {}), "memory": count} for tier, count in budgets.items()}
        try:
            return *budgets.values(), run(name, mode, steps, config | tiers)
        except BudgetError as error:
            assert error.tier in budgets and error.short > 0, error
            budgets[error.tier] += error.short
    raise AssertionError(f"no budgets up to {budgets} work for {name}")


def on_ssd(folder: Path, **changes: Any) -> dict[str, Any]:
    return config_of(ssd={"folder": str(folder), "memory": "256MB"}, **changes)


def check(name: str, mode: str, steps: int, config: dict[str, Any], split: tuple[int, int]) -> dict[str, Any]:
    device, host, done = follow(name, mode, steps, config, split)
    clip, accumulate = config.get("clip"), config.get("accumulate", 1)
    sha, losses = expected(name, mode, steps, config.get("precision", "bf16"), clip, accumulate)
    assert tuple(done.losses) == losses
    assert done.sha == sha
    assert done.counted <= device, f"{done.counted} bytes counted, {device} allowed"
    peaks = done.stats["peak_bytes"]
    assert peaks["device"] <= device and peaks["host"] <= host
    assert done.stats["moved_bytes"]["ssd_read"] > 0 and done.stats["moved_bytes"]["ssd_write"] > 0
    assert not done.stats["diverged"]
    for link, count in done.stats["moved_bytes"].items():
        assert count == sum(links.get(link, 0) for links in done.stats["moved_by_chunk"].values()), link
    return done.stats


@pytest.mark.parametrize(("name", "split"), crossed(zoo.ZOO, SPLITS))
def test_splits(name: str, split: str, folder: Path) -> None:
    check(name, "none", STEPS, on_ssd(folder), SPLITS[split])


@pytest.mark.parametrize(
    ("change", "split"),
    [
        pytest.param(change, split, marks=() if (n + m) % 4 == 0 else pytest.mark.heavy)
        for n, change in enumerate(CHANGES)
        for m, split in enumerate(["one tier of RAM", "three tiers"])
    ],
)
def test_settings(change: str, split: str, folder: Path) -> None:
    check("gpt2", "non-reentrant", STEPS, on_ssd(folder, **CHANGES[change]), SPLITS[split])


FOUND = [
    # What leaves the device for a chunk took the room on the host that the chunk was to come through.
    ("attention", "none", "separate", "three tiers"),
    # A page of the host is taken as a whole, and plans counted the chunk's part of it.
    ("attention", "non-reentrant", "page", "host and SSD"),
    # The loss of the step before, with a leaf and its gradient, is alive until forward is over: not until it reads a
    # weight outside of the unit that owns it.
    ("t5", "non-reentrant", "tensor", "one tier of RAM"),
    # The loss of this one is alive in step(), when its pass is imagined, too.
    ("t5", "non-reentrant", "page", "one tier of RAM"),
]


@pytest.mark.parametrize(("name", "mode", "change", "split"), some(FOUND, 2))
def test_what_long_proofs_found(name: str, mode: str, change: str, split: str, folder: Path) -> None:
    check(name, mode, STEPS, on_ssd(folder, **CHANGES[change]), SPLITS[split])


@pytest.mark.heavy
@pytest.mark.parametrize("change", ["plain", *CHANGES])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_everything(name: str, mode: str, change: str, folder: Path) -> None:
    for split in SPLITS.values():
        check(name, mode, 20, on_ssd(folder, **CHANGES.get(change, {})), split)


def test_everything_fits_and_the_disk_rests(folder: Path) -> None:
    """RAM that is free is used first."""
    done = run("gpt2", "none", STEPS, on_ssd(folder, device={"memory": "64MB"}, host={"memory": 0}))
    assert done.sha == expected("gpt2", "none", STEPS)[0]
    assert done.stats["moved_bytes"] == dict.fromkeys(done.stats["moved_bytes"], 0)
    assert done.stats["device_state_chunks"] == done.stats["chunks"]


def small(folder: Path, **changes: Any) -> ebbtide.Engine:
    """GPT-2 with most of its state on SSD."""
    tiers: dict[str, Any] = {"device": {"memory": 2_400_000}, "host": {"memory": 0}} | changes
    return ebbtide.initialize(zoo.build("gpt2"), on_ssd(folder, **tiers))


@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_pending_work_is_invisible(folder: Path, updates: str) -> None:
    """Evaluation, reading, writing, saving and a schedule between steps: the same weights as without."""
    rate = {"updates": updates, "clip": None}
    shas = []
    for interrupted in (False, True):
        engine = small(folder, **rate)
        scheduler = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 1.0, 0.1, 8)
        for number in range(6):
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
            engine.step()
            scheduler.step()
            if not interrupted:
                continue
            if number % 3 == 0:
                with torch.no_grad():
                    engine(**zoo.ZOO["gpt2"].batch(99))
            if number % 3 == 1:
                state = engine.state_dict()
                engine.load_state_dict(state)
            if number % 3 == 2:
                with engine.weights("*.c_fc.*", write=True) as values:
                    assert all(value.isfinite().all() for value in values.values())
            engine.check_integrity()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("host", [0, 1_200_000])
def test_values_that_are_written_count_wherever_copies_are(folder: Path, host: int) -> None:
    """Other weights are loaded after some steps: training goes on from them, not from a copy that lay elsewhere."""
    other = zoo.build("gpt2", seed=3).state_dict()
    shas = []
    for memory in ("64MB", 2_000_000 if not host else 1_500_000):
        engine = small(
            folder, device={"memory": memory}, host={"memory": host}, updates="in-backward", clip=None
        )
        for number in range(6):
            if number == 3:
                engine.load_state_dict(other)
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
            engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_state_that_was_read_ahead_is_not_used_after_values_were_written(folder: Path) -> None:
    shas = []
    for memory in (64_000_000, 2_400_000):
        engine = small(folder, device={"memory": memory})
        for number in range(4):
            engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
            engine.step()
            engine.synchronize()
            if number % 2:
                time.sleep(0.05)
                with engine.weights(write=True) as values:
                    for value in values.values():
                        value *= 1.001
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_the_folder_is_left_empty(folder: Path) -> None:
    engine = small(folder)
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(0)).loss)
    engine.step()
    assert list(folder.iterdir())
    engine.close()
    assert not list(folder.iterdir())


def test_wrong_settings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a folder is needed"):
        ebbtide.initialize(zoo.build("gpt2"), config_of(ssd={"memory": "1GB"}))
    with pytest.raises(BudgetError) as found:
        too_small = {"folder": str(folder), "memory": "1MB"}
        engine = ebbtide.initialize(
            zoo.build("gpt2"), config_of(device={"memory": 2_400_000}, host={"memory": 0}, ssd=too_small)
        )
        engine(**zoo.ZOO["gpt2"].batch(0))
    assert found.value.tier == "ssd" and found.value.short > 0


def test_gradients_that_never_leave_are_not_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward with RAM as one tier, the update beside the computation consumes them where autograd left them."""
    device = {"kind": "cpu", "memory": 2_500_000}
    with_ssd = on_ssd(folder, device=device, host={"memory": 0}, updates="in-backward", clip=None)
    engine = ebbtide.initialize(zoo.build("gpt2", "none"), with_ssd)
    try:
        kernels, copied = engine._session.updates.kernels["device"], []
        capture = kernels.capture

        def watched(*arguments: Any) -> Any:
            copied.append(arguments)
            return capture(*arguments)

        for step in range(STEPS):
            if step == 2:  # the first iterations have no plan yet that says what stays
                monkeypatch.setattr(kernels, "capture", watched)
            engine.backward(engine(**batch_of("gpt2", step, torch.bfloat16, "cpu")).loss)
            engine.step()
        assert not copied
        engine.synchronize()
        assert engine._session.ledger.tags["device"]["grad"] == 0
        engine.check_integrity()
        assert engine.stats()["moved_bytes"]["ssd_write"] > 0
        assert engine.weights_sha256() == expected("gpt2", "none", STEPS, clip=None)[0]
    finally:
        engine.close()
    assert engine._session.ledger.reserved["device"] == 0


def test_a_copy_on_ssd_does_not_stand_for_one_on_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter that is on the device and on SSD comes to the host for its update there."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no symbolic trace")  # then the host's copies go for want of a plan

    monkeypatch.setattr("ebbtide.runtime.planning.tracer.trace_symbolically", refuse)
    done = run("gpt2", "none", STEPS, on_ssd(folder, device={"memory": 6_000_000}, host={"memory": 700_000}))
    assert done.sha == expected("gpt2", "none", STEPS)[0]


class Recurrent(nn.Module):
    """One chunk, and activations that push its parameters and its gradients out in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(128, 32)
        self.rnn = nn.RNN(32, 32, batch_first=True)
        self.last = nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> zoo.Loss:
        return zoo.Loss(self.last(self.rnn(self.embedding(ids))[0]).square().mean(), ())


def test_what_leaves_has_its_place_on_the_host_where_copies_of_all_have_none(folder: Path) -> None:
    """A pass is refused before it runs, or not at all."""

    def given(step: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.randint(128, (1, 40), generator=torch.Generator().manual_seed(step))}

    sha = reference.train(Recurrent(), given, STEPS, precision="fp32", lr=LR)[0]
    ran, refused = 0, 0
    for device, host in few(product(range(164_000, 206_000, 6_000), (470_000, 600_000)), 6):
        tiers = {"device": {"memory": device}, "host": {"memory": host}, "chunk_size": "256KiB"}
        config = on_ssd(folder, precision="fp32", clip=None, layout="page", **tiers)
        engine = ebbtide.initialize(Recurrent(), config)
        try:
            for step in range(STEPS):
                engine.backward(engine(**given(step)).loss)
                engine.step()
            assert engine.weights_sha256() == sha
            ran += 1
        except BudgetError as error:
            assert engine.steps == 0 and "model data" in str(error), (device, host, error)
            refused += 1
        finally:
            engine.close()
    assert (ran > 5 and refused > 1) if everything() else (ran and refused)


class Wide(nn.Module):
    """Weights of half a megabyte in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(64, 2048), (2048, 64)] * 4
        self.layers = nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def forward(self, x: torch.Tensor) -> zoo.Loss:
        return zoo.Loss(self.layers(x).square().mean(), ())


def test_weights_come_back_from_their_masters_on_ssd_in_portions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a separate master gradients take their weights' space. Whoever evaluates before the step wants these again;
    a whole weight of a master beside them would be memory that no budget knows."""
    monkeypatch.setattr("ebbtide.memory.chunk_access.PORTION", 1024)
    batch = {"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()}
    tiers = {"device": {"memory": "6MB"}, "host": {"memory": 0}}
    engine = ebbtide.initialize(Wide(), on_ssd(folder, master="separate", clip=None, **tiers))
    session, backend = engine._session, engine._tiers.backend
    try:
        for step in range(3):
            engine.backward(engine(**batch).loss)
            assert session.updates.sink.parameter_space.members, "nothing was taken"
            with Count(engine) as count:
                monkeypatch.setattr(
                    count, "backend", SimpleNamespace(owns=backend.owns, held=lambda: {"device": 0})
                )
                session.reclaim()
            assert not session.updates.sink.parameter_space.away
            if step:  # by then masters are on SSD
                assert 0 < count.peak <= 2 * 4 * 1024 + 2 * 4096, f"{count.peak} bytes beside the budget"
            engine.step()
        assert engine.stats()["moved_bytes"]["ssd_read"] > 0
        with engine.weights("layers.0.weight") as found:
            before = found["layers.0.weight"].clone()
        with engine.weights("layers.0.weight", write=True) as found:
            found["layers.0.weight"].mul_(2)
        with engine.weights("layers.0.weight") as found:
            assert torch.equal(found["layers.0.weight"], before * 2)
    finally:
        engine.close()
