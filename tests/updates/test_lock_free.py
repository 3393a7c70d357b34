"""Lock-free updates: no gradient is lost or applied twice, staleness keeps its bound, nothing changes under a pass."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ebbtide
import zoo
from disks import FaultyIO
from ebbtide.config import Config
from ebbtide.devices.cpu_device import CpuBackend
from ebbtide.engine import Engine
from ebbtide.errors import DiskError, StateError
from ebbtide.kernels import RULES, Operands, Rule, cpu_kernels
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk_access import peek
from ebbtide.memory.disk.space import DiskSpace
from ebbtide.runtime.process_tiers import Tiers
from harness import config_of, expected, run
from sampling import crossed, few
from test_ssd import follow, on_ssd

LAYERS, ELEMENTS = 6, 1 << 14


def _sum(p: torch.Tensor, g: torch.Tensor, states: tuple[torch.Tensor, ...], c: Sequence[float]) -> None:
    states[0].add_(g)
    p.sub_(g * c[0])


SUMS = Rule("sums", ("total",), lambda group, step, scale: (float(group["lr"]),), _sum)
"""Adds gradients up, and the sum of those that were merged as it is: with whole numbers exact in any order."""


class Watch:
    """What the layers saw of their weights, by pass."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.torn = 0
        self.changed = 0


class _Weigh(torch.autograd.Function):
    """The sum of weights times whole numbers, which are the gradient; looks closely at the weights both times."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, given: torch.Tensor, watch: Watch) -> torch.Tensor:
        ctx.save_for_backward(weight, given)
        ctx.watch, ctx.before = watch, weight.detach().clone()
        if not isinstance(weight, FakeTensor):  # that is the pass that is imagined
            watch.torn += not bool((weight == weight[0]).all())
            watch.seen[-1].append(float(weight[0]))
            time.sleep(0.001)
        return (weight.float() * given.float()).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, given = ctx.saved_tensors
        if not isinstance(weight, FakeTensor):
            ctx.watch.changed += not torch.equal(weight, ctx.before)
        return (grad * given).to(weight.dtype), None, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, given: torch.Tensor, watch: Watch) -> torch.Tensor:
        result: torch.Tensor = _Weigh.apply(self.weight, given, watch)
        return result


class Chain(nn.Module):
    """Layer i's gradient is `given[i]` everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.watch = Watch()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.layers[0].weight, FakeTensor):
            self.watch.seen.append([])
        total = torch.zeros(())
        for layer, one in zip(self.layers, given, strict=True):
            total = total + layer(one.expand(ELEMENTS), self.watch)
        return total


@contextmanager
def chain(
    folder: Path, host: bool = False, rates: Any = None, io: Any = None, **changes: Any
) -> Iterator[Engine]:
    """The chain with all state on SSD; with `host`, device and host are two tiers."""
    budgets = {"device": 4_000_000, "host": 4_000_000 * host, "ssd": 16_000_000}
    ledger, backend = Ledger(budgets), CpuBackend(poison=True)
    disk = DiskSpace([folder], budgets["ssd"], rates=rates, **({"io": io} if io else {}))
    config = {"layout": "tensor", "precision": "fp32", "updates": "lock-free", "placement": "host"} | changes
    devices = {"device": {"kind": "cpu", "memory": budgets["device"]}, "optimizer": {"lr": 1.0}}
    engine = Engine(Chain(), Config.read(devices | config), tiers=Tiers(backend, ledger, disk))
    try:
        yield engine
    finally:
        engine.close()
        assert backend.held() == {"device": 0, "host": 0}
        assert ledger.reserved["ssd"] == 0


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "adamw", SUMS)


def train(engine: Engine, steps: int, ones: bool = False) -> torch.Tensor:
    """Returns what each layer's weights must come to."""
    generator = torch.Generator().manual_seed(steps)
    total = torch.zeros(LAYERS)
    for _ in range(steps):
        given = torch.ones(LAYERS) if ones else torch.randint(-4, 5, (LAYERS,), generator=generator).float()
        engine.backward(engine(given))
        engine.step()
        total -= given
    return total


