"""Models by name and from files, and the batches they are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ebbtide.errors import ConfigError
from ebbtide.models import PRESETS, Batches, build_model, find_model
from ebbtide.models.batches import IGNORED
from ebbtide.models.presets import MARK
from ebbtide.models.spec import spec_of

TINY = [name for name in PRESETS if name.endswith("-tiny")]
TEXT = torch.frombuffer(bytearray(b"def tide(moon):\n    return moon.height * 2\n" * 200), dtype=torch.uint8)


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_are_alike_in_size(name: str) -> None:
    module, _ = build_model(name)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert 4.5e6 < count < 5.7e6
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(layer.p == 0.0 for layer in module.modules() if isinstance(layer, torch.nn.Dropout))


@pytest.mark.parametrize(("name", "expected"), [("124m", 124.4e6), ("350m", 354.8e6), ("1b", 1.112e9)])
def test_large_presets_have_the_stated_size(name: str, expected: float) -> None:
    with torch.device("meta"):
        module, spec = build_model(f"gpt2-{name}")
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == pytest.approx(expected, rel=0.005)
    assert (spec.vocabulary, spec.context) == (50_257, 1024)
    assert module.lm_head.weight is module.transformer.wte.weight


def test_seed_decides_the_weights() -> None:
    first, again, other = (build_model("gpt2-tiny", seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_building_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for name in TINY:
        build_model(name)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", TINY)
def test_batches_depend_on_seed_and_number_only(name: str) -> None:
    spec = find_model(name)
    one, two = (Batches(spec, TEXT, batch=3, seq=32, seed=5) for _ in range(2))
    one.at(0)
    torch.manual_seed(9)
    first, again = one.at(7), two.at(7)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    key = "pixel_values" if name == "vit-tiny" else "input_ids"
    assert not torch.equal(first[key], one.at(8)[key])
    assert not torch.equal(first[key], Batches(spec, TEXT, 3, 32, seed=6).at(7)[key])
    assert all(value.shape[0] == 3 for value in first.values())


def test_masked_labels_are_what_was_masked() -> None:
    batch = Batches(find_model("bert-tiny"), TEXT, batch=4, seq=40, seed=0).at(0)
    masked = batch["input_ids"] == MARK
    assert torch.equal(masked, batch["labels"] != IGNORED)
    assert masked.sum(dim=1).tolist() == [6] * 4


def test_second_half_follows_the_first() -> None:
    batch = Batches(find_model("t5-tiny"), TEXT, batch=2, seq=32, seed=0).at(0)
    joined = torch.cat([batch["input_ids"], batch["labels"]], dim=1)
    assert all(bytes(row) in bytes(TEXT.tolist()) for row in joined.tolist())


def test_images_are_of_several_classes() -> None:
    text = torch.randint(0, 256, (100_000,), generator=torch.Generator().manual_seed(0))
    text[:50_000] = torch.where(text[:50_000] < 100, 32, text[:50_000])
    batches = Batches(find_model("vit-tiny"), text.to(torch.uint8), batch=16, seq=128, seed=0)
    assert len(set(batches.at(0)["labels"].tolist())) > 1
    assert batches.at(0)["pixel_values"].abs().max() <= 1


def test_short_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="the data has 10 bytes; one sequence needs 32"):
        Batches(find_model("gpt2-tiny"), TEXT[:10], 1, 32, 0)


def _config(path: Path, **changes: object) -> str:
    fields = {key: value for key, value in (PRESETS["gpt2-tiny"] | changes).items() if value != "absent"}
    path.write_text(json.dumps(fields))
    return str(path)


def test_config_file_is_built_without_weights(tmp_path: Path) -> None:
    module, spec = build_model(_config(tmp_path / "any.json", n_layer=1, architectures="absent", n_embd=32))
    assert (spec.objective, type(module).__name__) == ("causal", "GPT2LMHeadModel")
    assert len(module.transformer.h) == 1


@pytest.mark.parametrize(
    ("kind", "objective"),
    [("bert", "masked"), ("roberta", "masked"), ("t5", "seq2seq"), ("bart", "seq2seq"), ("llama", "causal"),
     ("vit", "image"), ("qwen3", "causal")],
)  # fmt: skip
def test_model_type_decides_the_objective(kind: str, objective: str) -> None:
    assert spec_of(kind, {"model_type": kind, "vocab_size": 300}).objective == objective


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2-tinny", "unknown model 'gpt2-tinny'; did you mean 'gpt2-tiny'?"),
        ("zzz", "presets: gpt2-tiny"),
        ("no/such.json", "no such model config or folder"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not valid JSON"),
        ("[1]", "no 'model_type'"),
        ('{"model_type": "gpt3"}', "unknown model_type 'gpt3'; did you mean"),
        (
            '{"model_type": "gpt2", "n_embd": "wide"}',
            "not a valid gpt2 config: Validation error for field 'n_embd': "
            "TypeError: Field 'n_embd' expected int, got str (value: 'wide')",
        ),
        ('{"model_type": "gpt2", "vocab_size": 100}', "needs a vocabulary of 256 or more; it has 100"),
        (
            '{"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}',
            "has no objective here",
        ),
        ('{"model_type": "gpt2", "n_embd": 10, "n_head": 3}', "cannot build the model"),
    ],
)
def test_files_that_are_no_model_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        build_model(str(tmp_path / "config.json"))
    assert message in str(caught.value)


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with a config\.json; there is none"):
        find_model(str(tmp_path))
    _config(tmp_path / "config.json", n_layer=1, n_embd=32)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors files to start from"):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="cannot read the weights"):
        build_model(str(tmp_path))


def test_folder_with_weights_gives_them_back(tmp_path: Path) -> None:
    module, _ = build_model(_config(tmp_path / "small.json", n_layer=1, n_embd=32), seed=3)
    module.save_pretrained(tmp_path / "saved")
    loaded, _ = build_model(str(tmp_path / "saved"), seed=4)
    expected = module.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())
    weights = tmp_path / "saved" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    kept = load_file(weights)
    del kept["transformer.ln_f.weight"]
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing, the first is 'transformer\.ln_f\.weight'"):
        build_model(str(tmp_path / "saved"))
