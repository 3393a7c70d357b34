"""Batches of many sizes: what is known of some serves all of their kind, within the budget, with the same numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ebbtide
from ebbtide.runtime.planning.calls import signature_of
from ebbtide.runtime.planning.input_shapes import grown, kind_of, resized
from harness import Count, config_of

IMAGINES = True

WIDTH, WORDS, LAYERS = 32, 50, 4


class Attending(nn.Module):
    """Attention over padded texts: its activations grow with the square of the length."""

    def __init__(self, positions: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.places = nn.Parameter(torch.randn(positions, WIDTH)) if positions else None

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, step: int = 0, depth: int = LAYERS
    ) -> torch.Tensor:
        x = self.embed(ids)
        if self.places is not None:
            x = x + self.places[: ids.shape[1]].expand_as(x)
        for layer in self.layers[:depth]:
            query, key, value = layer(x).chunk(3, -1)
            weights = (query @ key.transpose(1, 2)).masked_fill(~mask[:, None], -1e9).softmax(-1)
            x = x + torch.tanh(weights @ value)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), ids)


def batch(length: int, rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"ids": ids, "mask": torch.ones(rows, length, dtype=torch.bool)}


def engine_of(memory: int, model: nn.Module | None = None) -> ebbtide.Engine:
    config = config_of(precision="fp32", chunk_size="4KiB", clip=None, device={"memory": memory})
    return ebbtide.initialize(model or Attending(), config | {"host": {"memory": "64MB"}})


def train(engine: ebbtide.Engine, batches: list[dict[str, Any]]) -> int:
    """The most bytes that there were, by a count of its own."""
    most = 0
    for one in batches:
        with Count(engine) as count:
            count.given({name: value for name, value in one.items() if isinstance(value, torch.Tensor)})
            engine.backward(engine(**one))
            engine.step()
        most = max(most, count.peak)
        engine.check_integrity()
    return most


def least_for(batches: list[dict[str, Any]]) -> int:
    """A budget of the largest batch's activations and a quarter of model data."""
    engine = engine_of(64_000_000)
    train(engine, batches)
    peak, data = engine.stats()["non_model_peak"], sum(engine.stats()["tags"]["device"].values())
    engine.close()
    return int(peak + data // 4)


@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_lengths_cost_three_traces_and_keep_the_budget(seed: int) -> None:
    lengths = random.Random(seed).sample(range(16, 129), 20)
    batches = [batch(length) for length in lengths * 2]
    random.Random(seed).shuffle(batches)
    memory = least_for([batch(max(lengths))])
    shas = []
    for budget in (memory, 64_000_000):
        engine = engine_of(budget)
        assert train(engine, batches) <= budget
        stats = engine.stats()
        assert stats["traces"] <= 3 and not stats["diverged"]
        shas.append(engine.weights_sha256())
        if budget == memory:
            assert stats["moved_bytes"]["host_to_device"] > 0
        engine.close()
    assert shas[0] == shas[1]


def test_shapes_that_shrink_grow_and_come_in_turns() -> None:
    batches = [
        batch(96),
        batch(32),
        batch(96, 2),
        batch(128),
        batch(16, 7),
        batch(96),
        batch(1, 1),
        batch(128),
    ] * 2
    memory, shas = least_for([batch(128)]), []
    for budget in (memory, 64_000_000):
        engine = engine_of(budget)
        assert train(engine, batches) <= budget
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_a_number_that_counts_is_no_shape() -> None:
    batches = [batch(32) | {"step": step} for step in range(8)]
    engine = engine_of(least_for(batches[:1]))
    train(engine, batches)
    assert engine.stats()["traces"] <= 3
    engine.close()


def test_a_number_that_counts_beside_lengths_that_vary() -> None:
    """As Trainer's count of tokens does."""
    lengths = random.Random(3).sample(range(16, 129), 10)
    batches = [batch(length) | {"step": 7 * length} for length in lengths]
    memory = least_for([batch(max(lengths))])
    engine = engine_of(memory)
    assert train(engine, batches) <= memory
    assert engine.stats()["traces"] <= 5
    engine.close()


@pytest.mark.parametrize("first", [1, LAYERS])
def test_a_number_that_makes_a_difference_keeps_the_budget(first: int) -> None:
    memory = least_for([batch(64)])
    engine = engine_of(memory)
    batches = [batch(64) | {"depth": depth} for depth in [first, LAYERS, 1, 2, LAYERS, 3, 1] * 2]
    assert train(engine, batches) <= memory
    engine.close()


@pytest.mark.parametrize("lengths", [(64, 128, 65, 70), (128, 8, 70, 66, 130)])
def test_lengths_that_forward_pads(lengths: tuple[int, ...]) -> None:
    """To a multiple of 64: a little more takes as much as the next one."""

    class Padding(Attending):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            more = -ids.shape[1] % 64
            return super().forward(nn.functional.pad(ids, (0, more)), nn.functional.pad(mask, (0, more)))

    batches = [batch(length) for length in lengths]
    engine = engine_of(64_000_000, Padding())
    train(engine, batches)
    stats = engine.stats()
    memory = stats["non_model_peak"] + sum(stats["tags"]["device"].values()) // 4
    engine.close()
    engine = engine_of(memory, Padding())
    assert train(engine, batches * 2) <= memory
    engine.close()


def test_a_number_that_a_smaller_shape_hides() -> None:
    class Times(Attending):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, times: int = 1) -> torch.Tensor:  # type: ignore[override]
            wide = self.embed(ids).repeat(1, 1, times)
            return super().forward(ids, mask) + wide.exp().square().mean()

    batches = [
        batch(length) | {"times": times} for length, times in [(128, 1), (8, 8), (128, 8), (128, 2)] * 2
    ]
    memory = 5_300_000
    engine = engine_of(memory, Times())
    assert train(engine, batches) <= memory
    engine.close()


