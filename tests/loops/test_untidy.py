"""What loops do beside training: evaluate, write into parameters, freeze and unfreeze, fail half-way, press Ctrl-C."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import zoo
from ebbtide.errors import ConfigError, NonFiniteError, StateError
from harness import Count, config_of
from test_odd import Net, batch, build, make, place, plain

IMAGINES = True

__all__ = ["make", "place"]
WRITTEN = "layers.2.weight"


def step(engine: Any, number: int) -> None:
    engine.backward(engine(**batch(number)).loss)
    engine.step()


# -- evaluation -----------------------------------------------------------------------------------------------


def test_what_came_for_an_evaluation_leaves_for_training() -> None:
    """Between micro-batches, with accumulated gradients that cannot leave: the next one has the room that is its own."""
    memory = 150_000
    config = config_of(layout="page", chunk_size="16KiB", master="separate", accumulate=3)
    engine = ebbtide.initialize(zoo.Blocks(3, 40), config | {"device": {"kind": "cpu", "memory": memory}})
    try:
        for number in range(6):
            if number in (1, 3):
                engine.module.up[1].requires_grad_(number == 3)
            generator = torch.Generator().manual_seed(number)
            engine.backward(engine(torch.randint(0, 256, (4, 6), generator=generator)))
            with torch.no_grad():
                engine(torch.randint(0, 256, (2, 8), generator=generator))
            assert engine._session.ledger.room("device") >= 0
            if number % 3 == 2:
                engine.step()
        assert engine.stats()["peak_bytes"]["device"] <= memory
        engine.check_integrity()
    finally:
        engine.close()


def test_evaluation_stays_within_the_budget() -> None:
    """Of batches that are larger, too: without gradients they take no more than those of training."""
    data, memory = zoo.ZOO["gpt2"].batch, 1_250_000
    config = config_of(device={"memory": memory}, host={"memory": "64MB"})
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    for number in range(3):
        with Count(engine) as count:
            engine.backward(engine(**count.given(data(number))).loss)
            engine.step()
            larger = {key: value.repeat(3, 1) for key, value in data(100 + number).items()}
            with torch.no_grad():
                engine(**count.given(larger))
        assert count.peak <= memory
    engine.close()


class Scored(Net):
    """Says how good it is, as a number that nobody can go back from."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return super().forward(x).loss


def test_passes_that_nobody_ends_leave_nothing(make: Any, place: dict[str, Any]) -> None:
    engine = make(Scored, **place)
    for number in range(4):
        assert not engine(**batch(number)).requires_grad
        assert engine._session.idle and engine._session.recording.recorder is None


