"""Models by names that say their shape: the sizes are real, mistakes are named, and asking costs nothing."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest
import torch

import ebbtide
from ebbtide.errors import ConfigError
from ebbtide.models import PRESETS, Batches, ModelSpec, build_model, find_model
from ebbtide.models.names import ANGEL_GPT, NAMES, PATRICKSTAR
from ebbtide.models.presets import MARK
from ebbtide.models.spec import spec_of

TEXT = torch.arange(20_000).remainder(251).to(torch.uint8)


def gpt_size(layers: int, h: int, ffn: int, vocab: int, positions: int) -> int:
    layer = 4 * h * h + 4 * h + 2 * h * ffn + ffn + h + 4 * h
    return (vocab + positions) * h + layers * layer + 2 * h


def t5_size(layers: int, h: int, heads: int, ffn: int, vocab: int, kv: int, experts: int = 0) -> int:
    attention, dense = 4 * h * heads * kv, 2 * h * ffn
    sparse = (layers // 2) * (experts * (dense + h) - dense) if experts else 0
    stacks = layers * (3 * attention + 2 * dense + 5 * h) + 2 * (32 * heads + h)
    return vocab * h + stacks + 2 * sparse


@pytest.mark.parametrize("size", list(PATRICKSTAR))
def test_patrickstar_sizes(size: str) -> None:
    layers, width = PATRICKSTAR[size]
    spec = find_model(f"gpt-{size}")
    closed = 12 * layers * width**2 + 13 * layers * width + (50_257 + 1024) * width + 2 * width
    assert spec.parameters == closed == gpt_size(layers, width, 4 * width, 50_257, 1024)
    assert spec.parameters == pytest.approx(float(size[:-1]) * 1e9, rel=0.16)
    assert (spec.layers, spec.context, spec.vocabulary, spec.experts) == (layers, 1024, 50_257, 0)
    assert spec.config.num_attention_heads == 16


@pytest.mark.parametrize("size", list(ANGEL_GPT))
def test_angel_gpt_sizes(size: str) -> None:
    layers, heads, width, ffn = ANGEL_GPT[size]
    spec = find_model(f"angel-gpt-{size}")
    assert spec.parameters == gpt_size(layers, width, ffn, 50_257, 2048)
    assert (spec.layers, spec.context, spec.config.num_attention_heads) == (layers, 2048, heads)


def test_angel_t5_sizes() -> None:
    assert find_model("angel-t5-1.4b").parameters == t5_size(16, 1024, 16, 16384, 32_128, 64)
    assert find_model("angel-t5-58b").parameters == t5_size(60, 4096, 64, 16384, 32_128, 64)
    moe = find_model("angel-t5-moe-1.2t")
    assert moe.parameters == t5_size(16, 1024, 16, 16384, 32_128, 64, 2304) == pytest.approx(1.2e12, rel=0.04)
    assert (moe.experts, moe.layers) == (2304, 16)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt:layers=3,hidden=64", gpt_size(3, 64, 256, 50_257, 1024)),
        ("gpt: layers = 78, hidden = 4096, heads = 16, ffn = 16384", gpt_size(78, 4096, 16384, 50_257, 1024)),
        (
            "gpt:layers=2,hidden=96,ffn=100,vocab=300,positions=64,heads=8",
            gpt_size(2, 96, 100, 300, 64),
        ),
        ("t5:layers=3,hidden=64,heads=4,ffn=128", t5_size(3, 64, 4, 128, 32_128, 16)),
        ("t5:layers=3,hidden=60,heads=8,kv=16,vocab=300", t5_size(3, 60, 8, 240, 300, 16)),
        (
            "t5:layers=5,hidden=64,heads=4,ffn=128,experts=6,vocab=300",
            t5_size(5, 64, 4, 128, 300, 16, 6),
        ),
        (
            "llama:layers=2,hidden=64,heads=4,ffn=96,kv_heads=2,vocab=300",
            2 * 300 * 64 + 2 * (3 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64,
        ),
        (
            "bert:layers=2,hidden=64,heads=4,ffn=96,vocab=300,positions=128",
            (300 + 128 + 2 + 2) * 64
            + 2 * (4 * 64 * 64 + 4 * 64 + 2 * 64 * 96 + 96 + 64 + 4 * 64)
            + 64 * 64
            + 64
            + 128
            + 300,
        ),
    ],
)
def test_spelled_models_have_the_size_they_say(name: str, expected: int) -> None:
    spec = find_model(name)
    module = spec.on_meta()
    assert spec.parameters == sum(p.numel() for p in module.parameters()) == expected
    assert module.training
    assert all(layer.p == 0.0 for layer in module.modules() if isinstance(layer, torch.nn.Dropout))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp:layers=2,hidden=64", "unknown family 'gtp'; did you mean 'gpt'?"),
        ("xyz:layers=2,hidden=64", "unknown family 'xyz'; expected one of gpt, t5, llama, bert"),
        ("gpt:layer=2,hidden=64", "unknown key 'layer'; did you mean 'layers'?"),
        ("gpt:experts=2", "unknown key 'experts'; expected layers, hidden, heads, ffn, vocab, positions"),
        ("gpt:layers=2", "hidden is missing, as in gpt:layers=24,hidden=1024"),
        ("gpt:", "layers is missing"),
        ("gpt:layers=two,hidden=64", "layers: expected a whole number from 1 to 10000, found 'two'"),
        ("gpt:layers,hidden=64", "layers: expected a whole number from 1 to 10000, found ''"),
        ("gpt:layers=0,hidden=64", "layers: expected a whole number from 1 to 10000, found '0'"),
        ("gpt:layers=-2,hidden=64", "layers: expected a whole number from 1 to 10000, found '-2'"),
        ("gpt:layers=2.5,hidden=64", "found '2.5'"),
        ("gpt:layers=2,hidden=99999999999999", "hidden: expected a whole number from 1 to 1000000, found"),
        ("gpt:layers=2,hidden=64,layers=3", "layers is given twice"),
        ("gpt:layers=2,hidden=100,heads=16", "hidden: expected a multiple of heads (16), found 100; the next"),
        ("gpt:layers=2,hidden=64,vocab=10", "vocab: expected a whole number from 257"),
        ("llama:layers=2,hidden=64,heads=8,kv_heads=3", "kv_heads: expected a divisor of heads (8), found 3"),
        ("llama:layers=2,hidden=24,heads=8", "even width of a head, found 3"),
        ("t5:layers=1,hidden=64,experts=4", "layers: every other layer has experts"),
        ("gpt-11b", "unknown model 'gpt-11b'; did you mean"),
        ("angel-gpt-1.8b", "unknown model 'angel-gpt-1.8b'; did you mean 'angel-gpt-1"),
        ("zzz", "gpt-1b to gpt-68b"),
    ],
)  # fmt: skip
def test_mistakes_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(name)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_every_name_is_found_and_has_no_dropout() -> None:
    for name in NAMES:
        config = find_model(name).config
        drops = {key: value for key, value in config.to_dict().items() if "drop" in key and value}
        assert drops in ({}, {"summary_first_dropout": 0.1})  # of a head that is not built


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt-1b", 7),
        ("bert-tiny", 2),
        ("llama-tiny", 9),
        ("t5-tiny", 5),
        ("vit-tiny", 1),
        ("angel-t5-58b", 3),
    ],
)
def test_the_same_model_with_other_layers(name: str, layers: int) -> None:
    spec = find_model(name)
    other = spec.with_layers(layers)
    assert other.layers == layers and spec.layers != layers
    assert other.with_layers(spec.layers).parameters == spec.parameters
    assert other.parameters != spec.parameters
    stacks = [child for child in other.on_meta().modules() if isinstance(child, torch.nn.ModuleList)]
    assert [len(stack) for stack in stacks if len(stack) == layers]
    with pytest.raises(ConfigError, match="cannot make it 0 layers deep"):
        spec.with_layers(0)


@pytest.mark.parametrize("layers", [1, 2, 5, 12])
def test_sparse_layers_keep_their_pattern(layers: int) -> None:
    spec = find_model("t5:layers=4,hidden=64,heads=4,ffn=128,experts=6").with_layers(layers)
    expected = t5_size(layers, 64, 4, 128, 32_128, 16, 6)
    assert spec.parameters == sum(p.numel() for p in spec.on_meta().parameters()) == expected


def test_kinds_of_layers_follow_their_number() -> None:
    spec = spec_of("qwen", {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4,
                            "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2})  # fmt: skip
    other = spec.with_layers(6)
    assert len(other.config.layer_types) == 6 == len(other.on_meta().model.layers)


@pytest.mark.parametrize("kind", ["switch", "mixtral"])
def test_experts_are_shared_out_and_routers_are_not(kind: str) -> None:
    if kind == "switch":
        spec = find_model("t5:layers=4,hidden=64,heads=4,ffn=128,experts=12")
    else:
        spec = spec_of("mixtral", {"model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 4,
                                   "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2,
                                   "num_local_experts": 12, "vocab_size": 300})  # fmt: skip
    share = spec.share_of_experts(5)
    assert (spec.experts, share.experts, share.share_of_experts(1)) == (12, 2, share)
    per_expert = (2 * 64 * 128 if kind == "switch" else 3 * 64 * 96) * (4 if kind == "switch" else 2)
    assert spec.parameters - share.parameters == 10 * per_expert
    assert share.parameters == sum(p.numel() for p in share.on_meta().parameters())
    assert spec.share_of_experts(100).experts == 1
    found = ebbtide.trace(share.on_meta(), share.example(2, 32), torch.bfloat16)
    assert found.note == ""
    with pytest.raises(ConfigError, match="1 rank or more, found 0"):
        spec.share_of_experts(0)
    with pytest.raises(ConfigError, match="to plan with, not to train"):
        share.build(0)
    assert find_model("gpt2-tiny").share_of_experts(8) == find_model("gpt2-tiny")


@pytest.mark.parametrize(
    "name", [*(n for n in PRESETS if n.endswith("-tiny")), "t5:layers=2,hidden=64,experts=4"]
)
def test_the_example_is_what_batches_give(name: str) -> None:
    spec = find_model(name)
    batches = Batches(spec, TEXT, batch=3, seq=33, seed=0)
    real, example = batches.at(0), spec.example(3, 33)
    assert list(real) == list(example)
    for key, value in example.items():
        assert value.is_meta
        assert (value.shape, value.dtype) == (real[key].shape, real[key].dtype)
    assert (real["labels"] is real.get("input_ids")) == (example["labels"] is example.get("input_ids"))
    assert spec.tokens(3, 33) == batches.tokens
    assert spec.example(3, 33, torch.bfloat16).keys() == real.keys()


def test_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--seq: 2000 is longer than the context of gpt-1b, 1024"):
        find_model("gpt-1b").example(1, 2000)
    find_model("angel-gpt-1.7b").check_length(2000)
    find_model("t5-tiny").check_length(1 << 20)


def test_a_meta_model_takes_nothing() -> None:
    spec = find_model("angel-gpt-175b")
    state, before = torch.get_rng_state(), _resident()
    module = spec.on_meta()
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers()))
    assert torch.equal(torch.get_rng_state(), state)
    assert _resident() - before < 200e6


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_small_spelled_model_learns() -> None:
    for name in (
        f"gpt:layers=1,hidden=32,heads=2,vocab={MARK + 1}",
        f"t5:layers=2,hidden=32,heads=2,experts=2,vocab={MARK + 1}",
    ):
        module, spec = build_model(name)
        loss = module(**Batches(spec, TEXT, 2, 32, 0).at(0)).loss
        loss.backward()
        assert torch.isfinite(loss)


def test_names_do_not_load_torch() -> None:
    code = "import sys, ebbtide; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


GOALS = [
    ("gpt:layers=32,hidden=4096,heads=32", 1, 5.0),
    ("llama:layers=32,hidden=4096,heads=32,ffn=11008", 1, 5.0),
    ("angel-gpt-175b", 1, 10.0),
    ("angel-t5-moe-1.2t", 128, 40.0),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "ranks", "seconds"), GOALS)
def test_the_largest_models_trace_in_seconds(name: str, ranks: int, seconds: float) -> None:
    spec: ModelSpec = find_model(name).share_of_experts(ranks)
    before, start = _resident(), time.perf_counter()
    found = ebbtide.trace(spec.on_meta(), spec.example(4, 1024), torch.bfloat16)
    assert found.note == "" and time.perf_counter() - start < seconds
    assert _resident() - before < 1 << 30
