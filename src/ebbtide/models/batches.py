"""Batches from a stream of bytes: each depends on the seed and its own number, on nothing that came before.

So a run that resumes, or that has other budgets, sees the same batches.
"""

from __future__ import annotations

import hashlib

import torch

from ebbtide.errors import ConfigError
from ebbtide.models.presets import MARK
from ebbtide.models.spec import ModelSpec

MASKED_SHARE = 0.15
IGNORED = -100
"""The label that the loss leaves out."""
SPACE = 32


class Batches:
    def __init__(self, spec: ModelSpec, data: torch.Tensor, batch: int, seq: int, seed: int) -> None:
        """`data` is the text, as one tensor of uint8; `seq` is the length of a row, but for images."""
        self.spec = spec
        self.data = data
        self.batch = batch
        self.seed = seed
        self.window = seq if spec.objective != "image" else spec.pixels()
        self._starts = len(data) - self.window + 1
        if self._starts < 1:
            raise ConfigError(f"the data has {len(data)} bytes; one sequence needs {self.window}")

    @property
    def tokens(self) -> int:
        """Positions that a batch trains."""
        return self.spec.tokens(self.batch, self.window)

    def at(self, index: int) -> dict[str, torch.Tensor]:
        """The keyword arguments of the model's forward."""
        name = f"{self.seed}/{index}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
        generator = torch.Generator().manual_seed(key)
        starts = torch.randint(self._starts, (self.batch,), generator=generator).tolist()
        rows = torch.stack([self.data[start : start + self.window] for start in starts])
        objective = self.spec.objective
        if objective == "image":
            return self._images(rows)
        ids = rows.long()
        if objective == "masked":
            return _masked(ids, generator)
        if objective == "seq2seq":
            half = self.window // 2
            return {"input_ids": ids[:, :half].contiguous(), "labels": ids[:, half : 2 * half].contiguous()}
        return {"input_ids": ids, "labels": ids}

    def _images(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The text's bytes as pixels; the class is how much of it is space."""
        config = self.spec.config
        side = config.image_size
        pixels = (rows.float() / 127.5 - 1.0).view(self.batch, config.num_channels, side, side)
        share = (rows == SPACE).float().mean(dim=1)
        labels = (2 * config.num_labels * share).long().clamp(max=config.num_labels - 1)
        return {"pixel_values": pixels, "labels": labels}


def _masked(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The same number of positions in every row, at least one: a loss over none is not a number."""
    count = max(1, round(MASKED_SHARE * ids.shape[1]))
    chosen = torch.rand(ids.shape, generator=generator).argsort(dim=1)[:, :count]
    labels = torch.full_like(ids, IGNORED).scatter(1, chosen, ids.gather(1, chosen))
    return {"input_ids": ids.scatter(1, chosen, MARK), "labels": labels}
