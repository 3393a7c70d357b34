"""Gradients exchanged in slices, where the device has no room for what ranks send of a whole chunk: the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ebbtide
import zoo
from ebbtide.errors import BudgetError
from ebbtide.forecasting.forecaster import Forecaster, Workload
from ebbtide.forecasting.simulation.strategies import set_up
from ebbtide.layout import ALIGNMENT
from ebbtide.runtime.distributed.gradient_reducer import LANE, block_of, room_for
from group import group_of
from harness import batch_of, config_of
from reference import ROUND
from sampling import some
from test_ranks import CHANGES, STEPS, check, expected, train
from test_simulate import MACHINE

SOME = ["everything fits", "SSD", "large chunks", "accumulate", "in backward, host", "fp32"]


@given(st.integers(1, 4096), st.integers(1, 5000))
def test_blocks_take_one_slice(units: int, ranks: int) -> None:
    each = units * ALIGNMENT
    block = block_of(each, ranks)
    assert 1 <= block <= each
    assert room_for(each, ranks) >= max(each, ranks * block)
    if ranks <= each:
        assert room_for(each, ranks) == each
        assert -(-each // block) <= 2 * ranks + 1 or block < LANE


@pytest.mark.parametrize("change", some(SOME, 3))
def test_weights_are_the_same(change: str) -> None:
    for rank in check(2, "gpt2", "none", config_of(**CHANGES[change]), slices=True):
        assert rank["stats"]["exchange_in_slices"]


@pytest.mark.parametrize(
    ("size", "name"), [(3, "gpt2"), (2, "t5"), pytest.param(4, "llama", marks=pytest.mark.heavy)]
)
def test_on_more_ranks_and_models(size: int, name: str) -> None:
    check(size, name, "none", config_of(device={"memory": 2_000_000}, host={"memory": "64MB"}), slices=True)


def test_steps_that_are_skipped_are_the_same() -> None:
    shas = set()
    for slices in (False, True):
        for rank in group_of(2).run(train, "gpt2", "none", STEPS, config_of(**CHANGES["fp16"]), slices):
            shas.add(rank["sha"])
    assert len(shas) == 1


def tried(budgets: list[list[int]], config: dict[str, Any]) -> list[tuple[bool, int, str] | None]:
    """By attempt, whether exchanges were in slices, what the device keeps for them, and the weights. `budgets`: of each
    rank."""
    found: list[tuple[bool, int, str] | None] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for each in budgets:
        engine = None
        try:
            engine = ebbtide.initialize(zoo.build("gpt2"), config | {"device": {"memory": each[rank]}})
            for number in range(STEPS):
                batch = batch_of("gpt2", number * size + rank, ROUND["bf16"], "cpu")
                engine.backward(engine(**batch).loss)
                engine.step()
                engine.check_integrity()
            stats = engine.stats()
            kept = engine._session.ledger.tags["device"]["exchange"]
            found.append((stats["exchange_in_slices"], kept, engine.weights_sha256()))
        except BudgetError:
            found.append(None)
        finally:
            if engine is not None:
                engine.close()
    return found


def test_the_plan_chooses_slices_where_nothing_else_fits() -> None:
    config = config_of(host={"memory": "64MB"}, chunk_size="128KiB")
    budgets = [[memory] * 3 for memory in range(1_200_000, 1_700_000, 100_000)]
    found = group_of(3).run(tried, budgets, config, patience=300)
    assert found[0] == found[1] == found[2]
    modes = [attempt and attempt[:2] for attempt in found[0]]
    slices = [i for i, mode in enumerate(modes) if mode and mode[0]]
    wholes = [i for i, mode in enumerate(modes) if mode and not mode[0]]
    assert slices and wholes and max(slices) < min(wholes), modes
    assert modes[slices[0]][1] * 3 <= modes[wholes[0]][1]  # type: ignore[index]
    example = batch_of("gpt2", 0, ROUND["bf16"], "cpu")
    asked = Forecaster(zoo.build("gpt2"), config, example).question(
        MACHINE.with_devices(3), Workload(), "ebbtide"
    )
    foreseen = set_up("ebbtide", asked.ask)
    sliced = foreseen.sliced()
    assert sliced is not None
    assert (sliced.exchange, foreseen.exchange) == (modes[slices[0]][1], modes[wholes[0]][1])  # type: ignore[index]
    wanted = expected(3, "gpt2", "none", "bf16", config.get("clip"))
    assert {attempt[2] for attempt in found[0] if attempt} == {wanted}
    # Where one rank alone has too little, all of them follow.
    tight, roomy = budgets[slices[0]][0], budgets[wholes[0]][0]
    for rank in group_of(3).run(tried, [[roomy, tight, roomy]], config):
        assert rank[0][0] and rank[0][2] == wanted


def modes(sequences: list[int], memory: int) -> list[bool | None]:
    """Whether exchanges were in slices in each step, with batches so long; None where there was no plan."""
    found: list[bool | None] = []
    config = config_of(host={"memory": "64MB"}, chunk_size="128KiB", device={"memory": memory})
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    for number, length in enumerate(sequences):
        batch = {
            key: value[:, :length] for key, value in batch_of("gpt2", number, ROUND["bf16"], "cpu").items()
        }
        try:
            engine.backward(engine(**batch).loss)
            engine.step()
            found.append(engine.stats()["exchange_in_slices"])
        except BudgetError:
            found.append(None)
    engine.close()
    return found


def test_only_batches_that_slices_serve_make_ranks_take_to_them() -> None:
    """One that has no plan in any way is refused, and changes nothing."""
    whole = int(batch_of("gpt2", 0, ROUND["bf16"], "cpu")["input_ids"].shape[1])
    short, found = max(2, whole // 4), {}
    for memory in (1_200_000, 1_375_000, 1_400_000, 1_425_000, 1_500_000):
        found[memory] = group_of(2).run(modes, [short, whole, short], memory)
        assert found[memory][0] == found[memory][1]
    seen = [tuple(ranks[0]) for ranks in found.values()]
    assert (False, None, False) in seen  # too little for the long one
    assert (False, True, True) in seen  # enough in slices, for good
    assert (False, False, False) in seen
