"""Accelerate's loop as it is in its guide; one import and the budgets are ebbtide's.

python examples/accelerate_loop.py --model path/to/llama-8b --device-memory 24GB --mixed-precision bf16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from ebbtide.integrations.accelerate import Accelerator

SMALL = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder that from_pretrained takes; left out, a tiny GPT-2")
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--mixed-precision", default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", default="accelerated")
    given = parser.parse_args()

    accelerator = Accelerator(
        cpu=given.cpu, mixed_precision=given.mixed_precision, gradient_accumulation_steps=2,
        ebbtide={"device": {"memory": given.device_memory}},
    )  # fmt: skip
    small = GPT2LMHeadModel(GPT2Config(**SMALL))
    model = AutoModelForCausalLM.from_pretrained(given.model) if given.model else small
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    loader = DataLoader(text[: len(text) // 64 * 64].view(-1, 64), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, given.epochs * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(given.epochs):
        for rows in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=rows, labels=rows).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.save_state(given.out)
    accelerator.free_memory()


if __name__ == "__main__":
    main()
