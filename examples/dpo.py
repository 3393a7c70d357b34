"""Preference tuning (DPO) with TRL of a model from a local folder, in full or with LoRA.

    python examples/dpo.py --model path/to/llama-8b --data pairs.jsonl --device-memory 24GB --bf16
    python examples/dpo.py --model path/to/llama-8b --data pairs.jsonl --device-memory 12GB --bf16 --lora

Each row has `prompt`, `chosen` and `rejected`. In full, the reference is the same model again, as a frozen second engine
in the same budget; with LoRA it is the model with its adapter switched off.
"""

from __future__ import annotations

import argparse

import peft
import trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.integrations.trl import DPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder that from_pretrained takes")
    parser.add_argument("--data", required=True, help="JSON lines")
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="tuned")
    given = parser.parse_args()

    args = trl.DPOConfig(
        given.out, max_steps=given.steps, per_device_train_batch_size=4, logging_steps=1, bf16=given.bf16,
        use_cpu=given.cpu, report_to=[], save_strategy="no", max_length=512,
    )  # fmt: skip
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(given.model),
        ref_model=None if given.lora else AutoModelForCausalLM.from_pretrained(given.model),
        args=args,
        train_dataset=load_dataset("json", data_files=given.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(given.model),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM") if given.lora else None,
        ebbtide={"device": {"kind": "cpu" if given.cpu else "auto", "memory": given.device_memory}},
    )
    trainer.train()
    trainer.save_model(given.out)
    peak = trainer.engine.stats()["peak_bytes"]["device"]
    print(f"saved in {given.out}; {peak} bytes of the device at the most")
    trainer.close()


if __name__ == "__main__":
    main()
