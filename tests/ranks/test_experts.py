"""Experts among ranks: the model is that of one process, and tokens are sent as counted on paper."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import ebbtide
from ebbtide.errors import RanksError, StateError
from ebbtide.layout import ALIGNMENT, Bank, Layout, Slicing, TensorSpec, build_spread_layout, odd_bank
from group import RankError, group_of
from harness import config_of
from sampling import crossed, everything, some

EXPERTS, WIDTH, BATCH, LENGTH, STEPS = 4, 32, 8, 12, 20


def switch(experts: int = EXPERTS, capacity: int = 64) -> nn.Module:
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=128,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=experts,
        expert_capacity=capacity,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return SwitchTransformersForConditionalGeneration(config)


def mixtral(experts: int = EXPERTS) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        attention_dropout=0.0,
        router_jitter_noise=0.0,
    )
    return MixtralForCausalLM(config)


def few(capacity: int = 3) -> nn.Module:
    """Experts are often full."""
    return switch(capacity=capacity)


def one_sided(experts: int = EXPERTS) -> nn.Module:
    """All tokens want the first expert: others, and whole ranks, get none."""
    model = switch(experts)
    for name, parameter in model.named_parameters():
        if "router.classifier" in name:
            with torch.no_grad():
                parameter.zero_()  # the first of equal ones is taken
    return model


def checkpointed() -> nn.Module:
    model = mixtral()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


MODELS = {
    "switch": switch,
    "mixtral": mixtral,
    "few": few,
    "one-sided": one_sided,
    "checkpointed": checkpointed,
    "two of switch": lambda: switch(2),
    "two of mixtral": lambda: mixtral(2),
    "six of switch": lambda: switch(6),
    "two one-sided": lambda: one_sided(2),
}
FEW = ("two of switch", "two of mixtral", "six of switch", "two one-sided")
"""On four ranks, two at a time have the same experts."""


def share_of(number: int) -> dict[str, torch.Tensor]:
    """This rank's part of a global batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(1, 128, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number % 3))
    each = BATCH // size
    ids = ids[rank * each : (rank + 1) * each]
    return {"input_ids": ids, "labels": ids}


def run(engine: Any, first: int, steps: int) -> list[float]:
    """Losses of the global batches."""
    losses = []
    for number in range(first, first + steps):
        loss = engine(**share_of(number)).loss
        engine.backward(loss)
        engine.step()
        engine.check_integrity()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def train(name: str, config: dict[str, Any], steps: int = STEPS, slices: bool = False) -> dict[str, Any]:
    """`slices`: gradients are exchanged so, as for want of room."""
    with tempfile.TemporaryDirectory() as folder:
        if "ssd" in config:
            config = config | {"ssd": {"folder": folder, **config["ssd"]}}
            dist.barrier()
        engine = ebbtide.initialize(MODELS[name](), config)
        if slices:
            engine._session.planning.needs_slices = True
        try:
            losses = run(engine, 0, steps)
            with engine.weights() as found:
                weights = {key: value.clone() for key, value in found.items()}
            return {
                "losses": losses,
                "weights": weights,
                "sha": engine.weights_sha256(),
                "stats": engine.stats(),
                "local": sum(p.numel() for n, p in engine.module.named_parameters() if ".experts." in n),
            }
        finally:
            engine.close()


def plain(**changes: Any) -> dict[str, Any]:
    return config_of(precision="fp32", **changes)


@cache
def everything_fits(name: str, size: int) -> str:
    """The hash of the weights after four steps in which nothing had to move."""
    return str(group_of(size).run(train, name, config_of(), 4)[0]["sha"])


# -- as one process -----------------------------------------------------------------------------------------------


TWO = [(name, 2) for name in MODELS if name not in FEW]
ON_FOUR = ("two one-sided",)
"""Every day, for they need the most; the others now and then."""
FOUR = [pytest.param(name, 4, marks=() if name in ON_FOUR else pytest.mark.heavy) for name in MODELS]


