"""Pretraining from a config, with optimizer state on SSD: a model whose state no RAM holds.

    python examples/pretrain_with_ssd.py --model gpt-10b --device-memory 24GB --host-memory 64GB \\
        --ssd-memory 200GB --folder /nvme/ebbtide --precision bf16 --checkpoint-activations

The module is built on the meta device, so nothing of its size is ever in RAM at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import ebbtide
from ebbtide.models import find_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2-tiny", help="a preset, or a folder with a config.json")
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--host-memory", default="40MB")
    parser.add_argument("--ssd-memory", default="200MB")
    parser.add_argument("--folder", default="ssd")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()

    model = find_model(given.model).on_meta()
    if given.checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    Path(given.folder).mkdir(parents=True, exist_ok=True)
    config = {
        "precision": given.precision,
        "device": {"kind": given.device, "memory": given.device_memory},
        "host": {"memory": given.host_memory},
        "ssd": {"memory": given.ssd_memory, "folder": given.folder},
    }
    engine = ebbtide.initialize(model, config)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // 128 * 128].view(-1, 128).to(engine.device)
    for step in range(given.steps):
        batch = rows[step % len(rows)][None]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step}: loss {loss.item():.4f}")
    ssd = engine.stats()["tags"]["ssd"]
    print(f"{sum(ssd.values())} bytes of model data are on SSD")
    engine.close()


if __name__ == "__main__":
    main()
