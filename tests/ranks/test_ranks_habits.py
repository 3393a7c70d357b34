"""Habits of a training loop on two ranks: the module is called, the user's code starts backward, clips, keeps averages
and writes, with the same weights as by the engine's own calls, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import ebbtide
from ebbtide.errors import StateError
from group import group_of
from harness import config_of
from test_habits import LR, WIDTH, Net, batch

PLACES: dict[str, dict[str, Any]] = {
    "everything fits": {},
    "host": {"device": {"memory": 200_000}, "host": {"memory": "64MiB"}},
    "outside the chunks": {
        "device": {"memory": 200_000},
        "host": {"memory": "64MiB"},
        "unmanaged": ["head.*"],
    },
}


def start(place: str, **changes: Any) -> ebbtide.Engine:
    base = {"precision": "fp32", "clip": None, "chunk_size": "8KiB", "optimizer": {"lr": LR}}
    return ebbtide.initialize(Net(), config_of(**(base | PLACES[place] | changes)))


def loss_of(engine: ebbtide.Engine, number: int, own: bool) -> torch.Tensor:
    x, y = batch(number * dist.get_world_size() + dist.get_rank())
    return F.cross_entropy(engine.module(x) if own else engine(x), y)


def looped(place: str, own: bool) -> tuple[str, list[float]]:
    """With the module's calls and the user's backward, or with the engine's."""
    engine = start(place, clip=None if own else 0.5)
    norms = []
    for number in range(4):
        for micro in range(2):
            loss = loss_of(engine, 2 * number + micro, own) / 2
            if own:
                loss.backward()
            else:
                engine.backward(loss)
        found = float(engine.clip_grad_norm_(0.5)) if own else 0.0
        result = engine.step()
        assert (
            result.updated
            and result.grad_norm is not None
            and (not own or abs(found - result.grad_norm) < 1e-5)
        )
        norms.append(result.grad_norm)
        with torch.no_grad():
            assert engine.module(batch(90)[0]).isfinite().all()
        engine.check_integrity()
    sha = engine.weights_sha256()
    engine.close()
    return sha, norms


@pytest.mark.parametrize("place", PLACES)
def test_the_modules_calls_and_the_users_backward_train_alike(place: str) -> None:
    found = [rank for own in (False, True) for rank in group_of(2).run(looped, place, own)]
    assert all(one == found[0] for one in found)
    if place != "outside the chunks":  # there ranks take the mean of sums, and not the sum of means
        assert found[0] == group_of(2).run(looped, "everything fits", True)[0]


def averaged(place: str) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The hash, the average, and what it should be."""
    engine = start(place)
    average = engine.ema(0.75)
    expected = engine.state_dict()
    for number in range(3):
        loss_of(engine, number, True).backward()
        engine.step()
        for name, value in engine.state_dict().items():
            expected[name] = expected[name] + (value - expected[name]) * 0.25
    sha = engine.weights_sha256()
    with average.swapped_in(), torch.no_grad():
        assert engine.module(batch(90)[0]).isfinite().all()
    assert engine.weights_sha256() == sha
    found = average.state_dict()
    engine.check_integrity()
    engine.close()
    return sha, found, expected


@pytest.mark.parametrize("place", PLACES)
def test_averages_are_exact_on_ranks(place: str) -> None:
    for _, found, expected in group_of(2).run(averaged, place):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def written(place: str) -> tuple[str, torch.Tensor]:
    engine = start(place)
    loss_of(engine, 0, True).backward()
    engine.step()
    with engine.resident(write=True):
        engine.module.layers[3].weight.data.mul_(0.5)
        live = engine.module.state_dict()["layers.3.weight"]
        assert torch.equal(live, engine.module.layers[3].weight)
    loss_of(engine, 1, True).backward()
    engine.step()
    sha = engine.weights_sha256()
    engine.close()
    return sha, live


def test_what_is_written_while_resident_counts_on_ranks() -> None:
    found = [rank for place in ("everything fits", "host") for rank in group_of(2).run(written, place)]
    assert len({sha for sha, _ in found}) == 1


def nothing(place: str) -> str:
    """No rank brings a gradient; then one does, and the other brings zeros by it."""
    engine = start(place)
    before = engine.weights_sha256()
    x = torch.ones(2, WIDTH, requires_grad=True)
    engine.module.requires_grad_(False)
    engine.module(x).sum().backward()
    said = ""
    try:
        engine.step()
    except StateError as error:
        said = str(error)
    assert engine.weights_sha256() == before
    engine.module.requires_grad_(True)
    loss_of(engine, 0, True).backward()
    assert engine.step().updated
    engine.close()
    return said


def test_a_step_without_a_gradient_is_refused_on_all_ranks() -> None:
    for said in group_of(2).run(nothing, "everything fits"):
        assert "brought no gradient to a parameter" in said


def evaluated_apart() -> list[float]:
    """The first rank's batches are small, and chunks stay there between them; the other has to fetch them again. After
    each evaluation ranks tell each other something of their own."""
    engine = start("host", device={"memory": 120_000})
    rank, found = dist.get_rank(), []
    engine.backward(loss_of(engine, 0, True))
    engine.step()
    for _ in range(4):
        with torch.no_grad():
            scores = engine.module(torch.ones(4 if rank == 0 else 96, WIDTH))
        mean = scores.mean()
        dist.all_reduce(mean)
        found.append(float(mean))
    engine.close()
    return found


def test_ranks_that_evaluate_batches_of_their_own_sizes_wait_for_each_other() -> None:
    first, second = group_of(2).run(evaluated_apart)
    assert first == second and len(set(first)) == 1


def told(ends: list[list[int]], rank: int) -> torch.Tensor:
    """What a rank writes; its text is over with these tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=2, n_positions=64))
    if dist.is_initialized():
        device = {"memory": 130_000}
        ebbtide.initialize(model, config_of(precision="fp32", chunk_size="8KiB", device=device))
    with torch.no_grad():
        asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": ends[rank]}
        return model.generate(torch.full((2, 3), 5), **asked)


def generated(ends: list[list[int]]) -> torch.Tensor:
    rank = dist.get_rank()
    found = told(ends, rank)
    dist.all_reduce(torch.ones(1))
    return found


def test_a_rank_whose_text_is_over_goes_on_with_the_others() -> None:
    ends = [list(range(64)), [1]]
    for rank, found in enumerate(group_of(2).run(generated, ends)):
        assert torch.equal(found, told(ends, rank))
