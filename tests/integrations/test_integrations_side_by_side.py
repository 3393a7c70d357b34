"""Each trainer of Hugging Face's and TRL's beside the stock one, in full and with an adapter, on one rank and on two.

A budget holds activations and a quarter of model data; updates are clipped, and have windows of three batches and a
short last one; each is evaluated, and the best model is loaded at the end. What is resumed writes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from datasets import load_from_disk

from ebbtide.integrations.transformers import Trainer
from ebbtide.integrations.trl import DPOTrainer, RewardTrainer, SFTTrainer
from group import as_torchrun_says, group_of
from sampling import some
from test_integrations_transformers import Logs, Rows, arguments, build, close_to
from test_integrations_trl import COMMON, adapter, causal, judge, preferences, texts, tokenizer

ROWS = 28
"""Of one rank seven batches of four, in windows of three, three and one; of two ranks four each, three and one."""
WATCHED: dict[str, Any] = {
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "per_device_eval_batch_size": 4,
}

# -- what is trained ----------------------------------------------------------------------------------

Given = dict[str, Any]
"""Arguments of a trainer."""


def by_trainer(folder: Path, lora: bool) -> Given:
    torch.manual_seed(0)
    model = peft.get_peft_model(build(), adapter()) if lora else build()
    args = arguments(folder, **WATCHED)
    return {"model": model, "args": args, "train_dataset": Rows(ROWS), "eval_dataset": Rows(8, 1000)}


def by_trl(config: Any, folder: Path, lora: bool, **more: Any) -> Given:
    torch.manual_seed(0)
    given = {"peft_config": adapter()} if lora else {}
    args = config(output_dir=str(folder), max_length=32, **COMMON | WATCHED | more)
    return {"model": causal(), "args": args, "processing_class": tokenizer(), **given}


def by_sft(folder: Path, lora: bool) -> Given:
    data = {"train_dataset": texts(ROWS), "eval_dataset": texts(8)}
    return by_trl(trl.SFTConfig, folder, lora) | data


def by_dpo(folder: Path, lora: bool, before: bool = False) -> Given:
    """With an adapter, the reference is the model without it. `before`: the reference is asked before training."""
    given = by_trl(trl.DPOConfig, folder, lora, precompute_ref_log_probs=before)
    if before:  # ranks find there what the first has been told
        data = {f"{part}_dataset": load_from_disk(folder / part) for part in ("train", "eval")}
    else:
        data = {"train_dataset": preferences(ROWS), "eval_dataset": preferences(8)}
    return given | data | ({} if lora else {"ref_model": causal(1)})


def by_reward(folder: Path, lora: bool) -> Given:
    given = by_trl(trl.RewardConfig, folder, False)
    data = {"train_dataset": preferences(ROWS), "eval_dataset": preferences(8)}
    scored = {"peft_config": adapter(task_type="SEQ_CLS")} if lora else {}
    return given | data | scored | {"model": judge()}


@dataclass(frozen=True)
class Kind:
    given: Callable[[Path, bool], Given]
    ours: Any
    stock: Any


KINDS = {
    "trainer": Kind(by_trainer, Trainer, transformers.Trainer),
    "sft": Kind(by_sft, SFTTrainer, trl.SFTTrainer),
    "dpo": Kind(by_dpo, DPOTrainer, trl.DPOTrainer),
    "dpo, asked before": Kind(partial(by_dpo, before=True), DPOTrainer, trl.DPOTrainer),
    "reward": Kind(by_reward, RewardTrainer, trl.RewardTrainer),
}


def store(folder: Path) -> None:
    preferences(ROWS).save_to_disk(folder / "train")
    preferences(8).save_to_disk(folder / "eval")


# -- how ----------------------------------------------------------------------------------------------

ROOM = {"device": {"kind": "cpu", "memory": "1GB"}, "host": {"memory": 0}, "chunk_size": "32KiB"}
EXCHANGED = 2 * 32 * 1024
"""Two chunks, which ranks hold of what they exchange, beside activations and model data."""


@cache
def memory_of(name: str, lora: bool, folder: Path) -> int:
    """Activations and a quarter of model data, the reference's with it; as a run shows that has room for all."""
    store(folder)
    trainer = KINDS[name].ours(**KINDS[name].given(folder, lora), ebbtide=ROOM)
    trainer.args.max_steps = 2
    trainer.train()
    stats = [engine.stats() for engine in (trainer.engine, *trainer.references)]
    trainer.close()
    data = sum(sum(one["tags"]["device"].values()) for one in stats)
    return int(max(one["non_model_peak"] or 0 for one in stats) + data // 4)


def trained(name: str, lora: bool, folder: Path, memory: int | None, resume: str | None = None) -> Any:
    """With `memory` by ours. Gives a trainer."""
    kind = KINDS[name]
    given = kind.given(folder, lora)
    if memory is None:
        trainer = kind.stock(**given)
    else:
        budgets = {"device": {"kind": "cpu", "memory": memory}, "host": {"memory": "64MB"}}
        trainer = kind.ours(**given, ebbtide=ROOM | budgets)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def told(trainer: Any, memory: int | None) -> Any:
    """What is compared, of one rank: the log, with an evaluation of what was loaded at the end, and the best step."""
    trainer.evaluate()
    if memory is not None:
        stats = trainer.engine.stats()
        assert stats["peak_bytes"]["device"] <= memory
        assert stats["moved_bytes"]["host_to_device"] > 0
        trainer.close()
    return trainer.state.log_history, trainer.state.best_global_step


def on_ranks(name: str, lora: bool, folder: str, memory: int | None, resume: str | None) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with as_torchrun_says():
            return told(trained(name, lora, Path(folder), memory, resume), memory)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def run(
    ranks: int, name: str, lora: bool, folder: Path, memory: int | None, resume: Path | None = None
) -> list[Any]:
    """What each rank tells."""
    store(folder)
    given = (name, lora, str(folder), memory, None if resume is None else str(resume))
    if ranks > 1:
        return group_of(ranks).run(on_ranks, *given)
    return [told(trained(name, lora, folder, memory, given[-1]), memory)]


def bits(folder: Path) -> bytes:
    """Of the weights of the last checkpoint."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    (file,) = last.glob("*.safetensors")
    return file.read_bytes()


CASES = list(product(KINDS, (False, True), (1, 2)))


@pytest.mark.parametrize(("name", "lora", "ranks"), some(CASES, 4))
def test_it_trains_as_stock_does_and_goes_on_bit_for_bit(
    name: str, lora: bool, ranks: int, tmp_path: Path
) -> None:
    memory = memory_of(name, lora, tmp_path / "measured") + (EXCHANGED if ranks > 1 else 0)
    ours = run(ranks, name, lora, tmp_path / "ours", memory)
    stock = run(ranks, name, lora, tmp_path / "stock", None)
    for (mine, best), (expected, other) in zip(ours, stock, strict=True):
        close_to(Logs(mine), Logs(expected))
        assert best == other
    again = run(ranks, name, lora, tmp_path / "again", memory, tmp_path / "ours" / "checkpoint-2")
    assert bits(tmp_path / "again") == bits(tmp_path / "ours")
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
    for (later, _), (whole, _) in zip(again, ours, strict=True):
        assert [{key: row.get(key) for key in kept} for row in later] == [
            {key: row.get(key) for key in kept} for row in whole
        ]
