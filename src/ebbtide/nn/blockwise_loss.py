"""A head and its cross entropy by blocks of tokens: all logits at once are never there.

Each block's logits, loss and gradients are computed in forward, and only the gradients of the input and of the weight
stay. fp16 computes its gradients in backward, for only there its scale is known: unscaled they would vanish.

Vocabulary and tokens alone decide the blocks, so the numbers are the same wherever the weight lies. Sums over several
blocks are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

BLOCK = 1 << 26
"""Logits of a block: 512 tokens of a vocabulary of 128K."""
LEAST = 128
"""Tokens of a block; fewer would not fill a product."""


class LossSettings(NamedTuple):
    ignore_index: int
    reduction: str
    label_smoothing: float
    gradients: bool
    """Whether autograd records the call."""


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The loss of `cross_entropy(linear(input, weight, bias).float(), target)`, and its gradients.

    `input`: (..., features); `weight`: (classes, features), as a Linear layer has it; `target`: class indices, of the
    shape of `input` without its last dimension. `reduction`: "mean" over targets that are not ignored, or "sum".
    """
    _check(input, weight, target, reduction)
    rows, classes = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    settings = LossSettings(ignore_index, reduction, label_smoothing, torch.is_grad_enabled())
    with torch.autocast(kind, enabled=False):
        return _Blockwise.apply(rows, weight, bias, classes, settings)


def block_of(tokens: int, vocabulary: int) -> int:
    """Tokens of a block."""
    return min(max(1, tokens), max(LEAST, BLOCK // max(1, vocabulary) // LEAST * LEAST))


def saves_memory(tokens: int, vocabulary: int, width: int) -> bool:
    """Whether blocks need less than all logits. These take about 14 bytes for a token and a word, with their gradient;
    the sum of the weight's gradient takes 6 for a feature and a word."""
    return tokens > max(block_of(tokens, vocabulary), width // 2)


def _check(input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum', found {reduction!r}")
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "expected an input of shape (..., features) and a weight of shape (classes, features), found "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if target.shape != input.shape[:-1] or target.is_floating_point():
        raise ValueError(
            f"expected class indices of shape {tuple(input.shape[:-1])}, one for each row of the input, found "
            f"{target.dtype} of shape {tuple(target.shape)}"
        )


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        settings: LossSettings,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:3] if settings.gradients else (False,) * 3
        ctx.settings, ctx.later = settings, weight.dtype == torch.float16
        now = any(wanted) and not ctx.later
        loss, *gradients = _computed(
            rows, weight, bias, target, settings, wanted if now else (False,) * 3, None
        )
        if now:
            ctx.save_for_backward(*gradients)
        elif any(wanted):
            ctx.save_for_backward(rows, weight, bias, target)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy: its gradient cannot be differentiated again (create_graph=True); use "
                "torch.nn.functional.cross_entropy of all logits for that"
            )
        if ctx.later:
            rows, weight, bias, target = ctx.saved_tensors
            wanted = ctx.needs_input_grad[:3]
            with torch.autocast(rows.device.type, enabled=False):
                _, *found = _computed(rows, weight, bias, target, ctx.settings, wanted, scale)
            return (*found, None, None)
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        return (*(_scaled(one, scale, kept) for one in ctx.saved_tensors), None, None)


def _scaled(one: torch.Tensor | None, scale: torch.Tensor, kept: bool) -> torch.Tensor | None:
    """In fp32, some rows at a time: rounded to bf16, the scale would be another. `kept`: it is wanted again."""
    if one is None:
        return None
    found = torch.empty_like(one) if kept else one
    for source, target in zip(one.split(4096), found.split(4096), strict=True):
        target.copy_(source.float() * scale)
    return found


def _computed(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    settings: LossSettings,
    wanted: tuple[bool, ...],
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The loss, and the gradients that are wanted of rows, weight and bias, `scale` times."""
    count = (target != settings.ignore_index).sum() if settings.reduction == "mean" else None
    sums = _Sums(rows, weight, bias, wanted)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    for begin, end in _blocks(rows.shape[0], weight.shape[0]):
        with torch.inference_mode(False), torch.enable_grad():
            block = rows[begin:end].detach()
            logits = functional.linear(block, weight.detach(), None if bias is None else bias.detach())
            if any(wanted):
                logits.requires_grad_()
            loss = functional.cross_entropy(
                logits.float(),
                target[begin:end],
                ignore_index=settings.ignore_index,
                reduction="sum",
                label_smoothing=settings.label_smoothing,
            )
            loss = loss if count is None else loss / count
        total += loss.detach()
        if any(wanted):
            (slope,) = torch.autograd.grad(loss, logits, None if scale is None else scale.to(loss.dtype))
            sums.add(begin, end, block, slope)
    if count is not None and not rows.shape[0]:
        total = total / count  # as torch has it: the mean of nothing is NaN
    return (total, *sums.found())


def _blocks(tokens: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    size = block_of(tokens, vocabulary)
    for begin in range(0, tokens, size):
        yield begin, min(begin + size, tokens)


class _Sums:
    """Gradients, block by block."""

    def __init__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
    ) -> None:
        several = rows.shape[0] > block_of(rows.shape[0], weight.shape[0])
        self._weight, self._dtypes = weight.detach(), (weight.dtype, None if bias is None else bias.dtype)
        self._rows = torch.empty_like(rows) if wanted[0] else None
        self._wide = torch.float32 if several else None
        self._of_weight: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None
        self._wanted = wanted

    def add(self, begin: int, end: int, block: torch.Tensor, slope: torch.Tensor) -> None:
        if self._rows is not None:
            torch.mm(slope, self._weight, out=self._rows[begin:end])
        if self._wanted[1]:
            self._of_weight = self._sum(self._of_weight, slope.t() @ block)
        if self._wanted[2]:
            self._of_bias = self._sum(self._of_bias, slope.sum(0))

    def _sum(self, sum: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        if sum is None:
            return part if self._wide is None else part.to(self._wide)
        return sum.add_(part)

    def found(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        weight, bias = self._of_weight, self._of_bias
        if self._wanted[1] and weight is None:
            weight = torch.zeros_like(self._weight)
        if self._wanted[2] and bias is None:
            bias = torch.zeros(self._weight.shape[0], dtype=self._dtypes[1], device=self._weight.device)
        return (
            self._rows,
            None if weight is None else weight.to(self._dtypes[0]),
            None if bias is None else bias.to(self._dtypes[1]),
        )
