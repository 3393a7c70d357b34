"""Activations that leave the device and come back: the same numbers, within the promised budgets."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import ebbtide
import zoo
from ebbtide.config import Config
from ebbtide.devices import CpuBackend
from ebbtide.devices.cpu_device import CopyEvent
from ebbtide.engine import Engine, Tiers
from ebbtide.errors import BudgetError, ConfigError, StateError
from ebbtide.memory.budget import Ledger
from ebbtide.planner.activation_trips import ALL, CHECKPOINTS, send_away
from ebbtide.planner.record import Moment, Record, Saved, event
from ebbtide.runtime.activations.offload import ActivationOffload
from harness import Count, config_of, expected, facts, least_budget
from sampling import some
from test_exact import CHANGES, check
from test_faults import train

HOST = {"host": {"memory": "1GB"}}
TIGHT = {"device": {"memory": 700_000}, **HOST}
LESS = [("gpt2", "checkpoints"), ("t5", "checkpoints"), ("attention", "checkpoints"), ("bert", "all")]
CASES = [(name, "none", "all") for name in zoo.ZOO]
CASES += [(name, mode, which) for name, which in LESS for mode in ("non-reentrant", "reentrant")]
EVERY = [
    (n, m, w) for n in zoo.ZOO for m in ("none", "non-reentrant", "reentrant") for w in ("checkpoints", "all")
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's activations are smaller than what is worth a copy."""
    monkeypatch.setattr("ebbtide.tracing.saved_storages.SMALLEST", 1024)


@pytest.fixture
def make(small: None) -> Any:
    engines: list[ebbtide.Engine] = []

    def build(name: str | nn.Module = "gpt2", mode: str = "none", **changes: Any) -> ebbtide.Engine:
        model = zoo.build(name, mode) if isinstance(name, str) else name
        engines.append(ebbtide.initialize(model, config_of(**{"offload_activations": "all", **changes})))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def step(engine: ebbtide.Engine, number: int = 0) -> None:
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
    engine.step()
    engine.check_integrity()


def reference(steps: int = 4) -> str:
    return expected("gpt2", "none", steps)[0]


# -- the same numbers, within the budget --------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode", "which"), some(CASES, 7))
def test_every_model_at_its_least(small: None, name: str, mode: str, which: str) -> None:
    config = config_of(offload_activations=which, **HOST)
    budget, done = least_budget(name, mode, 4, config)
    sha, losses = expected(name, mode, 4)
    assert done.sha == sha and tuple(done.losses) == losses
    assert 0.95 * budget <= done.counted <= budget
    assert done.stats["peak_bytes"]["device"] <= budget
    assert done.stats["offloaded_bytes"] > 0
    assert done.stats["traces"] == 2 and not done.stats["diverged"]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "mode", "which"), EVERY)
@pytest.mark.parametrize("layout", ["chunk", "page", "tensor"])
def test_everything(small: None, name: str, mode: str, which: str, layout: str) -> None:
    config = config_of(offload_activations=which, layout=layout, **HOST)
    budget, done = least_budget(name, mode, 20, config)
    assert (done.sha, tuple(done.losses)) == expected(name, mode, 20)
    assert done.counted <= budget
    assert (done.stats["offloaded_bytes"] > 0) == (mode != "none" or which == "all")


@pytest.mark.parametrize("change", some([c for c in CHANGES if c not in ("lru", "list-order")], 6))
def test_settings(small: None, change: str) -> None:
    config = config_of(**CHANGES[change])
    peak, model_data, _ = facts("gpt2", "none", config | {"placement": "auto"})
    stats = check(
        "gpt2", "none", 4, config | HOST | {"offload_activations": "all"}, peak // 2 + model_data // 3
    )
    assert stats["offloaded_bytes"] > 0


