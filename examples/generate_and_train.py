"""Reinforcement learning in small: the policy generates, is rewarded, and trains on what it wrote (REINFORCE).

    python examples/generate_and_train.py --model path/to/llama-8b --device-memory 24GB --precision bf16

`generate` is the module's own, under `no_grad`: chunks come and go as in training, and nothing is kept for a backward.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import ebbtide

SMALL = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
WANTED = ord("e")
"""The reward is how often the policy writes this byte."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--model", help="a folder that from_pretrained takes; left out, a tiny GPT-2 of bytes"
    )
    parser.add_argument("--device-memory", default="half")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--updates", type=int, default=5)
    given = parser.parse_args()

    model = (
        AutoModelForCausalLM.from_pretrained(given.model)
        if given.model
        else GPT2LMHeadModel(GPT2Config(**SMALL))
    )
    device = {"kind": given.device, "memory": given.device_memory}
    config = {"precision": given.precision, "clip": 1.0, "optimizer": {"lr": 1e-3}, "device": device}
    engine = ebbtide.initialize(model, config)
    prompt = torch.full((16, 4), WANTED, device=engine.device)
    drawn = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": True}
    for update in range(given.updates):
        with torch.no_grad():
            written = engine.module.generate(prompt, pad_token_id=0, **drawn)
        reward = (written[:, 4:] == WANTED).float().mean(1)
        advantage = reward - reward.mean()
        logits = engine(input_ids=written).logits[:, 3:-1]
        chances = torch.log_softmax(logits, -1).gather(-1, written[:, 4:, None]).squeeze(-1)
        loss = -(chances.sum(1) * advantage).mean()
        engine.backward(loss)
        engine.step()
        print(f"update {update}: reward {reward.mean().item():.4f}")
    engine.close()


if __name__ == "__main__":
    main()
