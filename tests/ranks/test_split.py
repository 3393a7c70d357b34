"""Tensor parallelism beside shared chunks, two by two: the model is that of two ranks which have all of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import ebbtide
from ebbtide.errors import ConfigError, StateError, UnsupportedError
from group import group_of
from harness import config_of

WIDTH, LENGTH, STEPS = 32, 12, 4
TIGHT = {"device": {"memory": "300KiB"}, "host": {"memory": "4MiB"}, "chunk_size": "16KiB"}
"""Less on the device than the weights take."""


@cache
def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


PLAN: dict[str, ParallelStyle] = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def split_llama() -> nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        parallelize_module(layer, mesh_of()["tp"], PLAN)
    return parallelize_module(
        model, mesh_of()["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    )


class Sequential(nn.Module):
    """Between blocks each process has a part of the sequence: norms are whole on all, their gradients are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take = nn.Embedding(256, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.take(input_ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        logits = self.head(self.last(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Out", (), {"loss": loss})


def split_sequential() -> nn.Module:
    cut, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "take": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=cut),
        "down": RowwiseParallel(output_layouts=cut),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    model = Sequential()
    return parallelize_module(model, mesh_of()["tp"], plan)


WHOLE = {"llama": llama, "sequential": Sequential}
SPLIT = {"llama": split_llama, "sequential": split_sequential}


def batch_of(number: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 256, (2, LENGTH), generator=torch.Generator().manual_seed(2 * (number % 3) + rank))
    return {"input_ids": ids, "labels": ids}


def steps_of(engine: Any, rank: int, first: int, count: int) -> list[tuple[float, float]]:
    """(loss, norm) of each step."""
    found = []
    for number in range(first, first + count):
        loss = engine(**batch_of(number, rank)).loss
        engine.backward(loss)
        norm = engine.step().grad_norm
        engine.check_integrity()
        found.append((loss.item(), norm))
    return found


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    with engine.weights() as found:
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in found.items()
        }


def whole(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Two ranks, which have all of the model."""
    engine = ebbtide.initialize(WHOLE[name](), config)
    try:
        found = steps_of(engine, dist.get_rank(), 0, STEPS)
        return {"steps": found, "weights": weights_of(engine)}
    finally:
        engine.close()


def split(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Two by two."""
    mesh = mesh_of()
    engine = ebbtide.initialize(SPLIT[name](), config, group=mesh["dp"].get_group())
    try:
        found = steps_of(engine, mesh["dp"].get_local_rank(), 0, STEPS)
        return {
            "steps": found,
            "weights": weights_of(engine),
            "sha": engine.weights_sha256(),
            "moved": engine.stats()["moved_bytes"],
            "parts": {n: isinstance(p, DTensor) for n, p in engine.module.named_parameters()},
        }
    finally:
        engine.close()


@pytest.mark.parametrize("name", WHOLE)
def test_two_by_two_is_the_model_of_two(name: str) -> None:
    config = config_of(precision="fp32")
    expected = group_of(2).run(whole, name, config)
    found = group_of(4).run(split, name, config)
    for rank, one in enumerate(found):
        assert any(one["parts"].values())
        for (loss, norm), (wanted, length) in zip(one["steps"], expected[rank // 2]["steps"], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4) and norm == pytest.approx(length, rel=1e-4)
        assert len({step[1] for other in found for step in other["steps"][:1]}) == 1  # one norm for all
        for key, value in expected[0]["weights"].items():
            torch.testing.assert_close(one["weights"][key], value, rtol=1e-4, atol=1e-5)


def test_bits_do_not_depend_on_the_place(tmp_path: Path) -> None:
    resident = group_of(4).run(split, "llama", config_of())
    on_ssd = {
        "chunk_size": "16KiB",
        "device": {"memory": "420KiB"},
        "ssd": {"memory": "8MiB", "folder": str(tmp_path)},
    }
    for change, link in ((TIGHT, "device_to_host"), (on_ssd | {"host": {"memory": 0}}, "ssd_read")):
        found = group_of(4).run(split, "llama", config_of(**change))
        assert [one["sha"] for one in found] == [one["sha"] for one in resident]
        assert all(one["moved"][link] for one in found) and not any(one["moved"][link] for one in resident)
    assert list(tmp_path.iterdir()) == [], "each process had a folder of its own there"


def going_on(folder: str) -> tuple[str, str, dict[str, torch.Tensor]]:
    mesh = mesh_of()
    rank = mesh["dp"].get_local_rank()
    engine = ebbtide.initialize(split_llama(), config_of(precision="fp32"), group=mesh["dp"].get_group())
    try:
        steps_of(engine, rank, 0, 2)
        engine.save(Path(folder) / "run", {"at": 2})
        engine.export(Path(folder) / "exported")
        exported = weights_of(engine)
        steps_of(engine, rank, 2, 2)
        expected = engine.weights_sha256()
        state = engine.state_dict()
    finally:
        engine.close()
    engine = ebbtide.initialize(
        split_llama(), config_of(precision="fp32", **TIGHT), group=mesh["dp"].get_group()
    )
    try:
        assert engine.load(Path(folder) / "run") == {"at": 2}
        steps_of(engine, rank, 2, 2)
        found = engine.weights_sha256()
        engine.load_state_dict(state)
        assert engine.weights_sha256() == expected
    finally:
        engine.close()
    return expected, found, exported


def test_saved_loaded_and_exported(tmp_path: Path) -> None:
    for expected, found, exported in group_of(4).run(going_on, str(tmp_path)):
        assert found == expected
        again = LlamaForCausalLM.from_pretrained(tmp_path / "exported")
        for name, value in again.named_parameters():
            torch.testing.assert_close(value.float(), exported[name], rtol=0, atol=0)


def one_part_not_finite() -> list[bool]:
    mesh = mesh_of()
    model: Any = split_llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    if mesh["tp"].get_local_rank() == 1:
        weight.register_hook(lambda gradient: gradient * float("nan"))
    config = config_of(precision="fp32", nonfinite="continue")
    engine = ebbtide.initialize(model, config, group=mesh["dp"].get_group())
    try:
        engine.backward(engine(**batch_of(0, mesh["dp"].get_local_rank())).loss)
        return [engine.step().skipped]
    finally:
        engine.close()


def test_a_part_that_is_not_finite_skips_the_step_for_all() -> None:
    assert group_of(4).run(one_part_not_finite) == [[True]] * 4


def with_all_ranks() -> str:
    try:
        ebbtide.initialize(split_llama(), config_of())
    except ConfigError as error:
        return str(error)
    return ""


def from_files(folder: str) -> str:
    try:
        ebbtide.initialize(split_llama(), config_of(), weights=folder, group=mesh_of()["dp"].get_group())
    except UnsupportedError as error:
        return str(error)
    return ""


def test_what_cannot_be(tmp_path: Path) -> None:
    for said in group_of(4).run(with_all_ranks):
        assert "other parts of model.layers.0.self_attn.q_proj.weight" in said and 'mesh["dp"]' in said
    for said in group_of(4).run(from_files, str(tmp_path)):
        assert "before parallelize_module()" in said


def away_parts() -> list[str]:
    """What is said of values of parameters that are away; and shapes, which are those of whole tensors."""
    group = mesh_of()["dp"].get_group()
    engine = ebbtide.initialize(split_llama(), config_of(precision="fp32", **TIGHT), group=group)
    steps_of(engine, 0, 0, 1)
    whole = {name: parameter.shape for name, parameter in llama().named_parameters()}
    said = []
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            assert parameter.shape == whole[name], name
            if not isinstance(parameter, DTensor):
                continue
            try:
                parameter.norm()
            except StateError as error:
                said.append(str(error))
    sha = engine.weights_sha256()
    engine.close()
    return [*said, sha]


def test_parts_that_are_away_raise_by_name() -> None:
    for *said, _ in group_of(4).run(away_parts):
        assert said and all("is away: norm needs its values" in one for one in said)


def told_apart(how: str) -> tuple[str, bool, bool]:
    """One of the four has another rate, or a hook that sets one: what is said, and whether weights stayed."""
    rank = dist.get_rank()
    engine = ebbtide.initialize(
        split_sequential(), config_of(precision="fp32", clip=None), group=mesh_of()["dp"].get_group()
    )

    def set_rate(*_: Any) -> None:
        engine.optimizer.param_groups[0]["lr"] = 0.5

    steps_of(engine, rank // 2, 0, 1)
    before = engine.weights_sha256()
    handle = (
        engine.optimizer.register_step_pre_hook(lambda *_: set_rate() if how == "sets" else None)
        if how != "rate" and rank == 3
        else None
    )
    if how == "rate" and rank == 3:
        set_rate()
    said = ""
    try:
        steps_of(engine, rank // 2, 1, 1)
    except StateError as error:
        said = str(error)
    same = engine.weights_sha256() == before
    if handle is not None:
        handle.remove()
    engine.zero_grad()
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    steps_of(engine, rank // 2, 2, 1)
    changed = engine.weights_sha256() != before
    engine.close()
    return said, same, changed


@pytest.mark.parametrize("how", ["rate", "sets", "listens"])
def test_settings_that_one_of_the_four_has_otherwise_are_refused_by_all(how: str) -> None:
    for said, same, changed in group_of(4).run(told_apart, how):
        assert same is (how != "listens") and changed
        assert how == "listens" or ("['lr'] is 0.001 on rank" in said and "0.5 on rank 3" in said)
