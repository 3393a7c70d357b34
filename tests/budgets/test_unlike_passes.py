"""Passes that look like one that is known, and take more: none passes the budget for long, or in silence."""

from __future__ import annotations

from collections import UserDict, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.runtime.planning.calls import call_of, signature_of, tensors, with_sizes
from ebbtide.runtime.planning.earlier_passes import ways_back
from harness import Count, config_of

IMAGINES = True

WIDTH, LAYERS = 64, 6
TINY = 3_000
"""Bytes of a few losses and scalars."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.checkpointed = False

    def forward(self, x: Any, chosen: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            x = x["x"] if isinstance(x, dict) else x.x
        if chosen is not None:
            x = x[chosen]
        for layer in self.layers:
            if getattr(self, "gradient_checkpointing", False):
                x = torch.utils.checkpoint.checkpoint(self._one, layer, x, use_reentrant=False)
            else:
                x = self._one(layer, x)
        return x.square().mean()

    def _one(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(layer(x)) + torch.sigmoid(x)


def engine_of(memory: int, module: nn.Module) -> ebbtide.Engine:
    config = config_of(precision="fp32", chunk_size="16KiB", clip=None, device={"memory": memory})
    return ebbtide.initialize(module, config | {"host": {"memory": "64MB"}})


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def step(engine: ebbtide.Engine, *given: Any) -> int:
    """The most bytes that there were, by a count of its own."""
    with Count(engine) as count:
        count.given({str(i): one for i, one in enumerate(given) if isinstance(one, torch.Tensor)})
        engine.backward(engine(*given))
        engine.step()
    engine.check_integrity()
    return count.peak


def test_more_elements_that_a_mask_has_chosen() -> None:
    """The events are those of the plan; what is saved is not. It was taken as planned for ever, over the budget."""
    memory = 370_000
    engine, x = engine_of(memory, Net()), rows(128)
    chosen = {count: torch.arange(128) < count for count in (8, 16, 48)}
    for _ in range(6):
        assert step(engine, x, chosen[8]) <= memory
    peaks = [step(engine, x, chosen[48]) for _ in range(8)]
    assert max(peaks[2:]) <= memory
    engine.close()


def test_a_mask_that_chooses_by_chance_is_not_traced_again_and_again() -> None:
    engine, x = engine_of(900_000, Net()), rows(256)
    drawn, off = torch.Generator().manual_seed(0), 0
    for _ in range(60):
        assert step(engine, x, torch.rand(256, generator=drawn) < 0.15) <= 900_000
        off += not engine._session.cursor.on_track
    assert engine.stats()["traces"] <= 6 and off <= 6
    engine.close()


class Between(Net):
    """What is chosen is computed with in the midst of the pass, and the peak is before it."""

    def forward(self, x: Any, chosen: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        y = x[chosen]
        for _ in range(10):
            y = torch.tanh(y)
        return self.layers[-1](y).sum()


@pytest.mark.parametrize("memory", [222_000, 238_000, 254_000])
def test_without_room_for_a_sixteenth_more_what_varies_is_still_no_surprise(memory: int) -> None:
    """The plan was made without that room, and taken as if it had it."""
    engine, x, ran = engine_of(memory, Between()), rows(64), 0
    with suppress(BudgetError):
        for count in (16, 16, 20, 20, 24, 24, 28, 28, 28):
            assert step(engine, x, torch.arange(64) < count) <= memory, count
            ran += 1
    assert ran > 3
    engine.close()


def test_two_forward_passes_before_one_backward_are_as_planned() -> None:
    engine, x = engine_of(600_000, Net()), rows(16)
    for number in range(8):
        engine.backward(engine(x) + engine(x))
        assert number < 3 or engine._session.cursor.on_track
        engine.step()
    assert engine.stats()["traces"] <= 2
    engine.close()


def test_a_mask_that_chooses_fewer_changes_no_plan() -> None:
    engine, x = engine_of(400_000, Net()), rows(128)
    chosen = {count: torch.arange(128) < count for count in (8, 16, 48)}
    for _ in range(4):
        step(engine, x, chosen[48])
    traced = engine.stats()["traces"]
    for count in (8, 16, 48, 8, 48):
        step(engine, x, chosen[count])
    assert engine.stats()["traces"] == traced
    engine.close()


@pytest.mark.parametrize("switched", ["checkpointing", "frozen"])
def test_what_is_switched_midway_has_a_plan_of_its_own(switched: str) -> None:
    memory, net = 480_000, Net()
    net.gradient_checkpointing = switched == "checkpointing"
    if switched == "frozen":
        net.layers[:-1].requires_grad_(False)
    engine, x = engine_of(memory, net), rows(64)
    peaks = [step(engine, x) for _ in range(4)]
    if switched == "frozen":
        net.layers.requires_grad_(True)
        for parameter in net.parameters():
            if not any(parameter is p for group in engine.optimizer.param_groups for p in group["params"]):
                engine.optimizer.add_param_group({"params": [parameter]})
    else:
        net.gradient_checkpointing = False
    peaks += [step(engine, x) for _ in range(4)]
    assert max(peaks) <= memory, peaks
    engine.close()


class Kind(Enum):
    TEXT = "text"


@dataclass
class Batch:
    x: torch.Tensor


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


@pytest.mark.parametrize("make", [Batch, Slotted, lambda x: SimpleNamespace(x=x)])
def test_a_larger_batch_in_an_object_of_the_users(make: Any) -> None:
    memory = 300_000
    engine = engine_of(memory, Net())
    for count in (8, 8, 8, 48, 48, 8, 48):
        with Count(engine) as counted:
            given = rows(count)
            counted.given({"x": given})
            engine.backward(engine(make(given)))
            engine.step()
        assert counted.peak <= memory, count
    engine.close()


@dataclass
class Settings:
    """No batch: it has no tensors."""

    kind: Kind = Kind.TEXT
    rate: float = 0.5


@pytest.mark.parametrize("beside", [Settings(), Kind.TEXT])
def test_an_object_without_tensors_beside_batches_that_grow(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One larger batch is imagined for all that are to come."""

    class Beside(Net):
        def forward(self, x: Any, beside: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    engine = engine_of(900_000, Beside())
    imagined: list[Any] = []
    imagine = engine._session.imagining.imagine
    monkeypatch.setattr(
        engine._session.imagining, "imagine", lambda *given: imagined.append(given) or imagine(*given)
    )
    for count in range(33, 45):
        step(engine, rows(count), beside)
    assert len(imagined) <= 3
    engine.close()


def test_sizes_go_to_the_tensors_that_they_are_of() -> None:
    held = deque([torch.zeros(2, 3)])
    call = call_of(nn.Linear(1, 1), nn.Linear(1, 1), (held, torch.zeros(4, 5)), {})
    assert call.signature.startswith("torch.nn") and "(2, 3)" in call.signature
    assert with_sizes(call, ((7, 3), (8, 5)), torch.device("cpu")) is None
    plain = call_of(nn.Linear(1, 1), nn.Linear(1, 1), ([torch.zeros(2, 3)], torch.zeros(4, 5)), {})
    other = with_sizes(plain, ((7, 3), (8, 5)), torch.device("cpu"))
    assert other is not None and other.args[0][0].shape == (7, 3) and other.args[1].shape == (8, 5)
    assert with_sizes(plain, ((7, 3),), torch.device("cpu")) is None


class Hidden:
    __slots__ = ("__loss", "logits")

    def __init__(self, loss: torch.Tensor) -> None:
        self.__loss, self.logits = loss, loss.detach()


def test_outputs_are_found_wherever_they_are() -> None:
    loss = torch.ones(3, requires_grad=True).sum()
    for found in (
        Hidden(loss),
        deque([loss]),
        {"a": [(loss,)]},
        SimpleNamespace(a=SimpleNamespace(b=[loss])),
    ):
        assert any(tensor is loss for tensor in tensors(found))
        assert ways_back(found) == [loss]


def test_a_module_that_was_traced_by_jit_has_a_signature() -> None:
    net = Net()
    net.layers[0] = torch.jit.trace(net.layers[0], rows(4))  # type: ignore[no-untyped-call]
    found = {call_of(one, one, (), {}).signature for one in (net, net.eval())}
    assert len(found) == 1  # the same module, in one mode by then
    assert call_of(net.train(), net, (), {}).signature not in found


class Vocabulary:
    def __init__(self) -> None:
        self.words = {f"word {number}": number for number in range(50_000)}
        self.own: Any = self


class Shapeless:
    @property
    def shape(self) -> Any:
        raise RuntimeError("nobody asks")


def test_signatures_of_what_is_no_batch_are_short() -> None:
    own: UserDict[str, Any] = UserDict()
    own["own"] = own
    signature = signature_of((Vocabulary(), Shapeless(), own, [1.5] * 3), {}, True)
    assert len(signature) < 10_000 and "Shapeless" in signature and signature.endswith("float|float|float")


class Cache:
    """As transformers' own: no container that PyTorch knows."""

    def __init__(self) -> None:
        self.layers: list[SimpleNamespace] = []


class Caching(Net):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        cache = Cache()
        for layer in self.layers:
            x = self._one(layer, x)
            cache.layers.append(SimpleNamespace(keys=x * 2, kind=Cache, dtype=x.dtype))
        return {"loss": x.square().mean(), "cache": cache}


def test_forward_passes_that_give_a_cache_and_are_dropped() -> None:
    """They counted for ever, until there was no room left."""
    engine = engine_of(500_000, Caching())
    for _ in range(3):
        engine.backward(engine(rows(32))["loss"])
        engine.step()
    for _ in range(20):
        engine(rows(32))
    engine.backward(engine(rows(32))["loss"])
    engine.step()
    engine.close()


def test_a_cache_within_a_cache_is_looked_into() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    states = torch.ones(1, 1, 2, 4, requires_grad=True) * 2
    cache.self_attention_cache.update(states, states * 2, 0)
    cache.cross_attention_cache.update(states * 3, states * 4, 0)
    output = Seq2SeqLMOutput(loss=states.sum(), past_key_values=cache)
    assert len({id(tensor) for tensor in tensors(output)}) == 5
    ways = ways_back(output)
    assert ways is not None and len({id(tensor) for tensor in ways}) == 5


def test_a_cache_that_is_held_has_its_room() -> None:
    memory = 420_000
    engine = engine_of(memory, Caching())
    held: list[Any] = []
    for number in range(8):
        with Count(engine) as count:
            given = rows(32)
            count.given({"x": given})
            if number == 4:
                with torch.no_grad():
                    held.append(engine(given))
            engine.backward(engine(given)["loss"])
            engine.step()
        # What is held from before the count began is not in it.
        beside = sum(one.keys.nbytes for one in held[0]["cache"].layers) if held and number > 4 else 0
        assert count.peak + beside <= memory, number
    engine.close()
