"""A transformer block and a language model's head, with the operators that Hugging Face's GPT-2 has."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.02) for size in sizes)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(out)) for _, out in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the block's output: its gradient is free, and expanded as a loss's would not be."""
        batch, length, width = x.shape
        parts = self._product(self.norms[0](x), 0).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width).contiguous()
        x = x + self._product(mixed, 1)
        x = x + self._product(_gelu(self._product(self.norms[1](x), 2)), 3)
        return (x * x).sum()

    def _product(self, x: Tensor, place: int) -> Tensor:
        flat = torch.addmm(self.biases[place], x.reshape(-1, x.shape[-1]), self.weights[place])
        return flat.view(*x.shape[:-1], -1)


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.output(self.norm(x)).float()
        labels = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long, device=x.device)
        return F.cross_entropy(logits.view(len(labels), -1), labels)


def _gelu(x: Tensor) -> Tensor:
    """In single operators, as GPT-2's."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