@pytest.mark.parametrize(("name", "size"), [*some(TWO, 2), *FOUR])
def test_the_model_is_that_of_one_process(name: str, size: int) -> None:
    steps = STEPS if everything() else 8
    alone = group_of(1).run(train, name, plain(), steps)[0]
    found = group_of(size).run(train, name, plain(), steps)
    assert len({rank["sha"] for rank in found}) == 1
    for rank in found:
        assert rank["stats"]["experts"] and not rank["stats"]["gathered_experts"]
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        for key, value in rank["weights"].items():
            assert value.shape == alone["weights"][key].shape
            torch.testing.assert_close(value, alone["weights"][key], rtol=1e-3, atol=2e-4)
    assert alone["losses"][-1] < alone["losses"][0]


CHANGES: dict[str, dict[str, Any]] = {
    "host": {"device": {"memory": 900_000}, "host": {"memory": "64MB"}},
    "SSD": {"device": {"memory": 1_300_000}, "host": {"memory": 0}, "ssd": {"memory": "64MB"}},
    "pages": {
        "device": {"memory": 900_000},
        "host": {"memory": "64MB"},
        "layout": "page",
        "chunk_size": 16384,
    },
    "large chunks": {"chunk_size": "256KiB"},
    "without prefetch": {"device": {"memory": 900_000}, "host": {"memory": "64MB"}, "prefetch": False},
    "state on the host": {"device": {"memory": 900_000}, "host": {"memory": "64MB"}, "placement": "host"},
}


@pytest.mark.parametrize(("change", "name"), crossed(CHANGES, ["switch", "mixtral"]))
def test_placement_changes_no_number(name: str, change: str) -> None:
    wanted = everything_fits(name, 2)
    found = group_of(2).run(train, name, config_of(**CHANGES[change]), 4)
    assert [rank["sha"] for rank in found] == [wanted, wanted]


@pytest.mark.parametrize("change", some(["host", "SSD", "large chunks"], 1))
@pytest.mark.parametrize("name", ["two of mixtral", pytest.param("two of switch", marks=pytest.mark.heavy)])
def test_placement_changes_no_number_where_ranks_have_the_same_experts(name: str, change: str) -> None:
    wanted = everything_fits(name, 4)
    found = group_of(4).run(train, name, config_of(**CHANGES[change]), 4, change == "host")
    assert [rank["sha"] for rank in found] == [wanted] * 4


def test_updates_in_backward_gather_experts() -> None:
    exact = group_of(2).run(train, "switch", config_of(clip=None, experts="gathered"), 4)
    found = group_of(2).run(train, "switch", config_of(clip=None, updates="in-backward"), 4)
    for one, other in zip(exact, found, strict=True):
        assert one["sha"] == other["sha"]
        assert set(other["stats"]["gathered_experts"].values()) == {"updates are in backward"}


@pytest.mark.heavy
def test_accumulation_is_a_larger_batch() -> None:
    found = group_of(2).run(train, "one-sided", plain(accumulate=2), 8)[0]
    again = group_of(4).run(train, "one-sided", plain(accumulate=2), 8)[0]
    assert found["losses"] == pytest.approx(again["losses"], rel=1e-3)


# -- bytes --------------------------------------------------------------------------------------------------------


def test_tokens_are_sent_as_on_paper() -> None:
    """Twice forward and twice backward, each row that has its expert elsewhere; here all go to the first rank."""
    for rank, found in enumerate(group_of(2).run(train, "one-sided", plain(), 1)):
        layers = found["stats"]["experts"]
        assert len(layers) == 2
        rows = BATCH // 2 * LENGTH
        for layer in layers.values():
            assert layer["load"] == [BATCH * LENGTH, 0, 0, 0]
            # From the second to the first rank and back: answers and gradients of rows, gradients of answers.
            assert layer["sent_bytes"] == 2 * rows * WIDTH * 4
        assert rank < 2