def test_static_placement(small: None) -> None:
    config = config_of(placement="static")
    peak, _, parameters = facts("gpt2", "none", config)
    check("gpt2", "none", 4, config | HOST | {"offload_activations": "all"}, peak // 2 + 2 * parameters)


# -- the plan is kept ---------------------------------------------------------------------------------


def long_model(checkpointing: bool) -> nn.Module:
    """Activations of 128 KiB and more, with the sizes that are used outside of tests."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128, n_positions=512, n_embd=64, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def long_batch(number: int, length: int = 512) -> dict[str, torch.Tensor]:
    ids = zoo._tokens(128, number, 2, length)
    return {"input_ids": ids, "labels": ids}


def train_long(checkpointing: bool, **changes: Any) -> tuple[str, int, dict[str, Any], list[dict[str, int]]]:
    """Hash, counted peak of the steady steps, stats, and what each step moved."""
    engine = ebbtide.initialize(long_model(checkpointing), config_of(**changes))
    links = engine._session.store.traffic.moved
    moved = []
    try:
        with Count(engine) as count:
            for number in range(4):
                if number == 3:
                    gc.collect()
                    count.peak = 0
                before = dict(links)
                engine.backward(engine(**long_batch(number)).loss)
                engine.step()
                moved.append(
                    {link: links[link] - before[link] for link in ("host_to_device", "device_to_host")}
                )
        plan = engine._session.cursor.plan
        assert plan is not None
        stats = engine.stats() | {"away": plan.away.bytes if plan.away else 0}
        return engine.weights_sha256(), count.peak, stats, moved
    finally:
        engine.close()


@pytest.mark.parametrize(("checkpointing", "which"), some([(False, "all"), (True, "checkpoints")], 1))
def test_the_peak_falls_by_what_was_planned(
    checkpointing: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    depart = (
        ActivationOffload.depart
    )  # where there is room, nobody waits for copies; here no link is ever too slow
    monkeypatch.setattr(ActivationOffload, "depart", lambda self, place, room: depart(self, place, -1))
    roomy = {"device": {"memory": "1GB"}, **HOST}
    sha, before, stats, moved = train_long(checkpointing, **roomy)
    other_sha, after, other, gone = train_long(checkpointing, **roomy, offload_activations=which)
    assert sha == other_sha
    planned = stats["non_model_peak"] - other["non_model_peak"]
    assert planned > (4 * (128 << 10) if checkpointing else stats["non_model_peak"] / 2)
    # Where the water is highest now, gradients may already be there beside it.
    gradients = other["tags"]["device"]["grad"]
    assert planned * 0.98 - gradients <= before - after <= planned * 1.02
    assert other["offloaded_bytes"] == sum(step["device_to_host"] for step in gone)
    # Nothing else crosses the link in a step where all model data is on the device.
    assert set(moved[-1].values()) == {0}
    assert set(gone[-1].values()) == {other["away"]}
    assert other["planned_traffic"] == sum(gone[-1].values())


@pytest.mark.heavy
def test_trains_in_a_budget_that_is_refused_without() -> None:
    budget = {"device": {"memory": 5_000_000}, **HOST}
    with pytest.raises(BudgetError, match="needs at least"):
        train_long(False, **budget)
    sha, peak, stats, _ = train_long(False, **budget, offload_activations="all")
    assert peak <= 5_000_000 and stats["peak_bytes"]["device"] <= 5_000_000
    assert sha == train_long(False, device={"memory": "1GB"})[0]


def test_a_small_host_keeps_more_on_the_device() -> None:
    room = {"device": {"memory": "1GB"}}
    sha, _, whole, _ = train_long(False, **room, **HOST, offload_activations="all")
    less = whole["away"] // 2
    other, _, part, _ = train_long(False, **room, host={"memory": less}, offload_activations="all")
    assert other == sha
    assert less // 2 < part["away"] <= part["peak_bytes"]["host"] <= less
    assert part["non_model_peak"] > whole["non_model_peak"]


def test_the_record_does_not_depend_on_what_leaves(make: Any) -> None:
    found = []
    for which, memory in (("off", "1GB"), ("checkpoints", "1GB"), ("all", "1GB"), ("all", 735_000)):
        engine = make("t5", "non-reentrant", offload_activations=which, device={"memory": memory}, **HOST)
        for number in range(3):
            out = engine(**zoo.ZOO["t5"].batch(number))
            [known] = engine._session.traces._known.values()
            engine.backward(out.loss)
            engine.step()
            if engine._session.recording.last is not None:
                record = engine._session.recording.last
            known.stale = True
        found.append(record)
        engine.close()
    for record in found[1:]:
        assert [m.event for m in record.moments] == [m.event for m in found[0].moments]
        for one, other in zip(found[0].moments, record.moments, strict=True):
            assert abs(one.peak - other.peak) <= 0.01 * one.peak + 4096
            assert abs(one.alive - other.alive) <= 0.01 * one.alive + 4096
        assert record.saved == found[1].saved
    assert any(saved.checkpoint for saved in found[1].saved)
    assert not all(saved.checkpoint for saved in found[1].saved)


# -- where execution is not as planned ----------------------------------------------------------------


def test_evaluation_between_forward_and_backward(make: Any) -> None:
    engine = make(**TIGHT)
    for number in range(4):
        loss = engine(**zoo.ZOO["gpt2"].batch(number)).loss
        engine.module.eval()
        with torch.no_grad():
            engine(**zoo.ZOO["gpt2"].batch(50))
        engine.module.train()
        engine.backward(loss)
        engine.step()
        engine.check_integrity()
    assert engine.weights_sha256() == reference()
    assert engine.stats()["offloaded_bytes"] > 0


def test_two_forwards_before_one_backward(make: Any) -> None:
    shas = []
    for which in ("off", "all"):
        engine = make(offload_activations=which, device={"memory": 3_000_000}, **HOST)
        for number in range(4):
            losses = [engine(**zoo.ZOO["gpt2"].batch(2 * number + i)).loss for i in range(2)]
            engine.backward(losses[0] + losses[1])
            engine.step()
            engine.check_integrity()
        shas.append(engine.weights_sha256())
        assert (engine.stats()["offloaded_bytes"] > 0) == (which == "all")
        engine.close()
    assert shas[0] == shas[1]


def test_without_a_plan_all_leaves_and_comes_on_demand(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.runtime.planning.tracer.trace_symbolically", fail)
    engine = make(device={"memory": 1_800_000}, **HOST)
    loss = engine(**zoo.ZOO["gpt2"].batch(0)).loss
    assert engine._session.cursor.plan is None
    engine.backward(loss)
    engine.step()
    assert engine.stats()["offloaded_bytes"] > 0
    for number in range(1, 4):
        step(engine, number)
    assert engine._session.cursor.plan is not None and not engine.stats()["diverged"]
    assert engine.weights_sha256() == reference()


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def fail_in_backward(engine: Engine, loss: torch.Tensor) -> None:
    """Half-way through."""
    handle = engine.module.transformer.h[1].mlp.c_fc.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    handle.remove()


def test_what_is_saved_is_not_what_was_planned(make: Any) -> None:
    """A Python value that is not in the input decides what is saved."""

    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.times = 1

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = torch.tanh(layer(x.repeat(self.times, 1)))[: len(x)]
            return {"loss": x.float().pow(2).mean()}

    shas = []
    for which in ("off", "all"):
        engine = make(
            Widening(), offload_activations=which, chunk_size="8KiB", device={"memory": 400_000}, **HOST
        )
        diverged = 0
        for number in range(8):
            engine.module.times = 1 + number % 3 // 2
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number), dtype=torch.bfloat16)
            engine.backward(engine(x)["loss"])
            engine.step()
            engine.check_integrity()
            diverged += bool(engine.stats()["diverged"])
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]
    assert diverged


def test_changed_shapes(make: Any) -> None:
    shas = []
    for which in ("off", "all"):
        engine = make(offload_activations=which, device={"memory": 1_400_000}, **HOST)
        for number in range(6):
            ids = zoo._tokens(512, number, length=32 if number % 3 else 16)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.check_integrity()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_exceptions_give_everything_back(make: Any) -> None:
    engine = make(**TIGHT)
    step(engine, 0)
    loss = engine(**zoo.ZOO["gpt2"].batch(1)).loss
    handle = engine.module.transformer.h[2].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine(**zoo.ZOO["gpt2"].batch(1))
    handle.remove()
    engine.backward(loss)  # the graph that was there before is whole
    engine.step()
    engine.check_integrity()
    broken = engine(**zoo.ZOO["gpt2"].batch(2)).loss
    fail_in_backward(engine, broken)
    del broken
    gc.collect()
    for number in (2, 3):
        step(engine, number)
    assert engine.weights_sha256() == reference()
    assert engine._tiers.ledger.tags["host"]["activations"] == 0


def test_a_graph_that_is_dropped_gives_its_host_memory_back(make: Any) -> None:
    engine = make(**TIGHT)
    loss = engine(**zoo.ZOO["gpt2"].batch(0)).loss
    assert engine._tiers.ledger.tags["host"]["activations"] > 0
    del loss
    gc.collect()
    engine._session.abandon()
    engine.check_integrity()
    assert engine._tiers.ledger.tags["host"]["activations"] == 0
    for number in range(4):
        step(engine, number)
    assert engine.weights_sha256() == reference()


def test_closing_gives_back_what_a_graph_holds(make: Any) -> None:
    engine = make(**TIGHT)
    step(engine, 0)
    loss = engine(**zoo.ZOO["gpt2"].batch(1)).loss
    engine.close()
    assert engine._tiers.ledger.tags["host"]["activations"] == 0
    assert engine._tiers.backend.held() == {"device": 0, "host": 0}
    with pytest.raises((StateError, RuntimeError)):
        loss.backward()


def test_an_engine_that_is_dropped_gives_everything_back(make: Any) -> None:
    keeper = make(offload_activations="off", **TIGHT)
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(offload_activations="all", **TIGHT))
    loss = engine(**zoo.ZOO["gpt2"].batch(0)).loss
    assert keeper._tiers.ledger.tags["host"]["activations"] > 0
    del engine, loss
    gc.collect()
    assert keeper._tiers.ledger.tags["host"]["activations"] == 0
    keeper.check_integrity()


@pytest.mark.parametrize("room", [0, 100_000, 1_000_000])
def test_a_slow_link_costs_time_and_no_memory(small: None, room: int) -> None:
    """Copies that are late are waited for where their room is wanted."""
    budget, _ = least_budget("gpt2", "none", 1, config_of(offload_activations="all", **HOST))
    config = Config.read(config_of(offload_activations="all", device={"memory": budget + room}, **HOST))
    backend = CpuBackend(poison=True, rates=dict.fromkeys(("host_to_device", "device_to_host"), 20e6))
    ledger = Ledger({"device": budget + room, "host": 10**9, "ssd": 0})
    engine = Engine(zoo.build("gpt2"), config, tiers=Tiers(backend, ledger))
    with Count(engine) as count:
        for number in range(4):
            step(engine, number)
    assert engine.weights_sha256() == reference()
    assert count.peak <= budget + room and ledger.peak["device"] <= budget + room
    assert not engine.stats()["diverged"] and engine.stats()["offloaded_bytes"] > 0
    engine.close()
    backend.close()


def test_a_copy_that_nobody_wants_any_more_keeps_no_memory(small: None) -> None:
    """A link so slow that nearly all copies still wait for their turn when backward has used what they read."""
    budget, _ = least_budget("gpt2", "none", 1, config_of(offload_activations="all", **HOST))
    config = Config.read(config_of(offload_activations="all", device={"memory": budget + 10**7}, **HOST))
    config = dataclasses.replace(config, placement="host")  # the room is for activations
    backend = CpuBackend(poison=True, rates={"device_to_host": 1e6})
    ledger = Ledger({"device": budget + 10**7, "host": 10**9, "ssd": 0})
    engine = Engine(zoo.build("gpt2"), config, tiers=Tiers(backend, ledger))
    with Count(engine) as count:
        before = engine.stats()["offloaded_bytes"]
        loss = engine(**zoo.ZOO["gpt2"].batch(0)).loss
        sent, saved = engine.stats()["offloaded_bytes"] - before, count.total
        engine.backward(loss)
        assert sent > 300_000 and saved - count.total > sent * 0.8, (sent, saved, count.total)
        engine.step()
    assert engine.weights_sha256() == reference(1)
    engine.close()
    backend.close()


class Queued:
    """The end of a copy on a GPU: the computation comes after it, and the host does not wait for that."""

    def __init__(self, copied: CopyEvent) -> None:
        self._copied, self.over = copied, False

    def wait(self) -> None:
        self._copied.wait()

    def synchronize(self) -> None:
        self._copied.synchronize()
        self.over = True

    def done(self) -> bool:
        return self.over

    @property
    def timing(self) -> CopyEvent:
        return self._copied


class LongQueue(CpuBackend):
    """As a GPU whose queue is long: as far as the host knows, no copy to the device is over until it waits for that."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.reading: list[tuple[int, int, Queued]] = []
        self.copies = self.torn = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor, link: str, after: Any = None) -> Any:
        copied = super().copy(destination, source, link, after)
        if link != "host_to_device":
            return copied
        first, event = source.data_ptr(), Queued(copied)
        self.reading.append((first, first + source.numel(), event))
        self.copies += 1
        return event

    def free(self, tier: str, memory: torch.Tensor) -> None:
        first, last = memory.data_ptr(), memory.data_ptr() + memory.numel()
        self.reading = [one for one in self.reading if not one[2].over]
        self.torn += sum(start < last and first < end for start, end, _ in self.reading)
        super().free(tier, memory)