@pytest.mark.parametrize("held", [True, False])
def test_forgotten_no_grad_is_not_recorded_for_ever(
    make: Any, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Where outputs are held all passes are one; else each is over when the next begins."""
    monkeypatch.setattr("ebbtide.runtime.session.MANY", 8)
    engine = make(Net, device={"memory": 2_000_000 if held else 420_000})
    engine._session.traces.find = lambda signature: None  # as for a shape that was never seen
    outputs, recorded = [], []
    for number in range(12):
        outputs.append(engine(**batch(number)))
        recorder = engine._session.recording.recorder
        recorded.append(recorder.index + 1 if recorder is not None else 0)
        if not held:
            outputs.clear()
    once = recorded[0]
    assert recorded == ([once * (k + 1) for k in range(8)] + [0] * 4 if held else [once] * 12)
    outputs.clear()
    for number in range(4):
        step(engine, number)
    engine.check_integrity()


# -- writes in place ------------------------------------------------------------------------------------------


def halved(engine: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Its value in master precision before and after it was halved in place."""
    with engine.weights(name) as found:
        before = found[name].clone()
    with torch.no_grad():
        engine.module.get_parameter(name).mul_(0.5)
    with engine.weights(name) as found:
        return before, found[name].clone()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("where", [{}, {"placement": "host", "device": {"memory": 700_000}}])
def test_masters_follow_what_is_written(make: Any, precision: str, where: dict[str, Any]) -> None:
    def halves(number: int) -> dict[str, torch.Tensor]:
        return {"x": batch(number)["x"].to(torch.float16 if precision == "fp16" else torch.bfloat16)}

    engine = make(Net, precision=precision, master="separate", **where)
    for number in range(2):
        engine.backward(engine(**halves(number)).loss)
        engine.step()
    with torch.no_grad():
        engine(**halves(50))  # brings it to the device
    with engine.weights() as found:
        all_before = {name: value.clone() for name, value in found.items()}
    with torch.no_grad():
        engine(**halves(50))
        parameter = engine.module.get_parameter(WRITTEN)
        rounded = parameter.detach().clone()
        parameter[:8].mul_(0.5)
    with engine.weights() as found:
        after = {name: value.clone() for name, value in found.items()}
    assert torch.equal(after[WRITTEN][:8], rounded[:8].float() * 0.5)
    all_before[WRITTEN][:8] = after[WRITTEN][:8]
    for name, value in after.items():
        assert torch.equal(value, all_before[name]), name  # what was not written keeps its precision
    engine.backward(engine(**halves(2)).loss)
    engine.step()
    with engine.weights(WRITTEN) as found:
        assert float((found[WRITTEN][:8] - after[WRITTEN][:8]).abs().max()) < 0.1
        assert not torch.equal(found[WRITTEN], after[WRITTEN])


def test_masters_outside_the_chunks_follow_too(make: Any) -> None:
    engine = make(Net, unmanaged=["layers.2.*"])
    for number in range(2):
        step(engine, number)
    before, after = halved(engine, WRITTEN)
    assert torch.equal(after, before.bfloat16().float() * 0.5)
    step(engine, 2)
    with engine.weights(WRITTEN) as found:
        assert float((found[WRITTEN] - after).abs().max()) < 0.1


# -- parameters outside the chunks ----------------------------------------------------------------------------


def test_state_outside_the_chunks_is_foreseen() -> None:
    model = zoo.build("gpt2")
    config = config_of(device={"memory": 1_900_000}, host={"memory": "64MB"}, unmanaged=["*.h.1.mlp.*"])
    engine = ebbtide.initialize(model, config)
    before = engine.stats()["fixed_bytes"]
    with Count(engine) as count:
        for number in range(4):
            engine.backward(engine(**count.given(zoo.ZOO["gpt2"].batch(number))).loss)
            engine.step()
    assert engine.stats()["fixed_bytes"] == before
    assert count.peak <= 1_900_000
    engine.close()


def test_unfrozen_outside_the_chunks(make: Any) -> None:
    """As in a loop that has it frozen for two steps."""

    def frozen() -> nn.Module:
        model = Net()
        model.layers[2].requires_grad_(False)
        return model

    engines = []
    for unmanaged in ([], ["layers.2.*"]):
        config = ebbtide.Config.read(config_of(chunk_size="16KiB", clip=None, unmanaged=unmanaged))
        model = build(frozen)
        groups = [{"params": list(model.parameters())}]
        engines.append(ebbtide.initialize(model, config, groups))
    shas = []
    for engine in engines:
        for number in range(2):
            step(engine, number)
        engine.module.layers[2].requires_grad_(True)
        for number in range(2, 4):
            step(engine, number)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


class Breaks(Net):
    """Backward raises once, when the last layers have their gradients."""

    broken = False

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.broken and layer is self.layers[2]:
            x.register_hook(self.fail)
        return layer(x)

    def fail(self, gradient: torch.Tensor) -> None:
        raise MemoryError


def test_gradients_of_a_backward_that_failed_are_dropped(make: Any) -> None:
    """With all that is trained outside the chunks, too."""

    def adapted() -> nn.Module:
        model = Breaks()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("layers.5"))
        model.layers[0].requires_grad_(True)
        return model

    shas = []
    for fails in (False, True):
        engine = make(adapted, unmanaged=["layers.5.*", "layers.0.*"])
        for number in range(3):
            if fails:
                engine.module.broken = True
                with pytest.raises(MemoryError):
                    engine.backward(engine(**batch(number)).loss)
                engine.module.broken = False
            step(engine, number)
        shas.append(engine.weights_sha256())
    assert shas[0] == shas[1]


