"""What the adapters rely on in other projects, by name: where a test fails, the upstream line moved that it names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator

from ebbtide.errors import UnsupportedError
from ebbtide.integrations import _transformers as private

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", private.OVERRIDDEN)
def test_trainer_has_the_method_that_is_replaced(name: str) -> None:
    assert callable(getattr(transformers.Trainer, name, None)), f"transformers.Trainer.{name} is gone"


def test_trainer_takes_what_the_adapter_gives() -> None:
    taken = {
        "create_optimizer": ["self", "model"],
        "_save": ["self", "output_dir", "state_dict"],
        "_get_grad_norm": ["self", "model", "grad_norm"],
        "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
        "save_model": ["self", "output_dir", "_internal_call"],
    }
    for name, parameters in taken.items():
        assert list(inspect.signature(getattr(transformers.Trainer, name)).parameters) == parameters, name


def test_a_marked_object_is_left_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    private.mark_prepared(module, optimizer)
    assert accelerator.prepare(module, optimizer) == (module, optimizer)


def test_arguments_have_the_names_that_are_looked_at() -> None:
    args = transformers.TrainingArguments("x", use_cpu=True)
    for name in (
        "deepspeed",
        "fsdp",
        "torch_compile",
        "bf16_full_eval",
        "fp16_full_eval",
        "bf16",
        "fp16",
        "optim",
    ):
        assert hasattr(args, name), f"TrainingArguments.{name} is gone"
    assert args.optim in private.ADAMW or args.optim.value in private.ADAMW
    assert hasattr(args, private.GPUS)


def test_a_version_that_is_too_old_is_refused_and_a_newer_one_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "version", lambda name: "4.57.1")
    with pytest.raises(UnsupportedError, match=r"5\.0 or newer, found 4\.57\.1"):
        private.require_version()
    monkeypatch.setattr(private, "version", lambda name: "99.1.0")
    with pytest.warns(UserWarning, match="newer"):
        private.require_version()


def test_ebbtide_alone_imports_no_framework() -> None:
    script = (
        "import sys, ebbtide, ebbtide.engine\n"
        "found = {'transformers', 'accelerate', 'trl', 'peft', 'lightning'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_example_of_a_trainer_runs(tmp_path: Path) -> None:
    example = ROOT / "examples" / "finetune_with_trainer.py"
    assert len(example.read_text().splitlines()) <= 60
    flags = ["--cpu", "--steps", "2", "--length", "16", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, str(example), *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved in" in done.stdout and (tmp_path / "out" / "model.safetensors").exists()
