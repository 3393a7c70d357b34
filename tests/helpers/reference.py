"""A plain PyTorch training loop with the formula that ebbtide promises, written without its code.

Nothing is moved, nothing is chunked: ordinary parameters, ordinary backward, an update by eager operators.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

ROUND = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def to_parameter(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 to the compute dtype: bf16 rounds half up in bits, fp16 to nearest even."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    bits = master.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = torch.where(master.isnan(), torch.full_like(bits, 0x7FC00000), bits)
    high = ((bits + 0x8000) >> 16) & 0xFFFF
    high = torch.where(high >= 0x8000, high - 0x10000, high)
    return high.to(torch.int16).view(torch.bfloat16).view(master.shape)


def square_sum(gradient: torch.Tensor, stride: Sequence[int]) -> float:
    """fp64, blocks of 1,024 in storage order: 32 lanes over 32 rows, lanes halved, blocks in adjacent pairs."""
    laid = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype).copy_(gradient)
    flat = laid.as_strided((laid.numel(),), (1,)).double()
    rows = torch.zeros(math.ceil(flat.numel() / 1024) * 1024, dtype=torch.float64)
    rows[: flat.numel()] = flat * flat
    rows = rows.view(-1, 32, 32)
    lanes = rows[:, 0].clone()
    for row in range(1, 32):
        lanes = lanes + rows[:, row]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    sums = lanes[:, 0].tolist()
    while len(sums) > 1:
        pairs = [sums[i] + sums[i + 1] for i in range(0, len(sums) - 1, 2)]
        sums = pairs + ([sums[-1]] if len(sums) % 2 else [])
    return sums[0] if sums else 0.0


def f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def add_mean(model: nn.Module, batches: Sequence[dict[str, Any]]) -> list[float]:
    """The mean gradient over the ranks, each with a batch, added to what is there."""
    before = {name: p.grad for name, p in model.named_parameters()}
    sums: dict[str, torch.Tensor | None] = dict.fromkeys(before)
    losses = []
    for batch in batches:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found = sums[name]
                sums[name] = parameter.grad.float() if found is None else found + parameter.grad.float()
    for name, parameter in model.named_parameters():
        total, held = sums[name], before[name]
        if total is None:
            parameter.grad = held
            continue
        mean = (total * f32(1 / len(batches))).to(parameter.dtype)
        laid = torch.empty_strided(mean.shape, parameter.stride(), dtype=mean.dtype)
        parameter.grad = laid.copy_(mean if held is None else held + mean)
    return losses


def train(
    model: nn.Module,
    batch_of: Callable[[int], dict[str, Any]],
    steps: int,
    precision: str = "bf16",
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip: float | None = None,
    accumulate: int = 1,
    ranks: int = 1,
    update: Callable[..., None] | None = None,
    clip_value: float = math.inf,
) -> tuple[str, list[float]]:
    """The hash of the fp32 masters in name order after `steps` updates, and the losses. `ranks`: so many take a batch
    each in turn; gradients are added in their order in fp32, and the mean is rounded once. `update(p, g, m)`: another
    rule than AdamW, of fp32 numbers in place."""
    dtype = ROUND[precision]
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.to(dtype)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in masters.items()}
    for name, parameter in model.named_parameters():
        parameter.data = to_parameter(masters[name], dtype)
    losses: list[float] = []
    counts = dict.fromkeys(masters, 0)
    for step in range(1, steps + 1):
        for micro in range(accumulate):
            first_batch = ((step - 1) * accumulate + micro) * ranks
            if ranks == 1:
                loss = model(**batch_of(first_batch)).loss
                loss.backward()
                losses.append(loss.item())
            else:
                losses += add_mean(model, [batch_of(first_batch + rank) for rank in range(ranks)])
        total = 0.0
        for _, parameter in sorted(model.named_parameters()):
            if parameter.grad is not None:
                total += square_sum(parameter.grad, parameter.stride())
        scale = 1.0 / accumulate
        if clip is not None:
            scale = scale * min(1.0, clip / (math.sqrt(total) * scale + 1e-6))
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            counts[name] += 1
            first, second = 1 - betas[0] ** counts[name], 1 - betas[1] ** counts[name]
            p, (m, v) = masters[name], moments[name]
            g = (parameter.grad.float() * f32(scale)).clamp(-f32(clip_value), f32(clip_value))
            if update is not None:
                update(p, g, m)
                parameter.data, parameter.grad = to_parameter(p, dtype), None
                continue
            m.copy_((m * f32(betas[0])) + (g * f32(1 - betas[0])))
            v.copy_((v * f32(betas[1])) + ((g * f32(1 - betas[1])) * g))
            # torch's fp32 sqrt is not correctly rounded everywhere; rounded from fp64 it is.
            d = v.double().sqrt().float() * f32(1 / math.sqrt(second))
            d = d + f32(eps)
            p.copy_(p * f32(1 - lr * weight_decay))
            p.copy_(p - (m / d) * f32(lr / first))
            parameter.data = to_parameter(p, dtype)
            parameter.grad = None
    digest = hashlib.sha256()
    for name in sorted(masters):
        digest.update(masters[name].cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest(), losses
