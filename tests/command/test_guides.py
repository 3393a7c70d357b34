"""Every piece of Python in the guides runs on a small model; sizes, folders and devices are this machine's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import ebbtide
import zoo
from group import group_of
from test_documents import _fences
from test_reference import ROOT

ROWS = 4
Names = dict[str, Any]


def _smaller(text: str, folder: Path) -> str:
    """What is larger in the document than here."""
    text = re.sub(r'"\d+GB"', '"512MiB"', text)
    text = re.sub(r'"/disk(\d)/ebbtide"', lambda found: repr(str(folder / f"disk{found[1]}")), text)
    text = text.replace(
        "n_layer=48, n_embd=1600, n_head=25", "n_layer=2, n_embd=64, n_head=4, vocab_size=512"
    )
    return text.replace('("run", bf16=True', f'("run", use_cpu={not torch.cuda.is_available()}, bf16=True')


def _batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    return [zoo.ZOO["gpt2"].batch(step) for step in range(count)]


def _rows() -> list[dict[str, torch.Tensor]]:
    return [{name: value[0] for name, value in batch.items()} for batch in _batches(ROWS)]


def _plain() -> Names:
    """What a script has before it comes to the engine."""
    return {
        "torch": torch,
        "ebbtide": ebbtide,
        "GPT2LMHeadModel": GPT2LMHeadModel,
        "GPT2Config": GPT2Config,
        "model": zoo.build("gpt2"),
        "config": {},
        "batch": _batches()[0],
        "loader": _batches(),
        "data": _rows(),
    }


def _with_engine() -> Names:
    names = _plain()
    engine = names["engine"] = ebbtide.initialize(names["model"], {})
    return names | {
        "resume": False,
        "scheduler": torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1),
        "validation": _batches(1),
        "prompt": _batches()[0]["input_ids"][:1, :4],
        "evaluate": lambda model: model(**_batches()[0]),
    }


def _of_experts() -> Names:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=512)
    )
    return _plain() | {"model": model, "engine": ebbtide.initialize(model, {})}


def _of_own_experts() -> Names:
    return {"torch": torch, "ebbtide": ebbtide, "MyExperts": type("MyExperts", (nn.Module,), {})}


class _Tracker:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


def _with_tracker() -> Names:
    return _plain() | {"tracker": _Tracker()}


def _for_accelerate() -> Names:
    names = _plain()
    optimizer = torch.optim.AdamW(names["model"].parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    loader = torch.utils.data.DataLoader(names["data"], batch_size=2)
    return names | {"optimizer": optimizer, "schedule": schedule, "loader": loader}


def _steps(count: int) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        assert names["engine"].steps == count

    return check


def _logged_once_a_pass(names: Names) -> None:
    engine = ebbtide.initialize(names["model"], {"device": {"memory": "half"}})
    for batch in names["loader"]:
        names["model"](**batch).loss.backward()
        engine.step()
    assert len(names["tracker"].rows) == 2
    engine.close()


def _anything(names: Names) -> None:
    """That it runs is the promise."""


def _releases(names: Names) -> None:
    assert names["engine"].closed and type(names["model"]) is GPT2LMHeadModel


def _holds_least(names: Names) -> None:
    assert 0 < names["found"].least <= names["found"].half <= names["found"].whole


def _compiles_blocks(names: Names) -> None:
    assert names["engine"]._session.interceptor.compiles


def _kept(names: Names) -> None:
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 and "evaluated" in lines[2] and Path("run/run.json").exists()


def _trained(names: Names) -> None:
    assert names["trainer"].state.global_step > 0 and Path("trained").is_dir()


GUIDES: dict[tuple[str, int], tuple[Callable[[], Names], Callable[[Names], None]]] = {
    ("your-script.md", 0): (_plain, _steps(2)),
    ("guides/activations.md", 0): (_plain, _steps(2)),
    ("guides/activations.md", 1): (_plain, _anything),
    ("guides/budgets.md", 0): (_with_engine, _holds_least),
    ("guides/checkpoints.md", 0): (_with_engine, _steps(2)),
    ("guides/evaluation-and-generation.md", 0): (_with_engine, _anything),
    ("guides/experts.md", 0): (_of_experts, _steps(2)),
    ("guides/experts.md", 1): (_of_own_experts, _anything),
    ("guides/imagined-passes.md", 0): (_with_tracker, _logged_once_a_pass),
    ("guides/large-models.md", 0): (_plain, _steps(2)),
    ("guides/report.md", 0): (_with_engine, _kept),
    ("guides/ssd.md", 0): (_plain, _steps(2)),
    ("guides/training-loop.md", 0): (_with_engine, _steps(2)),
    ("guides/training-loop.md", 1): (_plain, _compiles_blocks),
    ("guides/updates.md", 0): (_plain, _steps(2)),
    ("guides/values.md", 0): (_with_engine, _releases),
    ("guides/values.md", 1): (_with_engine, _steps(2)),
    ("frameworks.md", 0): (_plain, _trained),
    ("frameworks.md", 2): (_for_accelerate, _anything),
    ("frameworks.md", 3): (_plain, _anything),
}
ON_RANKS = {
    ("guides/many-ranks.md", 0),
    ("guides/other-parallelism.md", 0),
    ("guides/other-parallelism.md", 1),
}
OF_TRL = {("frameworks.md", 1)}
"""Its data set and tokenizer are in tests/integrations, where the same calls train."""


def _places() -> Iterator[tuple[str, int]]:
    for document in sorted((ROOT / "docs").rglob("*.md")):
        for number in range(len(_fences(document, "python"))):
            yield str(document.relative_to(ROOT / "docs")), number


def test_every_snippet_is_run_somewhere() -> None:
    elsewhere = {(name, number) for name, number in _places() if name in ("index.md", "recipes.md")}
    assert set(_places()) == {*GUIDES, *ON_RANKS, *OF_TRL, *elsewhere}


@pytest.mark.parametrize(("document", "number"), GUIDES, ids=lambda value: str(value))
def test_a_snippet_runs(document: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, check = GUIDES[document, number]
    if document.startswith("frameworks"):
        for needed in ("accelerate", "lightning"):
            pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    for disk in ("disk0", "disk1"):
        (tmp_path / disk).mkdir()
    text = _smaller(_fences(ROOT / "docs" / document, "python")[number], tmp_path)
    names = make()
    try:
        exec(compile(text, f"docs/{document}", "exec"), names)
        check(names)
    finally:
        if isinstance(names.get("engine"), ebbtide.Engine):
            names["engine"].close()


def _on_a_rank(number: int, text: str) -> int:
    """In a process of four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from ebbtide.pipelining import Stage

    torch.manual_seed(0)
    names = _plain() | {
        "init_device_mesh": init_device_mesh,
        "parallelize_module": parallelize_module,
        "Schedule1F1B": Schedule1F1B,
        "Stage": Stage,
        "loss_fn": nn.functional.mse_loss,
    }
    if number == 0:
        model = zoo.build("llama")
        layers = {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        names |= {"model": model, "plan": layers | {"model.layers.*.mlp.down_proj": RowwiseParallel()}}
        names["loader"] = [zoo.ZOO["llama"].batch(step) for step in range(2)]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        names |= {"mesh": mesh, "layers": nn.Linear(16, 16), "num_stages": 2}
        names["stage_index"] = mesh["pp"].get_local_rank()
        names["example_input"] = names["example_output"] = torch.zeros(1, 16)
        names["config"] = {"precision": "fp32"}
        names |= {"batch": torch.ones(8, 16), "target": torch.zeros(8, 16)}
    exec(compile(text, "docs/guides/other-parallelism.md", "exec"), names)
    steps = names["engine"].steps
    names["engine"].close()
    return steps


def _shares_chunks(text: str, folder: str) -> int:
    """In a process of two."""
    names = _plain() | {"data": _rows() * 8}
    exec(compile(text.replace('"run"', repr(folder)), "docs/guides/many-ranks.md", "exec"), names)
    steps = names["engine"].steps
    names["engine"].close()
    return steps


def test_the_snippet_of_many_ranks_runs(tmp_path: Path) -> None:
    text = _smaller(_fences(ROOT / "docs" / "guides" / "many-ranks.md", "python")[0], tmp_path)
    assert group_of(2).run(_shares_chunks, text, str(tmp_path / "run")) == [2, 2]
    assert any((tmp_path / "run").iterdir())


@pytest.mark.parametrize("number", [0, 1])
def test_a_snippet_for_several_processes_runs(number: int, tmp_path: Path) -> None:
    text = _fences(ROOT / "docs" / "guides" / "other-parallelism.md", "python")[number]
    text = text.replace('"cuda", (4, 2)', '"cpu", (2, 2)')
    assert group_of(4).run(_on_a_rank, number, text) == [2 - number] * 4