def test_host_memory_is_kept_until_it_has_been_read(small: None) -> None:
    budgets = {"device": 700_000, "host": 10**9, "ssd": 0}
    backend, ledger = LongQueue(), Ledger(budgets)
    config = config_of(offload_activations="all", **TIGHT)
    engine = Engine(zoo.build("gpt2"), Config.read(config), tiers=Tiers(backend, ledger))
    for number in range(4):
        step(engine, number)
    assert engine.weights_sha256() == reference()
    assert engine.stats()["offloaded_bytes"] > 0 and backend.copies
    engine.close()
    assert not backend.torn
    assert backend.held() == {"device": 0, "host": 0} and ledger.reserved["host"] == 0
    backend.close()


@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 8, 13, 20, 34, 55])
def test_a_failed_copy_loses_nothing(make: Any, fail_at: int) -> None:
    engine = make(placement="host", **TIGHT)
    sha, failures = train(engine, fail_at)
    assert failures == 1
    assert sha == reference()


def test_unmanaged_parameters_and_other_engines_stay(make: Any) -> None:
    engine = make(unmanaged=["*.c_fc.weight", "transformer.wpe.*"], device={"memory": 1_400_000}, **HOST)
    frozen = zoo.build("gpt2", seed=1)
    frozen.requires_grad_(False)
    other = make(frozen, device={"memory": 1_400_000}, **HOST)
    for number in range(4):
        with torch.no_grad():
            other(**zoo.ZOO["gpt2"].batch(number))
        step(engine, number)
        other.check_integrity()
    assert engine.weights_sha256() == reference()
    assert engine.stats()["offloaded_bytes"] > 0 and not engine.stats()["diverged"]
    assert other.stats()["offloaded_bytes"] == 0


