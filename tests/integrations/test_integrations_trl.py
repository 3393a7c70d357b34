"""TRL's trainers with the model, and its reference, in engines, beside the stock ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from ebbtide.errors import BudgetError, UnsupportedError
from ebbtide.integrations.transformers import Mixin
from ebbtide.integrations.trl import GRPOTrainer, SFTTrainer
from test_integrations_transformers import close_to

WORDS = (
    "the a of to and in is it you that he was for on are with as I his they be at one have this " * 2
).split()
SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 64}
SUM_OF_ONES = 1e-7
"""What rounding leaves of a loss that is a sum of advantages, which cancel."""
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    known = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def config(**more: Any) -> GPT2Config:
    return GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=1, eos_token_id=1, pad_token_id=0, **more)


def causal(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config())


def judge() -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(config(num_labels=1))


def words(number: int, count: int) -> str:
    drawn = torch.randint(0, len(WORDS), (count,), generator=torch.Generator().manual_seed(number))
    return " ".join(WORDS[place] for place in drawn)


def texts(count: int = 20) -> Dataset:
    return Dataset.from_list([{"text": words(n, 6 + n % 9)} for n in range(count)])


def preferences(count: int = 20) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": words(n, 4),
                "chosen": " " + words(100 + n, 3 + n % 4),
                "rejected": " " + words(200 + n, 5),
            }
            for n in range(count)
        ]
    )


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "bf16": False,
}
MEMORY = {"device": {"kind": "cpu", "memory": "least"}, "host": {"memory": "64MB"}, "chunk_size": "32KiB"}


def adapter(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True} | more
    )


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [text.count("the") + len(text) / 100 for text in completions]


def grpo(kind: Any, folder: Path, adapted: bool = False, **own: Any) -> Any:
    """Its reference is built from where the model was loaded."""
    causal(1).save_pretrained(folder / "model")
    own_ones = {
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.1,
    }
    args = trl.GRPOConfig(output_dir=str(folder), **COMMON | own_ones)
    prompts = Dataset.from_list([{"prompt": words(number, 4)} for number in range(8)])
    torch.manual_seed(0)
    own["peft_config"] = adapter() if adapted else None
    model = GPT2LMHeadModel.from_pretrained(folder / "model")
    return kind(model, rewards, args=args, train_dataset=prompts, processing_class=tokenizer(), **own)


@pytest.mark.parametrize("adapted", [False, True])
def test_grpo_trains_as_stock_does(adapted: bool, tmp_path: Path) -> None:
    """Its reference is a model of its own, or the policy with its adapter switched off."""
    expected = grpo(trl.GRPOTrainer, tmp_path / "stock", adapted)
    expected.train()
    found = grpo(GRPOTrainer, tmp_path / "ours", adapted, ebbtide=MEMORY)
    found.train()
    close_to(found, expected, rounding=SUM_OF_ONES)
    stats = found.engine.stats()
    assert stats["moved_bytes"]["host_to_device"] > 0
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"]
    assert bool(found.references) == (not adapted)
    found.close()


@pytest.mark.parametrize("short", [False, True])
def test_grpo_generates_with_weights_that_stay_where_they_fit(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = grpo(trl.GRPOTrainer, tmp_path / "stock")
    expected.train()
    found = grpo(
        GRPOTrainer, tmp_path / "ours", ebbtide=MEMORY | {"device": {"kind": "cpu", "memory": "64MB"}}
    )
    generates = type(found.model).generate

    def fails_once(model: Any, *args: Any, **kwargs: Any) -> Any:
        written = generates(model, *args, **kwargs)
        if short and found._stays:
            raise BudgetError("", tier="device", short=1, advice="")
        return written

    monkeypatch.setattr(type(found.model), "generate", fails_once)
    found.train()
    close_to(found, expected, rounding=SUM_OF_ONES)
    assert found._stays == (not short)
    found.close()


def test_vllm_is_refused(tmp_path: Path) -> None:
    args = trl.GRPOConfig(output_dir=str(tmp_path), use_vllm=True, num_generations=4, **COMMON)
    with pytest.raises(UnsupportedError, match="use_vllm"):
        GRPOTrainer(
            causal(), rewards, args=args, train_dataset=texts(), processing_class=tokenizer(), ebbtide=MEMORY
        )


def test_what_trl_does_with_memory_itself_is_refused(tmp_path: Path) -> None:
    args = trl.SFTConfig(output_dir=str(tmp_path), activation_offloading=True, **COMMON)
    with pytest.raises(UnsupportedError, match="offload_activations"):
        SFTTrainer(causal(), args, train_dataset=texts(), processing_class=tokenizer(), ebbtide=MEMORY)
    assert issubclass(SFTTrainer, Mixin)
