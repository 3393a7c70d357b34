"""Models of transformers with blocks under torch.compile and Inductor: one hash wherever the chunks are, as many graphs
as in plain PyTorch, and no more memory than was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters

import ebbtide
from ebbtide.bench.steps import most_allocated
from ebbtide.errors import BudgetError
from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks
from group import group_of
from harness import config_of

STEPS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 256, "num_key_value_heads": 2, "use_cache": False}


@dataclass(frozen=True)
class Kind:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]


def _tokens(drawn: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (2, 32), generator=drawn)
    return {"input_ids": ids, "labels": ids}


def _pairs(drawn: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, 256, (2, 16), generator=drawn) for name in ("input_ids", "labels")}


def _images(drawn: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=drawn), "labels": torch.tensor([0, 1])}


def _gpt2() -> nn.Module:
    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 256,
        "n_positions": 64,
        "use_cache": False,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none))


def _t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, **none, image_size=32, patch_size=8)
    )


def _mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=4))


KINDS = {
    "gpt2": Kind(_gpt2, _tokens),
    "llama": Kind(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), _tokens),
    "t5": Kind(_t5, _pairs),
    "vit": Kind(_vit, _images),
    "moe": Kind(_mixtral, _tokens),
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[name].build().train()


def _batches(name: str) -> Iterator[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield KINDS[name].batch(drawn)


def trained(name: str, changes: dict[str, Any], checkpoint: bool = False) -> tuple[str, int, dict[str, Any]]:
    """The weights' hash, the graphs that were compiled, and what the engine says."""
    torch._dynamo.reset()
    counters.clear()
    model = _built(name)
    if checkpoint:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    changes = {"precision": "fp32", "clip": 1.0, "chunk_size": "16KiB", "compile": "blocks"} | changes
    engine = ebbtide.initialize(model, config_of(**changes))
    try:
        for batch in _batches(name):
            engine.backward(engine(**batch).loss)
            engine.step()
        return engine.weights_sha256(), counters["stats"]["unique_graphs"], engine.stats()
    finally:
        engine.close()


def plain_graphs(name: str) -> int:
    model = _built(name)
    for _, block in repeated_blocks(model):
        block.compile()
    for batch in _batches(name):
        model(**batch).loss.backward()
    return int(counters["stats"]["unique_graphs"])


def least_of(name: str, checkpoint: bool = False) -> int:
    _, _, stats = trained(name, {"device": {"memory": "least"}}, checkpoint)
    return int(stats["budget_bytes"]["device"])


def trained_beside_ssd(name: str, device: int, folder: Path) -> tuple[str, int, dict[str, Any]]:
    """With the least host memory, in steps of a quarter of a megabyte."""
    host = 1 << 20
    while True:
        changes = {
            "device": {"memory": device},
            "host": {"memory": host},
            "ssd": {"folder": str(folder), "memory": "1GB"},
        }
        try:
            return trained(name, changes)
        except BudgetError as error:
            assert error.tier == "host" and host < 16 << 20
            host += 1 << 18


@pytest.mark.heavy
@pytest.mark.parametrize("name", KINDS)
def test_one_hash_and_as_many_graphs_as_plain(name: str, tmp_path: Path) -> None:
    graphs = plain_graphs(name)
    sha, found, stats = trained(name, {})
    assert found == graphs and sha != trained(name, {"compile": "off"})[0]
    model_data, peak = sum(stats["tags"]["device"].values()), stats["non_model_peak"]
    least = least_of(name)
    places: dict[str, dict[str, Any]] = {
        "half": {"device": {"memory": max(least, peak + model_data // 2)}},
        "quarter": {"device": {"memory": max(least, peak + model_data // 4)}},
        "least": {"device": {"memory": least}},
    }
    for place, changes in places.items():
        there, found, stats = trained(name, changes)
        assert (there, found) == (sha, graphs), place
        assert not stats["diverged"], place
        assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"], place
    there, found, stats = trained_beside_ssd(name, peak + model_data // 2, tmp_path)
    assert (there, found) == (sha, graphs) and stats["moved_bytes"]["ssd_write"]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_with_checkpoints(name: str) -> None:
    sha, graphs, _ = trained(name, {}, checkpoint=True)
    there, found, stats = trained(name, {"device": {"memory": "least"}}, checkpoint=True)
    assert (there, found) == (sha, graphs) and not stats["diverged"]


@pytest.mark.heavy
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_no_more_memory_than_planned(name: str, checkpoint: bool) -> None:
    """From the first pass on: what compiled code takes nobody has seen by then."""
    model = _built(name)
    if checkpoint:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    device = {"memory": "least"}
    changes = {
        "precision": "fp32",
        "chunk_size": "16KiB",
        "compile": "blocks",
        "poison": False,
        "device": device,
    }
    engine = ebbtide.initialize(model, config_of(**changes))
    try:
        for batch in _batches(name):

            def passes(batch: dict[str, torch.Tensor] = batch) -> None:
                engine.backward(engine(**batch).loss)

            taken, plan = most_allocated(passes, engine.device), engine._session.cursor.plan
            assert plan is not None and taken <= plan.record.peak - plan.record.fixed
            engine.step()
    finally:
        engine.close()


def of_a_rank(name: str, changes: dict[str, Any]) -> tuple[str, int]:
    sha, graphs, _ = trained(name, changes)
    return sha, graphs


@pytest.mark.heavy
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks(name: str) -> None:
    _, _, stats = trained(name, {})
    changes = {"experts": "gathered"}
    expected = group_of(2).run(of_a_rank, name, changes)
    assert expected[0] == expected[1]
    half = stats["non_model_peak"] + sum(stats["tags"]["device"].values()) // 2
    tight = {"device": {"memory": half}}
    assert group_of(2).run(of_a_rank, name, changes | tight) == expected
