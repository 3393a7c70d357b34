"""A mixture of experts: the experts that a batch does not use cost neither memory on the device nor moves.

python examples/mixture_of_experts.py --model path/to/mixtral --device-memory 24GB --precision bf16
torchrun --nproc-per-node 8 examples/mixture_of_experts.py ...    # each rank holds its share of the experts
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import ebbtide

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder that from_pretrained takes; left out, a tiny Mixtral")
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()

    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model)
    else:
        model = MixtralForCausalLM(MixtralConfig(**SMALL))
    config = {
        "precision": given.precision,
        "device": {"kind": given.device, "memory": given.device_memory},
    }
    engine = ebbtide.initialize(model, config)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // 64 * 64].view(-1, 64).to(engine.device)
    for step in range(given.steps):
        batch = rows[(step * ranks + rank) % len(rows)][None]
        loss = engine(input_ids=batch, labels=batch, output_router_logits=True).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    engine.close()


if __name__ == "__main__":
    main()
