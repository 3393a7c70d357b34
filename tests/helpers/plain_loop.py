"""An optimizer with the formula that ebbtide promises, for plain loops of any shape, written without ebbtide's code."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import nn

from reference import ROUND, f32, square_sum, to_parameter


class PlainAdamW:
    def __init__(
        self,
        model: nn.Module,
        precision: str = "fp32",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.dtype = ROUND[precision]
        self.named = dict(model.named_parameters())
        self.masters = {name: p.detach().clone() for name, p in self.named.items()}
        model.to(self.dtype)
        self.refresh()
        self.moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in self.masters.items()}
        self.counts = dict.fromkeys(self.masters, 0)

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """The parameters are their masters, rounded."""
        for name in self.named if names is None else names:
            self.named[name].data = to_parameter(self.masters[name], self.dtype)

    def norm(self, scale: float = 1.0) -> float:
        total = 0.0
        for _, parameter in sorted(self.named.items()):
            if parameter.grad is not None:
                total += square_sum(parameter.grad, parameter.stride())
        return math.sqrt(total) * scale

    def step(self, clip: float | None = None, scale: float = 1.0) -> None:
        if clip is not None:
            scale = scale * min(1.0, clip / (self.norm(scale) + 1e-6))
        for name, parameter in self.named.items():
            if parameter.grad is None:
                continue
            self.counts[name] += 1
            first, second = (1 - beta ** self.counts[name] for beta in self.betas)
            p, (m, v) = self.masters[name], self.moments[name]
            g = parameter.grad.float() * f32(scale)
            m.copy_((m * f32(self.betas[0])) + (g * f32(1 - self.betas[0])))
            v.copy_((v * f32(self.betas[1])) + ((g * f32(1 - self.betas[1])) * g))
            d = v.double().sqrt().float() * f32(1 / math.sqrt(second)) + f32(self.eps)
            p.copy_(p * f32(1 - self.lr * self.weight_decay))
            p.copy_(p - (m / d) * f32(self.lr / first))
        self.refresh()
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.masters):
            digest.update(self.masters[name].contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