def test_updates_in_backward_are_never_of_what_is_not_finite(make: Any) -> None:
    with pytest.raises(ConfigError, match="nonfinite"):
        make(Net, updates="in-backward", clip=None, nonfinite="continue")
    engine = make(Net, updates="in-backward", clip=None, unmanaged=["layers.2.*"])
    step(engine, 0)
    parameter = engine.module.get_parameter(WRITTEN)
    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    before = parameter.detach().clone()
    with pytest.raises(NonFiniteError, match=r"layers\.2\.weight"):
        step(engine, 1)
    handle.remove()
    assert torch.equal(parameter.detach(), before)
    with pytest.raises(StateError, match="not finite"):
        step(engine, 2)


# -- dtypes and layouts ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64).to(dtype) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.second(torch.relu(self.first(x.to(self.first.weight.dtype))))
        return zoo.Loss(self.norm(x.float()).pow(3).mean() + x.float().pow(2).mean(), ())


def test_modules_of_several_dtypes_with_separate_masters(make: Any) -> None:
    shas = set()
    for where in ({}, {"accumulate": 1, "placement": "host", "device": {"memory": 300_000}}):
        engine = make(Mixed, master="separate", **where)
        for number in range(3):
            step(engine, number)
        shas.add(engine.weights_sha256())
    assert len(shas) == 1
    engine = make(lambda: Mixed(torch.float16), precision="fp16", nonfinite="continue")
    for number in range(3):
        step(engine, number)
    engine = make(lambda: Mixed(torch.float16))  # keeps its dtypes
    for number in range(3):
        step(engine, number)


def test_frozen_values_are_the_same_in_every_layout() -> None:
    def half_frozen() -> nn.Module:
        model = Net()
        for number in (1, 2, 3):
            model.layers[number].requires_grad_(False)
            nn.init.constant_(model.layers[number].weight, 1 + 2**-8)
        return model

    found = set()
    for layout in ({"chunk_size": "auto"}, {"chunk_size": "4KiB"}, {"layout": "tensor"}, {"layout": "page"}):
        config = config_of(clip=None) | {"layout": "chunk"} | layout
        if config["layout"] == "tensor":
            config.pop("chunk_size", None)
        engine = ebbtide.initialize(build(half_frozen), config)
        losses = []
        for number in range(3):
            loss = engine(**batch(number)).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        found.add((tuple(losses), engine.weights_sha256()))
        engine.close()
    assert len(found) == 1


# -- Ctrl-C ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Updates on the host wait until it is set."""
    from ebbtide.runtime.updates.chunk_update import ChunkUpdates

    opened, run, main = threading.Event(), ChunkUpdates.run, threading.main_thread()

    def held(self: Any, *arguments: Any, **more: Any) -> None:
        if threading.current_thread() is not main:
            opened.wait(30)
        run(self, *arguments, **more)

    monkeypatch.setattr(ChunkUpdates, "run", held)
    yield opened
    opened.set()


def test_an_interrupt_waits_for_updates_that_are_under_way(make: Any, gate: threading.Event) -> None:
    engine = make(Net, placement="host", device={"memory": 700_000})
    gate.set()
    step(engine, 0)
    step(engine, 1)  # from here on the plan stays, and nothing waits before the pass
    engine.synchronize()
    gate.clear()
    step(engine, 2)
    inside = threading.Event()
    handle = engine.module.register_forward_pre_hook(lambda *_: inside.set())

    def press() -> None:
        """Only where the forward pass waits, and long before it may go on."""
        inside.wait(30)
        time.sleep(0.3)
        _thread.interrupt_main()
        time.sleep(0.3)
        gate.set()

    user = threading.Thread(target=press)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        engine(**batch(3))
    assert gate.is_set()
    user.join()
    handle.remove()
    engine.check_integrity()
    for number in range(3, 6):
        step(engine, number)
    assert engine.weights_sha256() == plain(Net, 6)
