"""Starting from the meta device and from safetensors files: the same weights, never whole, bad input named."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, GPT2Model

import ebbtide
import zoo
from ebbtide.errors import BudgetError, ConfigError, EbbtideError, UnsupportedError

CONFIG: dict[str, Any] = {"precision": "fp32", "chunk_size": "64KiB", "poison": True}


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()  # an engine that a refused start left behind


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.ZOO[name].build()


def values_of(module: nn.Module, config: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    engine = ebbtide.initialize(module, config, **options)
    try:
        engine.check_integrity()
        return engine.state_dict()
    finally:
        engine.close()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


# -- the meta device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_meta_start_is_construction_on_the_cpu(name: str, precision: str) -> None:
    torch.manual_seed(7)
    reference = zoo.ZOO[name].build()
    after = torch.rand(3)
    buffers = {key: value.clone() for key, value in reference.named_buffers()}
    model = on_meta(name)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": 0.5}, {"params": parameters[3:]}]
    torch.manual_seed(7)
    engine = ebbtide.initialize(model, CONFIG | {"precision": precision}, groups)
    try:
        assert torch.equal(torch.rand(3), after)
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert_same(engine.state_dict(), reference.state_dict())
        for key, value in model.named_buffers():
            assert torch.equal(value, buffers[key].to(value.dtype)), key
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        engine.backward(engine(**zoo.cast(zoo.ZOO[name].batch(0), dtype)).loss)
        assert engine.step().updated
        engine.check_integrity()
    finally:
        engine.close()


@pytest.mark.parametrize("layout", ["chunk", "page", "tensor"])
def test_meta_start_under_a_tight_device_budget(layout: str) -> None:
    reference = zoo.build("gpt2", seed=3)
    config = CONFIG | {"layout": layout, "device": {"memory": 400_000}, "host": {"memory": "64MB"}}
    if layout == "tensor":
        del config["chunk_size"]
    model = on_meta("gpt2")
    torch.manual_seed(3)
    assert_same(values_of(model, config), reference.state_dict())


def test_frozen_and_unmanaged_parameters() -> None:
    reference = zoo.build("bert", seed=3)
    model = on_meta("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.0" not in name)
    torch.manual_seed(3)
    assert_same(values_of(model, CONFIG | {"unmanaged": ["*.bias"]}), reference.state_dict())


class Wrapped(nn.Module):
    """A Hugging Face model inside another, between modules with resets and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU())
        self.inner = GPT2Model(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2))
        self.after = nn.ModuleList(
            [nn.Bilinear(16, 8, 4), nn.GroupNorm(2, 4), nn.Embedding(9, 4, padding_idx=2)]
        )
        self.special = Special()


class Special(nn.Module):
    """Inits that leave meta tensors alone, and one that reads what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Parameter(torch.empty(40, 30))
        self.square = nn.Parameter(torch.empty(24, 20))
        self.scaled = nn.Parameter(torch.empty(20, 20))
        self.transposed = nn.Parameter(torch.empty(20, 30).t())
        self.register_buffer("mask", torch.empty(5, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.cut, std=2.0, a=-1.0, b=0.5)
        nn.init.orthogonal_(self.square)
        with torch.no_grad():
            self.scaled.normal_().mul_(0.5).add_(torch.arange(20) * torch.rand(20))
            self.mask.copy_(torch.ones(5, 5).triu())
        nn.init.kaiming_normal_(self.transposed)


def test_modules_around_a_pretrained_one() -> None:
    torch.manual_seed(5)
    reference = Wrapped()
    after = torch.rand(2)
    with torch.device("meta"):
        model = Wrapped()
    torch.manual_seed(5)
    found = values_of(model, CONFIG)
    assert torch.equal(torch.rand(2), after)
    assert_same(found, reference.state_dict())


def test_drawn_in_the_dtype_of_the_config() -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(5)
    reference = GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(5)
    found = values_of(model, {"precision": "bf16"})
    assert_same(found, {key: value.float() for key, value in reference.state_dict().items()})


class Memory(TorchDispatchMode):
    """Live bytes of real storages that operators make and that the back end does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}
        self.total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.live:
                    self.live[key] = weakref.ref(storage, lambda _, k=key, n=size: self._gone(k, n))
                    self.total += size
        self.peak = max(self.peak, self.total)
        return out

    def _gone(self, key: int, size: int) -> None:
        del self.live[key]
        self.total -= size