def test_tokens_go_to_one_of_those_that_have_the_expert() -> None:
    for found in group_of(4).run(train, "two one-sided", plain(), 1):
        rows = BATCH // 4 * LENGTH
        for layer in found["stats"]["experts"].values():
            assert layer["load"] == [BATCH * LENGTH, 0]
            assert layer["sent_bytes"] == 2 * rows * WIDTH * 4


def test_what_is_full_is_reported() -> None:
    found = group_of(2).run(train, "few", plain(), 1)[0]["stats"]["experts"]
    for layer in found.values():
        assert layer["dropped"] > 0
        assert sum(layer["load"]) + layer["dropped"] == BATCH * LENGTH


def test_a_rank_has_its_experts_only() -> None:
    whole = sum(p.numel() for n, p in mixtral().named_parameters() if ".experts." in n)
    for rank in group_of(4).run(train, "mixtral", plain(), 1):
        assert rank["local"] == whole // 4
    # Of two, each of four ranks has half of one, and computes with all of it.
    whole = sum(p.numel() for n, p in mixtral(2).named_parameters() if ".experts." in n)
    for rank in group_of(4).run(train, "two of mixtral", plain(), 1):
        assert rank["local"] == whole // 2


# -- values -------------------------------------------------------------------------------------------------------


def save(name: str, folder: str) -> dict[str, Any]:
    engine = ebbtide.initialize(MODELS[name](), plain())
    try:
        run(engine, 0, 3)
        engine.save(folder)
        return {"sha": engine.weights_sha256(), "after": run(engine, 3, 3), "end": engine.weights_sha256()}
    finally:
        engine.close()


def load(name: str, folder: str) -> dict[str, Any]:
    engine = ebbtide.initialize(MODELS[name](), plain())
    try:
        engine.load(folder)
        return {"sha": engine.weights_sha256(), "after": run(engine, 3, 3), "end": engine.weights_sha256()}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("one-sided", 2),
        pytest.param("mixtral", 2, marks=pytest.mark.heavy),
        ("two of mixtral", 4),
        pytest.param("two one-sided", 4, marks=pytest.mark.heavy),
        pytest.param("two of switch", 4, marks=pytest.mark.heavy),
    ],
)
def test_checkpoints_move_between_numbers_of_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    saved = group_of(ranks).run(save, name, str(tmp_path))[0]
    for size in (1, 2, 4):
        found = group_of(size).run(load, name, str(tmp_path))[0]
        assert found["sha"] == saved["sha"]
        assert found["after"] == pytest.approx(saved["after"], rel=1e-3)
        assert size != ranks or found["end"] == saved["end"]


def exported(folder: str) -> str:
    engine = ebbtide.initialize(mixtral(), plain())
    try:
        run(engine, 0, 2)
        engine.export(folder)
        return engine.weights_sha256()
    finally:
        engine.close()


def test_exports_are_whole(tmp_path: Path) -> None:
    sha = group_of(2).run(exported, str(tmp_path))[0]
    model = MixtralForCausalLM.from_pretrained(tmp_path)
    engine = ebbtide.initialize(model, plain())
    assert engine.weights_sha256() == sha
    engine.close()


def written(name: str) -> tuple[str, str]:
    """In place by the user: each rank what it computes with."""
    engine = ebbtide.initialize(MODELS[name](), plain())
    try:
        before = engine.weights_sha256()
        run(engine, 0, 1)
        with engine.weights() as found:
            wanted = {key: value * 2 for key, value in found.items() if ".experts." in key}
        with torch.no_grad(), engine.resident():
            for key, parameter in engine.module.named_parameters():
                if ".experts." in key and 0 not in parameter.stride():  # else others have it
                    parameter.mul_(2)
        with engine.weights() as found:
            for key, value in wanted.items():
                assert torch.equal(found[key], value), key
        return before, engine.weights_sha256()
    finally:
        engine.close()