def check(engine: Engine, total: torch.Tensor) -> None:
    """Every gradient is in the weights, and in the state, once."""
    for value, wanted in zip(engine.state_dict().values(), total, strict=True):
        assert torch.equal(value, wanted.expand(ELEMENTS))
    session = engine._session
    for member, place in enumerate(session.data.places):
        chunk = session.store.chunks["total", place.chunk]
        tier = next(tier for tier in ("device", "host", "ssd") if chunk.valid_on(tier))
        if tier == "ssd":
            found = peek(session.store, chunk, place.offset, place.numel)
        else:
            found = torch.cat([piece for _, piece in chunk.slices(tier, place.offset, place.numel)])
        assert torch.equal(found, -total[member].expand(ELEMENTS))
    for books in session.lock_free.progress.values():
        assert books.produced == books.applied == books.visible and books.dropped == 0
    watch = engine.module.watch
    assert watch.torn == watch.changed == 0
    engine.check_integrity()


def slow(engine: Engine, seconds: float, gate: threading.Event | None = None) -> None:
    """Updates sleep, or wait at a gate."""
    kernels = cpu_kernels()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
            for operands, coefficients in pieces:
                time.sleep(seconds)
                assert gate is None or gate.wait(20)
                kernels.update(rule, operands, coefficients)

    engine._session.updates.chunks.kernels = dict.fromkeys(("device", "host"), Slow())


def throttled(layers: float) -> dict[str, float]:
    """So many layers' state in a second, each way."""
    return dict.fromkeys(("ssd_read", "ssd_write"), layers * 4 * ELEMENTS)


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"precision": "bf16"},
    "separate": {"precision": "bf16", "master": "separate"},
    "accumulate": {"accumulate": 2},
    "pages": {"layout": "page", "chunk_size": "96KiB"},
    "on demand": {"prefetch": False},
    "one at most": {"max_staleness": 1},
}


with_sums = pytest.mark.usefixtures("sums")
TIERS = pytest.mark.parametrize("host", [False, True], ids=["one tier", "three tiers"])


@TIERS
@pytest.mark.parametrize("name", list(SETTINGS))
@with_sums
def test_no_gradient_is_lost_or_repeated(folder: Path, name: str, host: bool) -> None:
    for rates in few((None, throttled(600)), 1):
        with chain(folder, host, rates, **{"max_staleness": 6} | SETTINGS[name]) as engine:
            total = train(engine, 16)
            check(engine, total)
            slow(engine, 0.002)
            check(engine, total + train(engine, 8))


@pytest.mark.parametrize("cause", ["disk", "kernel"])
@pytest.mark.parametrize("bound", [1, 2, 5])
@with_sums
def test_staleness_keeps_its_bound(folder: Path, bound: int, cause: str) -> None:
    """With ones as gradients, weights are minus the number of steps that are in them: the passes themselves saw it."""
    with chain(folder, False, throttled(60) if cause == "disk" else None, max_staleness=bound) as engine:
        if cause == "kernel":
            slow(engine, 0.015)
        total = train(engine, 16, ones=True)
        stats = engine.stats()["lock_free"]
        passes = [values for values in engine.module.watch.seen if values]
        seen = [max(step + value for value in values) for step, values in enumerate(passes)]
        assert len(seen) == 16 and max(seen) <= stats["staleness_max"] <= bound
        if bound < 5:  # on a busy machine the disk keeps up with five steps
            assert stats["staleness_max"] == bound and stats["waits"] > 0
        assert 0 < stats["staleness_mean"] <= bound and stats["updates"] < stats["gradients_produced"] + 1
        check(engine, total)
        done = engine.stats()["lock_free"]
        assert done["gradients_produced"] == done["gradients_applied"] == 16 * LAYERS and not done["pending"]


