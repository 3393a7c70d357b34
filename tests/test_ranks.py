"""Many ranks: the weights are those of a plain loop that adds the ranks' gradients in order, wherever chunks are."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ebbtide
import reference
import zoo
from group import group_of
from harness import LR, Count, batch_of, config_of

STEPS = 4


def rank_of() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# -- what ranks do --------------------------------------------------------------------------------------------


def train(name: str, mode: str, steps: int, config: dict[str, Any]) -> dict[str, Any]:
    """Each rank takes the batches that are its own."""
    rank, size = rank_of()
    dtype = reference.ROUND[config.get("precision", "bf16")]
    with tempfile.TemporaryDirectory() as folder:
        if "ssd" in config:
            config = config | {"ssd": {"folder": folder, **config["ssd"]}}
            dist.barrier()
        engine = ebbtide.initialize(zoo.build(name, mode), config)
        try:
            losses = []
            with Count(engine) as count:
                for number in range(steps * config.get("accumulate", 1)):
                    batch = count.given(batch_of(name, number * size + rank, dtype, "cpu"))
                    loss = engine(**batch).loss
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                    engine.check_integrity()
            return {
                "sha": engine.weights_sha256(),
                "losses": losses,
                "stats": engine.stats(),
                "counted": count.peak,
            }
        finally:
            engine.close()


def plain(
    name: str, mode: str, steps: int, precision: str, clip: float | None, accumulate: int
) -> str | None:
    """The reference, in one of them: with as many threads as each rank has."""
    rank, size = rank_of()
    if rank:
        return None
    dtype = reference.ROUND[precision]
    return reference.train(
        zoo.build(name, mode),
        lambda number: batch_of(name, number, dtype, "cpu"),
        steps,
        precision,
        lr=LR,
        clip=clip,
        accumulate=accumulate,
        ranks=size,
    )[0]


@cache
def expected(
    size: int, name: str, mode: str, precision: str = "bf16", clip: float | None = 1.0, accumulate: int = 1
) -> str:
    return str(group_of(size).run(plain, name, mode, STEPS, precision, clip, accumulate)[0])


def check(size: int, name: str, mode: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = expected(
        size, name, mode, config.get("precision", "bf16"), config.get("clip"), config.get("accumulate", 1)
    )
    found = group_of(size).run(train, name, mode, STEPS, config)
    for rank in found:
        assert rank["sha"] == wanted
        assert not rank["stats"]["diverged"]
        peaks, budgets = rank["stats"]["peak_bytes"], rank["stats"]["budget_bytes"]
        assert all(peaks[tier] <= budgets[tier] for tier in budgets)
        assert rank["counted"] <= budgets["device"]
    return found


HOST = {"device": {"memory": 1_600_000}, "host": {"memory": "64MB"}}
CHANGES: dict[str, dict[str, Any]] = {
    "everything fits": {},
    "host": HOST,
    "SSD": {"device": {"memory": 1_900_000}, "host": {"memory": 0}, "ssd": {"memory": "64MB"}},
    "three tiers": {"device": {"memory": 1_900_000}, "host": {"memory": "2MB"}, "ssd": {"memory": "64MB"}},
    "pages": HOST | {"layout": "page", "chunk_size": 16384},
    "tensors": HOST | {"layout": "tensor"},
    "large chunks": {"chunk_size": "256KiB"},
    "separate masters": HOST | {"master": "separate"},
    "without prefetch": HOST | {"prefetch": False},
    "in backward": {"updates": "in-backward", "clip": None},
    "in backward, host": HOST | {"updates": "in-backward", "clip": None},
    "accumulate": HOST | {"accumulate": 2},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16", "nonfinite": "continue", "clip": None},
    "activations go": HOST | {"offload_activations": "all"},
    "state on the host": HOST | {"placement": "host"},
}


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "fp16"])
@pytest.mark.parametrize("size", [2])
def test_weights_are_those_of_a_plain_loop(size: int, change: str) -> None:
    config = config_of(**CHANGES[change])
    if CHANGES[change].get("layout") == "tensor":
        config.pop("chunk_size", None)
    check(size, "gpt2", "none", config)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("change", ["everything fits", "host", "SSD"])
def test_on_more_ranks(size: int, change: str) -> None:
    check(size, "gpt2", "none", config_of(**CHANGES[change]))


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name != "gpt2"])
def test_models(name: str) -> None:
    check(2, name, "none", config_of(device={"memory": 2_000_000}, host={"memory": "64MB"}))


@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mode", ["none", "non-reentrant"])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_everything(name: str, change: str, mode: str, size: int) -> None:
    check(
        size,
        name,
        mode,
        config_of(
            **({"device": {"memory": 2_000_000}} if "device" in CHANGES[change] else {}) | CHANGES[change]
        ),
    )


# -- one rank and many ------------------------------------------------------------------------------------------


def compared(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a global batch of twelve, and the first step's gradients."""
    rank, size = rank_of()
    engine = ebbtide.initialize(zoo.build("gpt2"), config_of(precision="fp32"))
    losses, gradients = [], {}
    for number in range(steps):
        whole = torch.cat([zoo.ZOO["gpt2"].batch(6 * number + i)["input_ids"] for i in range(6)])
        each = len(whole) // size
        ids = whole[rank * each : (rank + 1) * each]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        if not number:
            with engine.gradients() as found:
                gradients = {name: value.clone() for name, value in found.items()}
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / size)
    engine.close()
    return losses, gradients


def test_the_same_global_batch_learns_the_same() -> None:
    alone = group_of(1).run(compared, 20)[0]
    for size in (2, 4):
        for losses, gradients in group_of(size).run(compared, 20):
            assert losses == pytest.approx(alone[0], rel=1e-3)
            for name, value in gradients.items():
                scale = float(alone[1][name].abs().max())
                assert float((value - alone[1][name]).abs().max()) <= 1e-5 * max(scale, 1e-3)