@pytest.mark.parametrize(("name", "size"), [("mixtral", 2), ("two of mixtral", 4), ("two of switch", 4)])
def test_writes_in_place_count(name: str, size: int) -> None:
    found = group_of(size).run(written, name)
    assert len(set(found)) == 1


def loaded_weights(name: str, folder: str) -> list[str]:
    engine = ebbtide.initialize(MODELS[name](), plain())
    try:
        run(engine, 0, 2)
        hashes = [engine.weights_sha256()]
        engine.export(folder)
        run(engine, 2, 1)
        engine.load_weights(folder)
        return [*hashes, engine.weights_sha256()]
    finally:
        engine.close()


@pytest.mark.parametrize(("name", "size"), [("mixtral", 2), ("two of mixtral", 4)])
def test_exports_are_read_back(name: str, size: int, tmp_path: Path) -> None:
    for before, after in group_of(size).run(loaded_weights, name, str(tmp_path)):
        assert before == after


def gradients(name: str) -> dict[str, torch.Tensor]:
    engine = ebbtide.initialize(MODELS[name](), plain())
    try:
        engine.backward(engine(**share_of(0)).loss)
        with engine.gradients() as found:
            return {key: value.clone() for key, value in found.items()}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "size"), [("one-sided", 2), ("mixtral", 2), ("two one-sided", 4), ("two of mixtral", 4)]
)
def test_gradients_are_those_of_one_process(name: str, size: int) -> None:
    alone = group_of(1).run(gradients, name)[0]
    for found in group_of(size).run(gradients, name):
        assert sorted(found) == sorted(alone)
        for key, value in found.items():
            scale = max(float(alone[key].abs().max()), 1e-3)
            assert float((value - alone[key]).abs().max()) <= 1e-5 * scale, key


# -- what cannot be spread ----------------------------------------------------------------------------------------


def three_experts() -> dict[str, Any]:
    engine = ebbtide.initialize(mixtral(3), plain())
    try:
        return {"losses": run(engine, 0, 3), "stats": engine.stats()}
    finally:
        engine.close()


def test_experts_that_do_not_divide_are_gathered() -> None:
    alone = group_of(1).run(three_experts)[0]
    for found in group_of(2).run(three_experts):
        assert not found["stats"]["experts"]
        assert all(
            "3 experts do not divide by 2" in why for why in found["stats"]["gathered_experts"].values()
        )
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-3)


def apart() -> None:
    """One rank computes what the others do not."""
    engine = ebbtide.initialize(mixtral(), plain())
    try:
        if dist.get_rank() == 0:
            engine(**share_of(0))
        else:
            engine.backward(torch.zeros((), requires_grad=True) * 1)
    finally:
        engine.close()


def test_ranks_that_do_not_come_together_say_so() -> None:
    with pytest.raises(RankError, match=r"do not do the same|ask for different things"):
        group_of(2).run(apart)
    assert issubclass(StateError, Exception) and issubclass(RanksError, Exception)


# -- a layer of one's own -----------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two experts in lists, chosen by the sign of the first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = (rows[:, 0] > 0).long()
        return torch.stack([self.left[int(one)](row) for one, row in zip(chosen, rows, strict=True)])


class Around(nn.Module):
    def __init__(self, first: bool = True) -> None:
        """`first`: something before the experts."""
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.pair = Pair()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.pair(self.first(rows))).square().mean()


def own_adapter() -> None:
    bank = Bank(2, own=(("left.0.weight",), ("left.1.weight",)))

    def route(layer: Pair, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return rows, (rows[:, :1] > 0).long(), rows.new_ones(len(rows), 1)

    def run_experts(layer: Pair, rows: torch.Tensor, experts: torch.Tensor, here: range) -> torch.Tensor:
        return torch.stack([layer.left[int(one)](row) for one, row in zip(experts, rows, strict=True)])

    ebbtide.register_experts(Pair, ebbtide.ExpertAdapter(lambda layer: bank, route, run_experts))


def own_layer() -> dict[str, Any]:
    own_adapter()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Around(), plain())
    try:
        losses = []
        for number in range(4):
            rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
            each = BATCH // dist.get_world_size()
            loss = engine(rows[dist.get_rank() * each :][:each])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        return {"losses": losses, "experts": engine.stats()["experts"], "sha": engine.weights_sha256()}
    finally:
        engine.close()


