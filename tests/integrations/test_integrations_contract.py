"""What the adapters rely on in other projects, by name: where a test fails, the upstream line moved that it names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
import trl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy, launchers
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from ebbtide.errors import UnsupportedError
from ebbtide.integrations import _accelerate, _lightning, _trl, _versions
from ebbtide.integrations import _transformers as private
from ebbtide.integrations._lightning_ranks import LightningRanks
from ebbtide.integrations._models import mark_prepared
from ebbtide.integrations.accelerate import Accelerator as EbbtideAccelerator
from ebbtide.integrations.lightning import EbbtideStrategy


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
    accelerator = accelerate.Accelerator(cpu=True)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    mark_prepared(module, optimizer)
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


@pytest.mark.parametrize(
    "module", [_accelerate, _lightning, _trl, private], ids=lambda one: one.__name__[20:]
)
def test_a_version_that_is_too_old_is_refused_and_a_newer_one_warned_of(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = module.__name__.rpartition("._")[2]
    _versions.require(package, module.OLDEST, module.NEWEST)  # the one that is installed
    oldest = f"{module.OLDEST[0]}.{module.OLDEST[1]}"
    monkeypatch.setattr(_versions, "version", lambda name: "0.9.1")
    with pytest.raises(UnsupportedError, match=rf"{oldest} or newer, found 0\.9\.1"):
        _versions.require(package, module.OLDEST, module.NEWEST)
    monkeypatch.setattr(_versions, "version", lambda name: "99.1.0")
    with pytest.warns(UserWarning, match="newer"):
        _versions.require(package, module.OLDEST, module.NEWEST)


def replaced(ours: type, stock: type) -> set[str]:
    """Methods and properties of a stock class that one of ours has, too."""
    return {name for name in vars(ours) if name in dir(stock) and not name.startswith(("__", "_abc_"))}


def test_accelerator_has_what_the_adapter_replaces_and_reads() -> None:
    assert replaced(EbbtideAccelerator, accelerate.Accelerator) == set(_accelerate.OVERRIDDEN)
    stock = accelerate.Accelerator(cpu=True)
    source = inspect.getsource(accelerate.utils.launch)
    for name in (_accelerate.PRECISION, *(name for name, *_ in _accelerate.LAUNCHED)):
        assert f'"{name}"' in source, f"accelerate launch does not set {name}"
    for name in _accelerate.SEEN:
        assert isinstance(getattr(stock, name), list | dict), f"Accelerator.{name} is gone"


def test_automatic_names_of_states_end_in_a_number(tmp_path: Path) -> None:
    configuration = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    stock = accelerate.Accelerator(cpu=True, project_config=configuration)
    folders = [Path(stock.save_state()) for _ in range(2)]
    assert folders[1].parent == tmp_path / _accelerate.CHECKPOINTS
    assert [folder.name.rpartition("_")[2] for folder in folders] == ["0", "1"]


def test_lightning_has_what_the_strategy_replaces_and_calls() -> None:
    known = set(_lightning.OVERRIDDEN)
    assert replaced(EbbtideStrategy, ParallelStrategy) | replaced(LightningRanks, ParallelStrategy) == known
    for name in _lightning.PRECISION:
        assert callable(getattr(Precision, name, None)), f"Precision.{name} is gone"
    assert hasattr(launchers, _lightning.LAUNCHER)
    assert f"self.{_lightning.LAUNCHED_BY}" in inspect.getsource(Strategy.launcher.fget)
    source = inspect.getsource(_AcceleratorConnector)
    for name in _lightning.SET:
        assert f'hasattr(self.strategy, "{name}")' in source, f"the Trainer does not look for {name}"


def test_trl_has_what_is_replaced_and_looked_at(tmp_path: Path) -> None:
    for trainer, names in _trl.OVERRIDDEN.items():
        for name in names:
            assert callable(getattr(getattr(trl, trainer), name, None)), f"trl.{trainer}.{name} is gone"
    for config, names in _trl.ARGUMENTS.items():
        made = getattr(trl, config)(str(tmp_path), use_cpu=True, bf16=False)
        for name in names:
            assert hasattr(made, name), f"trl.{config}.{name} is gone"


def test_ebbtide_alone_imports_no_framework() -> None:
    script = (
        "import sys, ebbtide, ebbtide.engine\n"
        "found = {'transformers', 'accelerate', 'trl', 'peft', 'lightning'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
