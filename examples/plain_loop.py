"""A loop of one's own: three lines are ebbtide's. Under torchrun each rank takes its rows, and the chunks are shared.

python examples/plain_loop.py --model path/to/llama-8b --device-memory 24GB --precision bf16
torchrun --nproc-per-node 8 examples/plain_loop.py --model path/to/llama-70b --device-memory 60GB
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import ebbtide

SMALL = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def build(folder: str | None) -> torch.nn.Module:
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder)
    return GPT2LMHeadModel(GPT2Config(**SMALL))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder that from_pretrained takes; left out, a tiny GPT-2")
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", default="trained")
    given = parser.parse_args()

    budgets = {"device": {"kind": given.device, "memory": given.device_memory}, "clip": 1.0}
    engine = ebbtide.initialize(build(given.model), {**budgets, "precision": given.precision})
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, given.steps)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // 64 * 64].view(-1, 64)
    for step in range(given.steps):
        batch = rows[(step * ranks + rank) % len(rows)][None].to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        result = engine.step()
        schedule.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {result.grad_norm:.3f}")
    engine.save(given.save)
    engine.close()


if __name__ == "__main__":
    main()
