"""Exported weights are what `from_pretrained` takes: the module's own, bit for bit, from wherever they were."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import ebbtide
import zoo
from ebbtide.checkpoint import export, values
from ebbtide.errors import ConfigError, DiskError
from group import group_of
from harness import batch_of, config_of

HUGGING_FACE = [name for name in zoo.ZOO if name != "attention"]


def trained(name: str, **changes: Any) -> ebbtide.Engine:
    engine = ebbtide.initialize(zoo.build(name), config_of(**changes))
    for number in range(2):
        engine.backward(engine(**batch_of(name, number, torch.bfloat16, "cpu")).loss)
        engine.step()
    return engine


def resident(engine: ebbtide.Engine) -> dict[str, torch.Tensor]:
    """What the module computes with."""
    with engine.resident():
        found = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    return found | {name: value.clone() for name, value in values.persistent_buffers(engine.module)}


def compare(
    folder: Path, module: torch.nn.Module, expected: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    loaded = type(module).from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    there = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for name, value in expected.items():
        assert torch.equal(there[name], value), name


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_from_pretrained_takes_what_the_module_had(name: str, tmp_path: Path) -> None:
    engine = trained(name, device={"memory": 2_400_000}, host={"memory": "64MB"})
    expected = resident(engine)
    engine.export(tmp_path / "out")
    compare(tmp_path / "out", engine.module, expected, torch.bfloat16)
    assert not list((tmp_path / "out").glob(".*"))
    # Training goes on.
    engine.backward(engine(**batch_of(name, 2, torch.bfloat16, "cpu")).loss)
    engine.step()
    engine.close()


def test_masters_in_full_precision(tmp_path: Path) -> None:
    engine = trained("gpt2")
    engine.export(tmp_path, torch.float32)
    found, state = load_file(tmp_path / "model.safetensors"), engine.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in found.items())
    again = ebbtide.initialize(zoo.build("gpt2", seed=5), config_of(), weights=tmp_path)
    assert again.weights_sha256() == engine.weights_sha256()
    engine.close()
    again.close()


def test_several_files_then_fewer(tmp_path: Path) -> None:
    engine = trained("t5")
    expected = resident(engine)
    for largest, count in ((60_000, 5), (10**9, 1), (200_000, 2)):
        export.export(engine._session, tmp_path, None, largest)
        files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert len(files) >= count and (len(files) == 1) == (largest == 10**9)
        index = tmp_path / "model.safetensors.index.json"
        if len(files) == 1:
            assert not index.exists()
        else:
            assert sorted(set(json.loads(index.read_text())["weight_map"].values())) == files
            assert all(os.path.getsize(tmp_path / name) < largest + 70_000 for name in files)
        compare(tmp_path, engine.module, expected, torch.bfloat16)
    engine.close()


def test_other_files_of_the_user_stay(tmp_path: Path) -> None:
    """Whatever they are called: only what an export before has written goes."""
    theirs = [
        "model_ema.safetensors",
        "model-best.safetensors",
        "model.fp16.safetensors",
        "models.safetensors",
    ]
    for name in (*theirs, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).write_bytes(b"somebody's")
    engine = trained("gpt2")
    engine.export(tmp_path)
    engine.close()
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == sorted(
        [*theirs, "model.safetensors"]
    )
    assert all((tmp_path / name).read_bytes() == b"somebody's" for name in theirs)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    engine = trained("gpt2", device={"memory": 1_700_000}, host={"memory": "64MB"})
    engine.export(folder)
    found = resident(engine)
    engine.close()
    dist.barrier()
    return {name: value.float() for name, value in found.items()}


def test_ranks_export_together(tmp_path: Path) -> None:
    expected = group_of(2).run(exported, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    for rank in expected:
        assert all(torch.equal(value.float(), rank[name]) for name, value in loaded.items())


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained("gpt2")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        engine.export(tmp_path / "file")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def said_by_the_library(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    engine.export(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    engine.backward(engine(**batch_of("gpt2", 3, torch.bfloat16, "cpu")).loss)
    engine.step()
    for fails in (full, said_by_the_library):
        monkeypatch.setattr("safetensors.serialize_file", fails)
        with pytest.raises(DiskError, match="No space left"):
            engine.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert engine.weights_sha256()
    engine.close()


class SharedNorm(nn.Module):
    """One module under two names, buffers and all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.again = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(self.layer(x))).square().mean()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_module_of_two_names_has_its_values_under_both(tmp_path: Path) -> None:
    engine, plain = ebbtide.initialize(SharedNorm(), config_of(precision="fp32")), SharedNorm()
    engine.backward(engine(torch.randn(4, 8)))
    engine.step()
    found = engine.state_dict()
    plain.load_state_dict(found)
    assert equal(plain.state_dict(), found)
    engine.load_state_dict(SharedNorm().state_dict())
    assert equal(SharedNorm().state_dict(), engine.state_dict())
    save_file({name: value.clone() for name, value in found.items()}, tmp_path / "model.safetensors")
    engine.load_weights(tmp_path)
    assert equal(found, engine.state_dict())
    engine.export(tmp_path / "exported")
    engine.load_state_dict(SharedNorm().state_dict())
    engine.load_weights(tmp_path / "exported")
    assert equal(found, engine.state_dict())
    engine.close()