def test_what_is_only_kept_in_real_passes_counts_for_other_shapes() -> None:
    class Keeping(Attending):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if not ebbtide.imagining():
                self.kept = torch.zeros(ids.shape[0], ids.shape[1], 4 * WIDTH)
            return super().forward(ids, mask)

    lengths = [128, 128, 127, 126, 127, 100, 128]
    memory = least_for([batch(128)]) + 600_000
    engine = engine_of(memory, Keeping())
    train(engine, [batch(length) for length in lengths[:2]])
    assert train(engine, [batch(length) for length in lengths[2:]]) <= memory
    engine.close()


def test_a_table_of_positions_that_ends() -> None:
    lengths = random.Random(2).sample(range(16, 65), 8)
    batches = [batch(length) for length in lengths]
    shas = []
    for memory in (1_200_000, 64_000_000):
        engine = engine_of(memory, Attending(positions=64))
        assert train(engine, batches) <= memory
        assert engine.stats()["symbolic"] == ""
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


# -- the rules, by themselves -------------------------------------------------------------------------------


def test_a_signature_says_sizes_and_numbers() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    signature = signature_of((ids, 5, 0.5, True, None, "a|(1,)torch.x"), {"mask": [ids.bool(), -1]}, True)
    kind = kind_of(signature)
    assert (
        kind.sizes[0] == (2, 3)
        and kind.sizes[-1] == (2, 3)
        and kind.numbers == ("5", "'a/(1,)torch.x'", "-1")
    )
    other = kind_of(resized(signature, tuple((9, 9)[: len(sizes)] for sizes in kind.sizes)))
    assert other.structure == kind.structure and other.covers(kind) and not kind.covers(other)
    assert (
        kind_of(signature_of((ids,), {}, True)).structure
        != kind_of(signature_of((ids,), {}, False)).structure
    )
    assert kind_of(signature_of((torch.zeros(()),), {}, True)).sizes == ((),)


Sizes = st.tuples(st.integers(1, 50), st.integers(1, 50))


@given(Sizes, Sizes, st.floats(1, 9))
def test_what_is_imagined_in_place_of_a_larger_one_encloses_both(
    one: tuple[int, int], other: tuple[int, int], times: float
) -> None:
    first, second = (signature_of((torch.empty(sizes, device="meta"),), {}, True) for sizes in (one, other))
    bigger = kind_of(resized(second, grown(kind_of(second), kind_of(first), times)))
    assert bigger.covers(kind_of(first)) and bigger.covers(kind_of(second))
    assert all(size <= 2 * max(a, b) for size, a, b in zip(bigger.sizes[0], one, other, strict=True))
