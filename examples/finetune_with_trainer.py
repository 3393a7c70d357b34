"""Fine-tune a causal language model from a local folder with Hugging Face's Trainer, in less memory than it needs.

    python examples/finetune_with_trainer.py --model path/to/llama-8b --text notes.txt --device-memory 24GB --bf16
    torchrun --nproc-per-node 4 examples/finetune_with_trainer.py ...

Without `--model` a tiny GPT-2 is built, which shows that everything is in place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, TrainingArguments

from ebbtide.integrations.transformers import Trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder that from_pretrained takes")
    parser.add_argument("--text", default=__file__)
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--out", default="finetuned")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()

    text = Path(given.text).read_text(encoding="utf-8")
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model)
        tokens = AutoTokenizer.from_pretrained(given.model)(text)["input_ids"]
    else:
        small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}
        model, tokens = (
            GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0)),
            list(text.encode()),
        )
    rows = torch.tensor(tokens[: len(tokens) // given.length * given.length]).view(-1, given.length)
    data = [{"input_ids": row, "labels": row} for row in rows]

    args = TrainingArguments(
        given.out, max_steps=given.steps, per_device_train_batch_size=4, learning_rate=1e-4, logging_steps=5,
        save_strategy="no", report_to=[], bf16=given.bf16, use_cpu=given.cpu,
    )  # fmt: skip
    budgets = {"device": {"memory": given.device_memory, "kind": "cpu" if given.cpu else "auto"}}
    trainer = Trainer(model, args, train_dataset=data, ebbtide=budgets)
    trainer.train()
    trainer.save_model(given.out)
    peak = trainer.engine.stats()["peak_bytes"]["device"]
    print(f"saved in {given.out}; {peak} bytes of the device at the most")
    trainer.close()


if __name__ == "__main__":
    main()