@pytest.mark.parametrize("source", ["random", "files"])
def test_never_whole(source: str, tmp_path: Path) -> None:
    """Beside the chunks there is one parameter, what its init needs, and a scratch of that size."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=12, n_head=4)
    if source == "files":
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    whole = sum(4 * p.numel() for p in model.parameters())
    largest = max(4 * p.numel() for p in model.parameters())
    engines = []
    with Memory() as memory:
        engines.append(ebbtide.initialize(model, CONFIG, weights=tmp_path if source == "files" else None))
        chunks = engines[0]._tiers.backend.held()
        slabs = sum(chunks.values())
    engines[0].close()
    assert slabs >= whole
    assert memory.peak - slabs <= 4 * largest < whole / 4


def test_refusals_name_module_and_tensor() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.gain = nn.Parameter(torch.ones(4))

    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4, 4).triu())

    class Applied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.apply(lambda m: None)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                nn.init.constant_(self.weight, 2.0)

    class Own(Looking):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(0))

    def encoder() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)

    def changed() -> nn.Module:
        model = BertModel(
            BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32)
        )
        model.adapter = nn.Linear(4, 4)
        return model

    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4).half())

    cases: list[tuple[Any, list[str]]] = [
        (Raw, ["gain", "Raw", "reset_parameters", "CPU"]),
        (Mask, ["mask", "Mask"]),
        (Applied, ["Applied", "apply"]),
        (Tied, ["embed.weight", "head.weight"]),
        (Looking, ["weight of Looking"]),
        (Own, ["Own", "reset_parameters()", "random numbers"]),
        (encoder, ["TransformerEncoder", "copies"]),
        (changed, ["adapter.weight", "BertModel"]),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), ["0.weight_ih_l0", "weak reference"]),
        (halves, ["0.weight", "float16"]),
    ]
    for build, words in cases:
        with torch.device("meta"):
            model = build()
        before, state = list(model.parameters()), torch.get_rng_state()
        with pytest.raises(UnsupportedError) as raised:
            ebbtide.initialize(model, CONFIG)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p is q and p.is_meta for p, q in zip(model.parameters(), before, strict=True))


def test_a_failed_start_leaves_the_module_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = zoo.build("llama", seed=4)
    model = on_meta("llama")
    shapes = [(p.shape, p.dtype, p.stride()) for p in model.parameters()]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with monkeypatch.context() as patch, pytest.raises(BudgetError):
        patch.setattr("ebbtide.runtime.parameters.unmanaged.Unmanaged.take_over", _out_of_memory)
        ebbtide.initialize(model, CONFIG)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert [(p.shape, p.dtype, p.stride()) for p in model.parameters()] == shapes
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(values_of(model, CONFIG), reference.state_dict())


def _out_of_memory(*_: Any) -> None:
    raise BudgetError("full", tier="host", short=1, advice="none")


# -- weight files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["100KB", "1GB"])
@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name != "attention"])
def test_weights_from_a_saved_folder(name: str, shard: str, tmp_path: Path) -> None:
    saved = zoo.build(name, seed=1)
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    state = torch.get_rng_state()
    assert_same(values_of(on_meta(name), CONFIG, weights=tmp_path), saved.state_dict())
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert_same(values_of(zoo.build(name, seed=2), CONFIG, weights=str(tmp_path)), saved.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_into_a_running_engine(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = zoo.build("attention", seed=1)
    save_file({k: v.to(dtype) for k, v in saved.state_dict().items()}, tmp_path / "only.safetensors")
    expected = {k: v.to(dtype).float() for k, v in saved.state_dict().items()}
    engine = ebbtide.initialize(zoo.build("attention", seed=2), CONFIG | {"precision": "bf16"})
    try:
        engine.backward(engine(**zoo.ZOO["attention"].batch(0)).loss)
        engine.step()
        engine.load_weights(tmp_path)
        assert_same(engine.state_dict(), expected)
        engine.check_integrity()
    finally:
        engine.close()
    assert_same(values_of(on_meta("attention"), CONFIG, weights=tmp_path), expected)


def test_a_model_whose_random_numbers_cannot_be_told_takes_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.gain = nn.Parameter(torch.ones(4))

    saved = Tied()
    save_file({"head.weight": saved.head.weight, "gain": saved.gain}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Tied()
    assert_same(values_of(model, CONFIG, weights=tmp_path), saved.state_dict())


def test_base_model_prefix_is_added_and_removed(tmp_path: Path) -> None:
    saved = zoo.build("gpt2", seed=1)
    saved.transformer.save_pretrained(tmp_path / "base")
    saved.save_pretrained(tmp_path / "head")
    old = load_file(tmp_path / "base" / "model.safetensors")
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a buffer of earlier versions
    save_file(old, tmp_path / "base" / "model.safetensors")
    assert_same(values_of(on_meta("gpt2"), CONFIG, weights=tmp_path / "base"), saved.state_dict())
    with torch.device("meta"):
        base = GPT2Model(saved.config)
    found = values_of(base, CONFIG, weights=tmp_path / "head")
    assert_same(found, saved.transformer.state_dict())


def _rewrite(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _index(folder: Path, change: Any) -> None:
    zoo.build("gpt2", seed=1).save_pretrained(folder, max_shard_size="100KB")
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    change(data["weight_map"])
    path.write_text(json.dumps(data))


NORM = "transformer.ln_f.weight"
BAD: dict[str, tuple[Any, list[str]]] = {
    "no folder": (shutil.rmtree, ["does not exist"]),
    "no file": (lambda f: (f / "model.safetensors").unlink(), ["no safetensors file"]),
    "unknown": (
        lambda f: _rewrite(f, lambda s: s.update({"transformer.ln_g.weight": s[NORM].clone()})),
        ["'transformer.ln_g.weight'", "did you mean 'transformer.ln_f.weight'"],
    ),
    "missing": (lambda f: _rewrite(f, lambda s: s.pop(NORM)), ["missing", f"{NORM!r}"]),
    "shape": (lambda f: _rewrite(f, lambda s: s.update({NORM: torch.ones(65)})), [NORM, "(65,)", "(64,)"]),
    "dtype": (
        lambda f: _rewrite(f, lambda s: s.update({NORM: torch.ones(64, dtype=torch.int64)})),
        [NORM, "I64", "float32"],
    ),
    "tied, but different": (
        lambda f: _rewrite(f, lambda s: s.update({"lm_head.weight": torch.ones(512, 64)})),
        ["lm_head.weight", "transformer.wte.weight", "differ"],
    ),
    "truncated": (lambda f: _truncate(f / "model.safetensors"), ["model.safetensors", "damaged"]),
    "no safetensors": (
        lambda f: (f / "model.safetensors").write_text("hello, this is text, not tensors"),
        ["model.safetensors", "damaged"],
    ),
    "bad index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        ["index.json", "damaged"],
    ),
    "shard missing": (
        lambda f: _index(f, lambda m: m.update({NORM: "model-9.safetensors"})),
        ["model-9.safetensors", "missing"],
    ),
    "shard without its key": (
        lambda f: _index(f, lambda m: m.update({NORM: min(m.values())})),
        [NORM, "index.json"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_refused_before_anything_changes(case: str, tmp_path: Path) -> None:
    zoo.build("gpt2", seed=1).save_pretrained(tmp_path)
    spoil, words = BAD[case]
    spoil(tmp_path)
    model = on_meta("gpt2")
    with pytest.raises(ConfigError) as raised:
        ebbtide.initialize(model, CONFIG, weights=tmp_path)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert all(p.is_meta for p in model.parameters())
    engine = ebbtide.initialize(zoo.build("gpt2", seed=2), CONFIG)
    try:
        before = engine.weights_sha256()
        with pytest.raises(EbbtideError):
            engine.load_weights(tmp_path)
        assert engine.weights_sha256() == before
    finally:
        engine.close()