@TIERS
@with_sums
def test_passes_wait_for_nothing_else(folder: Path, host: bool) -> None:
    """While the updating thread stands still, steps go on; what they produce is one update for each chunk."""
    gate = threading.Event()
    with chain(folder, host, max_staleness=50) as engine:
        slow(engine, 0.0, gate)
        total = train(engine, 10)
        stats = engine.stats()["lock_free"]
        assert stats["waits"] == stats["updates"] == 0 and stats["pending"] == 10 * LAYERS
        gate.set()
        check(engine, total)
        updates = engine.stats()["lock_free"]["updates"]
        assert LAYERS < updates <= LAYERS + 3  # three had begun with the gradients of the first step alone
        assert all(value == 0 for values in engine.module.watch.seen for value in values)


@with_sums
def test_fast_updates_are_seen_at_once(folder: Path) -> None:
    with chain(folder, max_staleness=1) as engine:
        train(engine, 3)
        before = engine.stats()["lock_free"]["waits"]
        for _ in range(10):
            train(engine, 1)
            time.sleep(0.05)
            with torch.no_grad():
                engine(torch.ones(LAYERS))
        assert engine.stats()["lock_free"]["waits"] <= before + 1


@pytest.mark.parametrize("how", ["weights_sha256", "state_dict", "weights", "module", "synchronize", "load"])
@with_sums
def test_what_reads_or_writes_values_sees_all_updates(folder: Path, how: str) -> None:
    with chain(folder, rates=throttled(300), max_staleness=30) as engine:
        total = train(engine, 6)
        assert engine.stats()["lock_free"]["pending"]
        if how == "weights":
            with engine.weights("layers.0.weight", write=True) as found:
                assert torch.equal(found["layers.0.weight"], total[0].expand(ELEMENTS))
                found["layers.0.weight"] += 100
            total[0] += 100
        elif how == "module":
            assert float(engine.module.state_dict()["layers.1.weight"][7]) == total[1]
        elif how == "load":
            engine.load_state_dict({key: value + 7 for key, value in engine.state_dict().items()})
            total += 7
        else:
            getattr(engine, how)()
        assert not engine.stats()["lock_free"]["pending"]
        more = train(engine, 4)
        for value, wanted in zip(engine.state_dict().values(), total + more, strict=True):
            assert torch.equal(value, wanted.expand(ELEMENTS))


@TIERS
@with_sums
def test_evaluation_in_between_changes_nothing(folder: Path, host: bool) -> None:
    with chain(folder, host, throttled(300), max_staleness=8) as engine:
        total = torch.zeros(LAYERS)
        for number in range(12):
            total += train(engine, 1)
            with torch.no_grad():
                engine(torch.ones(LAYERS))
            if number % 4 == 0:
                with engine.resident(), torch.no_grad():
                    engine(torch.ones(LAYERS))
                    engine.module(torch.ones(LAYERS))
            if number % 5 == 0:  # a second forward before one backward
                losses = [engine(torch.ones(LAYERS)) for _ in range(2)]
                with torch.no_grad():
                    engine(torch.ones(LAYERS))
                engine.backward(sum(losses, torch.zeros(())))
                engine.step()
                total -= 2
        check(engine, total)


@TIERS
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@with_sums
def test_training_goes_on_after_an_evaluation(folder: Path, host: bool, mode: Callable[[], Any]) -> None:
    """Whatever the evaluation had memory made for: what it evaluates with, and what updates need meanwhile."""
    with chain(folder, host, throttled(300), max_staleness=8) as engine:
        total = train(engine, 1)
        with mode():
            for _ in range(12):
                engine(torch.ones(LAYERS))
                time.sleep(0.01)
        for _ in range(3):
            total += train(engine, 1)
            time.sleep(0.05)
        check(engine, total)


@with_sums
def test_training_with_all_parameters_held(folder: Path) -> None:
    with chain(folder, max_staleness=2) as engine, engine.resident():
        check(engine, train(engine, 8))


@with_sums
def test_an_update_uses_the_settings_of_its_newest_step(folder: Path) -> None:
    gate = threading.Event()
    gate.set()
    with chain(folder, max_staleness=20) as engine:
        total = train(engine, 1)
        slow(engine, 0.0, gate)
        group = engine.optimizer.param_groups[0]
        for rate in (3.0, 0.5):
            group["lr"] = rate
            total += rate * train(engine, 1)
            engine.synchronize()
        gate.clear()
        group["lr"] = 2.0
        total += 2 * train(engine, 1)
        group["lr"] = 1000.0
        gate.set()
        for value, wanted in zip(engine.state_dict().values(), total, strict=True):
            assert torch.equal(value, wanted.expand(ELEMENTS))