def test_a_layer_of_ones_own() -> None:
    alone = group_of(1).run(own_layer)[0]
    found = group_of(2).run(own_layer)
    assert found[0]["sha"] == found[1]["sha"]
    assert list(found[0]["experts"]) == ["pair"]
    for number, wanted in enumerate(alone["losses"]):
        assert sum(rank["losses"][number] for rank in found) / 2 == pytest.approx(wanted, rel=1e-3)


SIGNS = ["both", "both", "both", "by rank", "by rank", "other", "both", "first", "both"]
"""Of the first feature, by step: which experts of `Pair` a rank's rows go to."""


def signed(number: int, rank: int, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    kind = SIGNS[number]
    if kind != "both":
        second = {"by rank": rank % 2 == 1, "other": rank % 2 == 0, "first": False}[kind]
        rows[:, 0] = rows[:, 0].abs() * (1 if second else -1)
    return rows


def alternating(config: dict[str, Any], parts: int) -> dict[str, Any]:
    """Experts that only some ranks have rows for, after steps in which all have. `parts`: of a global batch."""
    own_adapter()
    torch.manual_seed(0)
    engine = ebbtide.initialize(Around(first=False), config)
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        losses = []
        for number in range(len(SIGNS)):
            rows = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
            each = BATCH // parts
            batch = torch.cat([signed(number, part, rows[part * each :][:each]) for part in range(parts)])
            mine = BATCH // size
            loss = engine(batch[rank * mine :][:mine])
            engine.backward(loss)
            engine.step()
            engine.check_integrity()
            with torch.no_grad():
                losses.append(float(engine(batch)))
        with engine.weights() as found:
            weights = {key: value.clone() for key, value in found.items()}
        return {"losses": losses, "weights": weights, "sha": engine.weights_sha256()}
    finally:
        engine.close()


@pytest.mark.parametrize("change", some(["plain", "clip", "accumulate", "chunks"], 2))
def test_experts_that_some_of_those_that_have_them_have_no_rows_for(change: str) -> None:
    config = plain(
        **{
            "plain": {"clip": None},
            "clip": {"clip": 0.1},
            "accumulate": {"accumulate": 3, "clip": None},
            "chunks": {"clip": None, "chunk_size": "4KiB"},
        }[change]
    )
    alone = group_of(1).run(alternating, config, 4)[0]
    found = group_of(4).run(alternating, config, 4)
    assert len({rank["sha"] for rank in found}) == 1
    for rank in found:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        for key, value in rank["weights"].items():
            torch.testing.assert_close(value, alone["weights"][key], rtol=1e-3, atol=2e-4)


# -- layouts ------------------------------------------------------------------------------------------------------


def spec(name: str, *shape: int) -> TensorSpec:
    stride = [1]
    for length in reversed(shape[1:]):
        stride.insert(0, stride[0] * length)
    return TensorSpec(name, shape, tuple(stride), "bf16")


@given(
    ranks=st.integers(2, 4),
    local=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    cut=st.sampled_from(["chunk", "page", "tensor"]),
    unit=st.integers(1, 64),
)
def test_a_slice_is_whole_experts(ranks: int, local: int, sizes: list[int], cut: str, unit: int) -> None:
    count = ranks * local
    own = tuple(tuple(f"e{e}.{i}" for i in range(len(sizes))) for e in range(count))
    specs = [spec("first", 100), *(spec(n, s) for names in own for n, s in zip(names, sizes, strict=True))]
    specs += [spec("stack", count, ALIGNMENT), spec("last", 300)]
    bank = Bank(count, ("stack",), own)
    assert not odd_bank(bank, {s.name: s for s in specs}, ranks)
    layout = build_spread_layout(specs, [bank], cut, None if cut == "tensor" else unit * ALIGNMENT, ranks)
    assert list(layout.spans) == [s.name for s in specs]
    taken: dict[int, list[tuple[int, int]]] = {}
    for one in specs:
        span = layout.spans[one.name]
        size = layout.chunks[span.chunk].size
        taken.setdefault(span.chunk, []).append((span.offset, span.offset + span.numel))
        shares = [Slicing(ranks, rank).share(span.offset, span.numel, size) for rank in range(ranks)]
        assert (span.chunk in layout.spread) == (one.name not in ("first", "last"))
        if one.name.startswith("e"):
            owner = int(one.name[1:].split(".")[0]) // local
            assert [share.numel for share in shares] == [one.numel * (rank == owner) for rank in range(ranks)]
        elif one.name == "stack":
            assert [share.first for share in shares] == [rank * local * ALIGNMENT for rank in range(ranks)]
            assert {share.numel for share in shares} == {local * ALIGNMENT}
            assert {share.offset for share in shares} == {0}
    check_places(layout, specs, taken)


def check_places(layout: Layout, specs: list[TensorSpec], taken: dict[int, list[tuple[int, int]]]) -> None:
    """No tensors overlap, nor do chunks, which are in the order of their first tensors. `taken`: elements, by chunk."""
    for index, ranges in taken.items():
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        assert ranges[-1][1] <= layout.chunks[index].size
    starts = sorted((c.dtype, c.start, c.start + c.size) for c in layout.chunks)
    assert all(a[2] <= b[1] for a, b in pairwise(starts) if a[0] == b[0])
    order = {one.name: position for position, one in enumerate(specs)}
    firsts = [min(order[name] for name in layout.names_of(chunk.index)) for chunk in layout.chunks]
    assert firsts == sorted(firsts)


@given(
    shares=st.integers(2, 3),
    alike=st.integers(2, 4),
    local=st.sampled_from([1, 5, 7]),
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    cut=st.sampled_from(["chunk", "page", "tensor"]),
    unit=st.integers(1, 64),
)
def test_slices_in_a_row_are_whole_experts(
    shares: int, alike: int, local: int, sizes: list[int], cut: str, unit: int
) -> None:
    """Where experts are fewer than ranks."""
    ranks, count = shares * alike, shares * local
    if gcd(count, ranks) != shares:
        return
    own = tuple(tuple(f"e{e}.{i}" for i in range(len(sizes))) for e in range(count))
    specs = [spec("first", 100), *(spec(n, s) for names in own for n, s in zip(names, sizes, strict=True))]
    specs += [spec("stack", count, alike * ALIGNMENT), spec("last", 300)]
    bank = Bank(count, ("stack",), own)
    assert not odd_bank(bank, {s.name: s for s in specs}, ranks)
    layout = build_spread_layout(specs, [bank], cut, None if cut == "tensor" else unit * ALIGNMENT, ranks)
    taken: dict[int, list[tuple[int, int]]] = {}
    for one in specs:
        span = layout.spans[one.name]
        size = layout.chunks[span.chunk].size
        taken.setdefault(span.chunk, []).append((span.offset, span.offset + span.numel))
        if one.name in ("first", "last"):
            assert span.chunk not in layout.spread
            continue
        assert layout.spread[span.chunk] == alike
        for rank in range(ranks):
            share = Slicing(ranks, rank).crew(alike).share(span.offset, span.numel, size)
            if one.name == "stack":
                assert share.numel == local * alike * ALIGNMENT and share.offset == 0
            else:
                owner = int(one.name[1:].split(".")[0]) // local
                assert share.numel == one.numel * (rank // alike == owner)
        # The slices of a crew are what it has, and nothing else.
        assert size == ranks * Slicing(ranks).slice(size) == shares * Slicing(shares).slice(size)
    check_places(layout, specs, taken)
