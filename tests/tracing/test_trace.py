"""What a trace says of a moment is what the following iterations use, to the byte where nothing is random."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide
import zoo
from ebbtide.planner.record import ATTENTION, MATMUL, Record
from ebbtide.runtime.planning.calls import Call
from harness import config_of
from sampling import crossed

IMAGINES = True

TOLERANCE = 0.01


def records(name: str, mode: str, **changes: object) -> tuple[Record | None, list[Record]]:
    """The imagined record, and the live ones of several iterations."""
    engine = ebbtide.initialize(zoo.build(name, mode), config_of(**changes))
    session = engine._session
    found: list[Record] = []
    imagined: Record | None = None
    try:
        for number in range(6):
            out = engine(**zoo.cast(zoo.ZOO[name].batch(number), torch.bfloat16))
            [known] = session.traces._known.values() or [None]
            if known is not None and known.record.source == "symbolic":
                imagined = known.record
            engine.backward(out.loss)
            engine.step()
            if session.recording.last is not None:
                found.append(session.recording.last)
            if known is not None:
                known.stale = True
        return imagined, found
    finally:
        engine.close()


@pytest.mark.parametrize(("name", "mode"), crossed(zoo.ZOO, ["none", "non-reentrant", "reentrant"]))
def test_the_first_trace_predicts_the_next_iterations(name: str, mode: str) -> None:
    _, live = records(name, mode)
    assert len(live) >= 3
    first, second, *later = live
    # The second iteration is the first one with outputs of the iteration before still alive.
    for record in later:
        assert [m.event for m in record.moments] == [m.event for m in first.moments]
        assert record.accesses == first.accesses and record.arrivals == first.arrivals
        for one, other in zip(second.moments, record.moments, strict=True):
            assert abs(one.peak - other.peak) <= TOLERANCE * one.peak + 4096
        for one, other in zip(first.moments, record.moments, strict=True):
            assert abs(one.peak - other.peak) <= TOLERANCE * one.peak + 4096


@pytest.mark.parametrize(("name", "mode"), crossed(zoo.ZOO, ["none", "non-reentrant", "reentrant"]))
def test_the_imagined_iteration_is_the_real_one(name: str, mode: str) -> None:
    imagined, live = records(name, mode, device={"memory": 4_000_000})
    assert imagined is not None
    assert [m.event for m in imagined.moments] == [m.event for m in live[0].moments]
    assert imagined.accesses == live[0].accesses
    assert imagined.arrivals == live[0].arrivals
    assert live[0].peak <= imagined.peak * 1.02 + 4096
    assert imagined.peak <= live[0].peak * 1.02 + 4096


class Counting(nn.Module):
    """Writes a buffer and a tensor attribute in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.calls = torch.zeros(2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls[0] += 1
        return self.inner(x).float().sum()


def test_an_imagined_pass_writes_nothing() -> None:
    engine = ebbtide.initialize(Counting(), config_of(device={"memory": 100_000}))
    engine.backward(engine(torch.randn(4, 32).bfloat16()))
    assert engine._session.imagining.note == ""
    assert engine.module.seen == engine.module.calls[0] == 1
    assert engine.module.inner[1].num_batches_tracked == 1
    engine.close()


def test_a_batch_that_the_model_refuses_is_an_error_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs the stack of what it could not imagine, before forward says the same."""
    engine = ebbtide.initialize(Counting(), config_of(device={"memory": 100_000}))
    with pytest.raises(RuntimeError, match="shape"):
        engine(torch.randn(4, 33).bfloat16())
    assert "RuntimeError" in engine._session.imagining.note
    assert not caplog.records
    engine.backward(engine(torch.randn(4, 32).bfloat16()))
    assert engine.step().updated
    engine.close()


@pytest.mark.parametrize("name", ["gpt2", "attention"])
def test_gradients_that_stay_where_they_came_are_model_data(name: str) -> None:
    """Everything resident: the trace's peaks do not depend on whether gradients are copied into chunks."""
    peaks = []
    for host in ("0", "auto"):
        _, [*_, record] = records(name, "none", device={"memory": "1GB"}, host={"memory": host})
        peaks.append([moment.peak for moment in record.moments])
    for kept, copied in zip(*peaks, strict=True):
        assert abs(kept - copied) <= max(TOLERANCE * copied, 4096)


@pytest.mark.parametrize("mode", ["none", "non-reentrant", "reentrant"])
def test_what_operators_cost(mode: str) -> None:
    """Imagined and live alike, and as the closed form has it: six for a weight and a token, eight where forward
    runs twice; and attention."""
    imagined, [*_, live] = records("gpt2", mode, device={"memory": "2MB"})
    assert imagined is not None
    for one, other in zip(imagined.moments, live.moments, strict=True):
        counts = [[(w.kind, w.flops) for w in m.work if w.flops] for m in (one, other)]
        assert counts[0] == counts[1]
    touched = [sum(w.bytes for m in record.moments for w in m.work) for record in (imagined, live)]
    # Masks are made by other operators, and a fake `zeros` is one where the real one is two.
    assert touched[0] == pytest.approx(touched[1], rel=0.1)
    model = zoo.build("gpt2")
    rows, length = zoo.ZOO["gpt2"].batch(0)["input_ids"].shape
    layers = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
    inside = sum(p.numel() for p in layers)
    tokens = rows * length
    matmul = (6 if mode == "none" else 8) * tokens * inside + 6 * tokens * model.lm_head.weight.numel()
    if mode == "non-reentrant":  # it stops when it has what it wants, before a block's last product
        last = [p for name, p in model.named_parameters() if name.endswith("mlp.c_proj.weight")]
        matmul -= 2 * tokens * sum(p.numel() for p in last)
    works = [work for moment in live.moments for work in moment.work]
    assert sum(w.flops for w in works if w.kind == MATMUL) == matmul
    width, depth = model.config.n_embd, model.config.n_layer
    attention = (4 + 10 + (4 if mode != "none" else 0)) * rows * length * length * width * depth
    assert sum(w.flops for w in works if w.kind == ATTENTION) == attention
    assert live.flops == matmul + attention
    weights = 2 * sum(p.numel() for p in model.parameters())
    assert sum(w.bytes for w in works) > 3 * weights


class Replacing(nn.Module):
    """Forward gives its buffers other tensors, whose memory anybody may get."""

    LAYERS = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(self.LAYERS))
        for number in range(self.LAYERS):
            self.register_buffer(f"mean_{number}", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            mean = getattr(self, f"mean_{number}") * 0.9 + 0.1 * x.detach().mean(0)
            setattr(self, f"mean_{number}", mean)
            x = torch.tanh(layer(x - mean))
        return x.square().mean()


def test_buffers_that_forward_replaces_hide_nothing_of_an_imagined_pass() -> None:
    engine = ebbtide.initialize(Replacing(), config_of(precision="fp32", device={"memory": "10MB"}))
    session, x = engine._session, torch.randn(16, 32)
    imagined = [session.imagining.imagine(Call(session.module, (x,), {}, "")) for _ in range(4)]
    engine.backward(engine(x))
    live = session.recording.last
    assert live is not None
    for record in imagined:
        assert record is not None
        assert [m.peak for m in record.moments] == [m.peak for m in live.moments]
    engine.close()


class Turned(nn.Module):
    """A batch norm over what was turned round, and turned back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(32, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return torch.relu(self.last(x)).square().mean()


class InPlace(nn.Module):
    """What a Linear gives for three dimensions is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.act, self.norm = nn.ReLU(inplace=True), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.norm(x + self.act(self.last(x))).square().mean()


@pytest.mark.parametrize("kind", [Turned, InPlace])
def test_what_fake_kernels_say_otherwise(kind: type[nn.Module]) -> None:
    """They have a batch norm lie as its input, and all that follows is another graph; they copy no gradient of a view
    that was written in place."""
    engine = ebbtide.initialize(kind(), config_of(precision="fp32", device={"memory": "10MB"}))
    session, x = engine._session, torch.randn(4, 17, 32)
    imagined = session.imagining.imagine(Call(session.module, (x,), {}, ""))
    engine.backward(engine(x))
    live = session.recording.last
    assert live is not None and imagined is not None
    assert [(m.event, m.peak) for m in imagined.moments] == [(m.event, m.peak) for m in live.moments]
    engine.close()
