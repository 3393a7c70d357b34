"""Seq2SeqTrainer, which generates while it evaluates, beside the stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Seq2SeqTrainer as Stock
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from ebbtide.integrations.transformers import Seq2SeqTrainer
from test_integrations_transformers import close_to


def build() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )


def pairs() -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(2, 64, (8,), generator=drawn),
            "labels": torch.randint(2, 64, (5,), generator=drawn),
        }
        for _ in range(16)
    ]


def written(prediction: Any) -> dict[str, float]:
    return {"written": float(np.where(prediction.predictions < 0, 0, prediction.predictions).sum())}


def trained(kind: Any, folder: Path, **own: Any) -> Any:
    args = Seq2SeqTrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        eval_strategy="steps", eval_steps=2, predict_with_generate=True, generation_max_length=6, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(
        build(), args, train_dataset=pairs(), eval_dataset=pairs()[:8], compute_metrics=written, **own
    )
    trainer.train()
    return trainer


def test_it_trains_and_generates_as_stock_does(tmp_path: Path) -> None:
    memory = {"device": {"kind": "cpu", "memory": "least"}, "chunk_size": "16KiB"}
    ours, stock = (
        trained(Seq2SeqTrainer, tmp_path / "ours", ebbtide=memory),
        trained(Stock, tmp_path / "stock"),
    )
    close_to(ours, stock)
    said = [
        [row["eval_written"] for row in one.state.log_history if "eval_written" in row]
        for one in (ours, stock)
    ]
    assert said[0] == said[1] and len(said[0]) == 2
    found, expected = (one.predict(pairs()[:4], max_length=7).predictions for one in (ours, stock))
    assert (found == expected).all()
    ours.close()