@with_sums
def test_a_write_in_place_that_would_be_lost_is_refused(folder: Path) -> None:
    gate = threading.Event()
    with chain(folder, max_staleness=20) as engine:
        train(engine, 1)
        engine.synchronize()
        slow(engine, 0.0, gate)
        train(engine, 2)
        with torch.no_grad():
            engine.module.layers[0].weight.add_(1.0)
        gate.set()
        with pytest.raises(StateError, match="written in place"):
            engine.synchronize()


@pytest.mark.parametrize("link", ["read", "write"])
@with_sums
def test_an_error_of_the_disk_surfaces_and_marks_the_engine(folder: Path, link: str) -> None:
    io = FaultyIO()
    with chain(folder, io=io, max_staleness=4) as engine:
        train(engine, 3)
        engine.synchronize()

        def fail(which: str, *_: Any) -> None:
            if which == f"ssd_{link}":
                raise OSError(5, "injected")

        io.on_call = fail
        with pytest.raises(DiskError, match="injected"):
            for _ in range(50):
                train(engine, 1)
        io.on_call = None
        for call in (lambda: engine(torch.ones(LAYERS)), engine.step, engine.synchronize):
            with pytest.raises(StateError, match="partially stepped"):
                call()
        engine.check_integrity()
        engine.load_state_dict({key: torch.zeros_like(value) for key, value in engine.state_dict().items()})
        stats = engine.stats()["lock_free"]
        assert stats["gradients_applied"] + stats["gradients_dropped"] == stats["gradients_produced"]
        assert stats["gradients_dropped"] > 0 and not stats["pending"]
        total = train(engine, 3)
        for value, wanted in zip(engine.state_dict().values(), total, strict=True):
            assert torch.equal(value, wanted.expand(ELEMENTS))


@with_sums
def test_close_drains(folder: Path) -> None:
    with chain(folder, rates=throttled(300), max_staleness=30) as engine:
        train(engine, 6)
        progress = engine._session.lock_free.progress
        engine.close()
        assert all(books.produced == books.visible == 6 for books in progress.values())


def test_an_engine_that_is_dropped_leaves_nothing_hanging(folder: Path) -> None:
    config = on_ssd(folder, updates="lock-free", device={"memory": 2_800_000}, host={"memory": 0})
    engine: Any = ebbtide.initialize(zoo.build("gpt2"), config)
    for number in range(3):
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
        engine.step()
    tiers, gone = engine._tiers, weakref.ref(engine._session.executor)
    del engine
    until = time.monotonic() + 20
    while gone() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    assert tiers.ledger.tags["device"]["buffers"] == 0
    while any(thread.name == "ebbtide-lock-free" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "split"), crossed(["gpt2", "t5"], [(200_000, 0), (200_000, 100_000), (200_000, 1_500_000)])
)
def test_budgets_are_kept(folder: Path, name: str, split: tuple[int, int]) -> None:
    device, host, done = follow(name, "non-reentrant", 5, on_ssd(folder, updates="lock-free"), split)
    assert done.counted <= device, f"{done.counted} bytes counted, {device} allowed"
    peaks = done.stats["peak_bytes"]
    assert peaks["device"] <= device and peaks["host"] <= host
    assert done.stats["moved_bytes"]["ssd_read"] > 0 and not done.stats["diverged"]
    assert done.stats["tags"]["device" if not host else "host"]["buffers"] > 0
    stats = done.stats["lock_free"]
    assert stats["gradients_applied"] == stats["gradients_produced"] > 0


def test_host_memory_alone_will_do() -> None:
    config = {"updates": "lock-free", "placement": "host", "device": {"kind": "cpu", "memory": 1_400_000}}
    for change in ({}, {"precision": "fp16"}, {"layout": "page", "chunk_size": "64KiB"}):
        done = run("llama", "none", 6, config | {"clip": 1.0} | change)
        stats = done.stats["lock_free"]
        assert stats["gradients_applied"] == stats["gradients_produced"] > 0