def test_host_modules(make: Any) -> None:
    shas = []
    for which in ("off", "all"):
        engine = make(
            "llama",
            offload_activations=which,
            host_modules=["model.embed_tokens"],
            device={"memory": 1_330_000},
            **HOST,
        )
        for number in range(3):
            step(engine, number)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_nowhere_to_go(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"offload_activations: 'all' .* set host\.memory"):
        make()
    with pytest.raises(ConfigError, match="did you mean 'checkpoints'"):
        make(offload_activations="checkpoint")


# -- what autograd promises ---------------------------------------------------------------------------


class Modified(nn.Module):
    """Writes in place into what `exp` saved, where it is asked to."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.wrong = wrong
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).exp()
        self.seen = weakref.ref(y.untyped_storage())
        if self.wrong:
            y.mul_(2)
        return y.float().sum()


@pytest.mark.parametrize("which", ["off", "all"])
@pytest.mark.parametrize("wrong", [False, True])
def test_what_was_saved_and_then_written_is_refused(small: None, wrong: bool, which: str) -> None:
    changes = {"offload_activations": which, "device": {"memory": 1_000_000}, **HOST}
    engine = ebbtide.initialize(Modified(wrong), config_of(**changes))
    loss = engine(torch.randn(8, 64).bfloat16())
    if wrong:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
    else:
        engine.backward(loss)
    engine.close()


def test_a_graph_that_nobody_runs_backward_goes() -> None:
    """What an operator saves of its own output must not keep the operator alive."""
    engine = ebbtide.initialize(Modified(False), config_of())
    loss = engine(torch.randn(8, 64).bfloat16())
    assert engine.module.seen() is not None
    del loss
    gc.collect()
    assert engine.module.seen() is None
    engine.close()


# -- the planner --------------------------------------------------------------------------------------


def some_record(seed: int) -> Record:
    """Storages that are saved in forward, held for a while, and wanted in the reverse order."""
    draw = random.Random(seed)
    length = draw.randrange(4, 40)
    saved = []
    levels = [1000] * (2 * length)
    for first in sorted(draw.choices(range(length), k=draw.randrange(1, 30))):
        size = draw.randrange(1, 500)
        alone = draw.choice([-1, *range(first, min(first + 4, length))])
        back = 2 * length - 1 - first - draw.randrange(0, 2) * (first > 0)
        saved.append(Saved(size, first, alone, back, draw.random() < 0.5))
        for moment in range(first, back + 1):
            levels[moment] += size
    moments = tuple(
        Moment(event(0 if j < length else 1, j), level, draw.random() * 1e-8, (), level)
        for j, level in enumerate(levels)
    )
    return Record("", moments, (), (), saved=tuple(saved))


@pytest.mark.parametrize("which", [ALL, CHECKPOINTS])
def test_what_leaves_was_wanted_by_nobody(which: str) -> None:
    for seed in range(200):
        record = some_record(seed)
        tight, _ = send_away(record, which, spent=0)
        left, away = send_away(record, which)
        lowered = [moment.peak for moment in record.moments]
        for number, trip in away.trips.items():
            saved = record.saved[number]
            assert which == ALL or saved.checkpoint
            assert saved.first < trip.gone < trip.come <= saved.back
            assert saved.alone >= 0 and trip.gone >= saved.alone and trip.bytes == saved.bytes
            for moment in range(trip.gone, trip.come):
                lowered[moment] -= trip.bytes
        assert [moment.peak for moment in left.moments] == lowered
        assert tight.peak <= left.peak <= tight.peak + (record.peak - tight.peak) / 8 + 1
        half, some = send_away(record, which, share=0.5)
        assert some.bytes <= sum(saved.bytes for saved in record.saved) / 2 and half.peak >= tight.peak
