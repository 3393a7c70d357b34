"""An engine is used from one thread at a time, whichever that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import StateError
from harness import config_of

WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.meanwhile: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.meanwhile is not None:
            x.register_hook(lambda _: self.meanwhile())  # type: ignore[misc]
            self.meanwhile()
        return x.square().mean()


def engine_of(memory: int | str) -> ebbtide.Engine:
    tight = {"device": {"memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "4KiB"}
    return ebbtide.initialize(Net(), config_of(precision="fp32", **tight))


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def step(engine: ebbtide.Engine, number: int) -> None:
    engine.backward(engine(batch(number)))
    engine.step()


def elsewhere(deed: Callable[[], Any]) -> Any:
    """What comes of it on another thread, or was raised there."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(deed())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found[0]


@pytest.mark.parametrize("memory", [60_000, "64MB"])
def test_who_comes_while_another_is_inside_is_refused(memory: int | str) -> None:
    """In forward and in backward; what the other one does is not disturbed, and later it is one's turn."""
    shas = []
    for disturbed in (True, False):
        engine = engine_of(memory)
        for number in range(3):
            step(engine, number)
        refused: list[Any] = []

        def meanwhile(engine: ebbtide.Engine = engine, refused: list[Any] = refused) -> None:
            deeds: list[Callable[[], Any]] = [
                lambda: engine(batch(9)),
                lambda: engine.backward(torch.ones(1, requires_grad=True).sum()),
                engine.step,
                engine.state_dict,
                engine.weights_sha256,
                engine.synchronize,
            ]
            refused.extend(elsewhere(deed) for deed in deeds)
            assert elsewhere(engine.stats)["budget_bytes"]

        engine.module.meanwhile = meanwhile if disturbed else None
        step(engine, 3)
        engine.module.meanwhile = None
        assert all(isinstance(one, StateError) and "another thread" in str(one) for one in refused)
        assert not disturbed or len(refused) >= 12
        assert elsewhere(lambda: step(engine, 4)) is None  # noqa: B023
        engine.check_integrity()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("what", ["save", "load", "export"])
def test_no_step_while_another_thread_saves_or_loads(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a checkpoint would be of no step: its first half from before, its last from after."""
    engine = engine_of(60_000)
    step(engine, 0)
    engine.save(tmp_path)
    sha = engine.weights_sha256()
    inside, go_on = threading.Event(), threading.Event()
    drain = engine._session.queue.drain

    def waits() -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)
        drain()

    monkeypatch.setattr(engine._session.queue, "drain", waits)
    thread = threading.Thread(target=getattr(engine, what), args=(tmp_path,))
    thread.start()
    assert inside.wait(60)
    deeds: list[Callable[[], Any]] = [
        lambda: step(engine, 1),
        lambda: engine.save(tmp_path),
        engine.state_dict,
    ]
    for deed in deeds:
        with pytest.raises(StateError, match=r"another thread is in .* a save or a load .*background=True"):
            deed()
    go_on.set()
    thread.join(60)
    assert engine.weights_sha256() == sha
    step(engine, 1)
    assert engine.weights_sha256() != sha
    engine.load(tmp_path)
    assert engine.weights_sha256() == sha
    engine.close()


def test_an_exception_ends_the_turn() -> None:
    engine = engine_of("64MB")
    with pytest.raises(RuntimeError):
        engine(torch.ones(3, 5))
    assert elsewhere(lambda: step(engine, 0)) is None
    engine.close()