def test_with_everything_on_the_device_it_is_exact(folder: Path) -> None:
    config = on_ssd(folder, updates="lock-free", device={"memory": "64MB"}, host={"memory": 0})
    done = run("gpt2", "none", 4, config)
    assert done.sha == expected("gpt2", "none", 4)[0]
    assert done.stats["lock_free"]["gradients_produced"] == 0


@pytest.mark.heavy
def test_the_loss_falls_as_it_does_exactly(folder: Path) -> None:
    ends = []
    for updates, bound in (("exact", 4), ("lock-free", 4), ("lock-free", 1)):
        tiers = {"device": {"memory": 2_800_000}, "host": {"memory": 0}}
        config = on_ssd(folder, updates=updates, max_staleness=bound, **tiers)
        engine = ebbtide.initialize(zoo.build("gpt2"), config)
        losses = []
        for number in range(60):
            loss = engine(**zoo.ZOO["gpt2"].batch(number % 4)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        ends.append(sum(losses[-4:]) / 4)
        assert ends[-1] < 0.75 * losses[0]
    assert max(ends) < 1.15 * min(ends)


class Partly(nn.Module):
    """One chunk has parameters with gradients, without, and ones that were frozen later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, everything: bool = False) -> torch.Tensor:
        x = self.used(self.frozen(x))
        return self.unused(x) if everything else x


@TIERS
@pytest.mark.parametrize("master", ["split", "separate"])
def test_values_without_gradients_stay_what_they_are(folder: Path, host: bool, master: str) -> None:
    ssd = {"folder": str(folder), "memory": "16MB"}
    module = Partly()
    engine = ebbtide.initialize(
        module,
        config_of(updates="lock-free", placement="host", master=master, chunk_size="1MB", ssd=ssd)
        | {"device": {"kind": "cpu", "memory": 2_000_000}, "host": {"memory": 4_000_000 * host}},
    )
    assert len(engine._session.layout.chunks) == 1
    module.frozen.requires_grad_(False)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(3):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.synchronize()
    with torch.no_grad():
        found = engine(x, everything=True)
    plain = Partly()
    plain.load_state_dict(engine.state_dict())
    torch.testing.assert_close(found, plain.bfloat16()(x, everything=True), rtol=0.05, atol=0.02)
    engine.close()


@with_sums
@TIERS
def test_after_a_write_that_was_lost_one_can_go_on(folder: Path, host: bool) -> None:
    gate = threading.Event()
    with chain(folder, host, max_staleness=20) as engine:
        total = train(engine, 1)
        engine.synchronize()
        slow(engine, 0.0, gate)
        total += train(engine, 2)
        with torch.no_grad():
            engine.module.layers[0].weight.add_(1.0)
        gate.set()
        with pytest.raises(StateError, match="written in place"):
            engine.synchronize()
        engine.synchronize()
        check(engine, total + train(engine, 2))
        engine.save(folder / "run")
        engine.load(folder / "run")


class Narrow(nn.Module):
    """Chunks of several small parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(x)).square().mean()


def test_a_chunk_does_not_leave_the_host_for_its_own_state(folder: Path) -> None:
    """Where the host has room for all to the byte, with the state that the first update makes."""
    chunk, homes = 8192, set()
    for device in few(range(20 * chunk, 28 * chunk, chunk // 2), 6):
        tiers = {"device": {"memory": device}, "host": {"memory": 21 * chunk}}
        disk = {"folder": str(folder), "memory": "32MB"}
        changes = {"updates": "lock-free", "accumulate": 3, "chunk_size": "8KiB", "ssd": disk, **tiers}
        engine = ebbtide.initialize(Narrow(), config_of(precision="fp32", **changes))
        for _ in range(2):
            for _ in range(3):
                engine.backward(engine(torch.ones(1, 8, 8)))
            engine.step()
        homes.update(engine._session.store.state_homes)
        engine.check_integrity()
        engine.close()
    assert "host" in homes
