"""A LightningModule as anybody writes it; the strategy is ebbtide's.

python examples/lightning_module.py --model path/to/llama-8b --device-memory 24GB --precision bf16 --devices 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ebbtide.integrations.lightning import EbbtideStrategy

SMALL = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)


class Language(LightningModule):
    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder) if folder else GPT2LMHeadModel(SMALL)

    def training_step(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.model(input_ids=rows, labels=rows).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder that from_pretrained takes; left out, a tiny GPT-2")
    parser.add_argument("--device-memory", default="least")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()

    seed_everything(0, verbose=False)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    loader = DataLoader(text[: len(text) // 64 * 64].view(-1, 64), batch_size=4)
    strategy = EbbtideStrategy({"device": {"memory": given.device_memory}, "precision": given.precision})
    trainer = Trainer(
        strategy=strategy, accelerator=given.accelerator, devices=given.devices, max_epochs=1,
        gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Language(given.model), loader)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")
    strategy.close()


if __name__ == "__main__":
    main()
