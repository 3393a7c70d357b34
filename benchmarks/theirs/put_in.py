"""How ebbtide gets into each framework's tests: their Trainer, Accelerator or strategy is ours, in the least budget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

BUDGET = {"device": {"kind": "cpu", "memory": "least"}}
touched: list[Any] = []
"""The engines of the test that runs."""


def close() -> None:
    """As a script ends: their tests look for threads that are left."""
    for engine in touched:
        engine.close()


def note() -> None:
    """Each engine that is made is in `touched`."""
    import ebbtide

    made = ebbtide.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        touched.append(made(*args, **kwargs))
        return touched[-1]

    ebbtide.initialize = initialize


# -- Lightning -------------------------------------------------------------------------------------------


def prepare_lightning() -> dict[str, Callable[[], Any]]:
    """Their tests are of a version that knows a newer torch by name."""
    import lightning.pytorch.utilities.imports as imports
    from lightning.pytorch.demos import boring_classes

    imports._TORCH_GREATER_EQUAL_2_11 = True

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    boring_classes.BoringModel.configure_optimizers = configure_optimizers
    return {}


def put_in_lightning() -> None:
    """Where the Trainer would choose a strategy for one device, and precision is fp32."""
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector as Connector

    from ebbtide.integrations.lightning import EbbtideStrategy

    note()
    chosen = Connector._choose_strategy

    def choose(self: Any) -> Any:
        found = chosen(self)
        plain = type(found) is SingleDeviceStrategy and self._precision_flag in ("32-true", None)
        if not plain or self._precision_plugin_flag is not None or found.root_device.type != "cpu":
            return found
        return EbbtideStrategy(BUDGET)

    Connector._choose_strategy = choose


# -- Accelerate ------------------------------------------------------------------------------------------


def prepare_accelerate() -> dict[str, Callable[[], Any]]:
    """What the mains of its scripts call on one process, each as a test."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.test_utils.scripts import test_script, test_sync

    torch.optim.SGD = torch.optim.AdamW
    script = (
        "process_execution_check", "init_state_check", "rng_sync_check", "dl_preparation_check",
        "central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler",
        "check_seedable_sampler_in_batch_sampler_shard", "check_seedable_sampler_with_data_seed",
        "test_split_between_processes_list", "test_split_between_processes_nested_dict",
        "test_split_between_processes_tensor", "test_split_between_processes_evenly", "test_trigger",
        "test_reinstantiated_state",
    )  # fmt: skip
    found: dict[str, Callable[[], Any]] = {name: getattr(test_script, name) for name in script}
    for seedable in (False, True):
        found[f"training_check[{seedable}]"] = partial(
            test_script.training_check, use_seedable_sampler=seedable
        )
    found["test_noop_sync"] = lambda: test_sync.test_noop_sync(test_sync.Accelerator())
    found["test_dataloader_break"] = test_sync.test_dataloader_break
    for flags in ((False, False), (True, False), (False, True), (True, True)):
        for name in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler"):
            found[f"{name}{list(flags)}"] = partial(getattr(test_sync, name), *flags)

    def begun(function: Callable[[], Any]) -> None:
        """As a process of its own would be, when its main has made an Accelerator."""
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        Accelerator()
        function()

    return {name: partial(begun, function) for name, function in found.items()}


def put_in_accelerate() -> None:
    from accelerate.test_utils.scripts import test_script, test_sync

    from ebbtide.integrations.accelerate import Accelerator

    note()
    for module in (test_script, test_sync):
        module.Accelerator = partial(Accelerator, ebbtide=BUDGET)


# -- transformers ----------------------------------------------------------------------------------------


def prepare_transformers() -> dict[str, Callable[[], Any]]:
    return {}


def put_in_transformers() -> None:
    """Before their files import it."""
    from transformers import trainer, trainer_seq2seq

    from ebbtide.integrations.transformers import Seq2SeqTrainer, Trainer

    note()

    class Ours(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, ebbtide=BUDGET, **kwargs)

    class OursSeq2Seq(Seq2SeqTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, ebbtide=BUDGET, **kwargs)

    # transformers replaces its own module while it is imported: theirs import from the last one.
    front: Any = sys.modules["transformers"]
    front.Trainer = trainer.Trainer = Ours
    front.Seq2SeqTrainer = trainer_seq2seq.Seq2SeqTrainer = OursSeq2Seq


PREPARE = {
    "lightning": prepare_lightning,
    "accelerate": prepare_accelerate,
    "transformers": prepare_transformers,
}
PUT_IN = {
    "lightning": put_in_lightning,
    "accelerate": put_in_accelerate,
    "transformers": put_in_transformers,
}
