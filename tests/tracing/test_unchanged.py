"""A pass that is imagined first leaves nothing where the user's code keeps things: it looks as if forward ran once."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

import ebbtide
from ebbtide.tracing.symbolic.user_state import MOST, TENSORS
from harness import config_of

IMAGINES = True

WIDTH = 32
CALLS = 0
SEEN: list[Any] = []


def remember(value: Any) -> None:
    SEEN.append(value)


class Watched(nn.Module):
    """Keeps something of each pass wherever a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.log: list[torch.Tensor] = []
        self.recent: deque[torch.Tensor] = deque(maxlen=2)
        self.by_name: dict[str, list[torch.Tensor]] = {"nested": []}
        self.kinds: set[int] = set()
        self.count: Counter[str] = Counter()
        self.state = SimpleNamespace(calls=0, last=None)
        self.means = [torch.zeros(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.log.append(x.detach())
        self.recent.append(x.detach())
        self.by_name["nested"].append(x.detach())
        self.by_name["new"] = [x.detach()]
        self.kinds.add(len(self.log))
        self.count["passes"] += 1
        self.state.calls += 1
        self.state.last = x.detach()
        with torch.no_grad():
            self.means[0].add_(1)
        remember(x.detach())
        return (x * self.state.calls).square().mean()


def engine_of(module: nn.Module, memory: int = 60_000) -> ebbtide.Engine:
    return ebbtide.initialize(
        module, config_of(precision="fp32", chunk_size="4KiB", device={"memory": memory}, clip=None)
    )


def batch(number: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def all_real(*values: Any) -> bool:
    return not any(isinstance(value, FakeTensor) for value in tree_iter(values))


def test_what_modules_keep() -> None:
    global CALLS
    CALLS = 0
    SEEN.clear()
    model = Watched()
    engine = engine_of(model)
    try:
        for number in range(1, 4):
            engine.backward(engine(batch(number)))
            engine.step()
            assert (
                len(model.log) == model.state.calls == model.count["passes"] == CALLS == len(SEEN) == number
            )
            assert len(model.recent) == min(number, 2) and model.kinds == set(range(1, number + 1))
            assert len(model.by_name["nested"]) == number and len(model.by_name["new"]) == 1
            assert torch.equal(model.means[0], torch.full((WIDTH,), float(number)))
            assert all_real(model.log, list(model.recent), model.by_name, model.state.last, SEEN, model.means)
        assert engine.stats()["moved_bytes"]["host_to_device"] > 0
    finally:
        engine.close()


class Hook:
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.found.append(output)

    def method(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.found.append(output)


def into(found: list[torch.Tensor], module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    found.append(output)


def default(module: Any, inputs: Any, output: Any, found: list[torch.Tensor] = []) -> None:  # noqa: B006
    found.append(output)


@pytest.mark.parametrize("memory", [60_000, 3_000_000])
def test_what_hooks_keep_can_be_part_of_the_loss(memory: int) -> None:
    """Each keeps its layer's output, which is used after forward."""
    model = Watched()
    closed: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    called, bound = Hook(), Hook()
    assert default.__defaults__ is not None
    kept = [closed, given, called.found, bound.found, default.__defaults__[0]]
    layer = model.layers[1]
    layer.register_forward_hook(lambda module, inputs, output: closed.append(output))
    layer.register_forward_hook(partial(into, given))
    layer.register_forward_hook(called)
    layer.register_forward_hook(bound.method)
    layer.register_forward_hook(default)
    engine = engine_of(model, memory)
    try:
        for number in range(3):
            loss = engine(batch(number))
            assert [len(found) for found in kept] == [1] * 5 and all_real(kept)
            engine.backward(loss + sum(found.pop().square().mean() for found in kept))
            engine.step()
            engine.check_integrity()
    finally:
        engine.close()


def test_a_count_in_a_closure_and_a_hook_that_goes() -> None:
    model, calls, last = Watched(), 0, torch.zeros(())
    gone: list[int] = []

    def counted(module: nn.Module, inputs: Any) -> None:
        nonlocal calls, last
        calls += 1
        last = inputs[0].sum()

    def once(module: nn.Module, inputs: Any) -> None:
        gone.append(1)
        handle.remove()

    model.layers[0].register_forward_pre_hook(counted)
    handle = model.layers[0].register_forward_pre_hook(once)
    engine = engine_of(model)
    try:
        for number in range(1, 3):
            engine(batch(number))
            assert calls == number and all_real(last) and gone == [1]
        assert isinstance(model.layers[0]._forward_pre_hooks, OrderedDict)
    finally:
        engine.close()


class Node:
    def __init__(self, after: Node | None) -> None:
        self.after = after
        self.visits = 0


class Trainer:
    """Has what a loader's threads look at."""

    def __init__(self) -> None:
        self.data = [torch.ones(2), torch.ones(2)]
        self.passes = 0
        self.kinds: SimpleQueue[type] = SimpleQueue()  # looked into by nobody

    def look(self, module: nn.Module, inputs: Any) -> None:
        self.passes += 1
        self.kinds.put(type(self.data[0]))


def test_what_is_deep_or_large_and_what_others_look_at() -> None:
    model = Watched()
    chain = None
    for _ in range(5_000):
        chain = Node(chain)
    model.chain = chain
    large: list[Any] = [0] * (MOST + 1)
    trainer = Trainer()

    def visited(module: nn.Module, inputs: Any) -> None:
        assert chain is not None and chain.after is not None
        chain.after.visits += 1
        large[0] += 1

    model.layers[0].register_forward_pre_hook(visited)
    model.layers[0].register_forward_pre_hook(trainer.look)
    engine = engine_of(model)
    try:
        engine(batch())
        assert chain is not None and chain.after is not None
        assert chain.after.visits == 1 and trainer.passes == 1
        assert large[0] == 2  # too much to be looked at
        assert {trainer.kinds.get() for _ in range(trainer.kinds.qsize())} == {torch.Tensor}
        assert engine.stats()["traces"] == 1
    finally:
        engine.close()


def test_buffers_are_put_back_however_many_they_are() -> None:
    class Counting(Watched):
        def __init__(self) -> None:
            super().__init__()
            for number in range(TENSORS + 10):
                self.register_buffer(f"count{number}", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for buffer in self.buffers():
                buffer.add_(1)
            return super().forward(x)

    model = Counting()
    engine = engine_of(model, 3_000_000)
    try:
        engine(batch())
        assert {float(buffer) for buffer in model.buffers()} == {1.0}
    finally:
        engine.close()
