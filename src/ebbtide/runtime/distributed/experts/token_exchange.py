"""Tokens on their way to the ranks that have their experts, and back.

All ranks come to a layer together, in forward and in backward: each says how many rows it has for which expert, then
rows are exchanged, the experts that are here work on those that came, and what they made of them goes back. Where
several ranks in a row have the same experts, tokens go to those that have the same place among theirs.

An expert's gradient is to be the mean over the ranks, as everybody's is; its rows come from all that send it theirs.
So what comes back from the loss is divided by their number where it reaches an expert, and multiplied again where it
leaves.

Note [nobody stays away]: autograd must come to both exchanges on every rank, also where no row was sent or came,
or where nothing before the layer is trained; else the others would wait. An anchor that requires gradients makes it
come, and rows that no expert touched are tied to what was made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ebbtide.errors import UnsupportedError
from ebbtide.layout import expert_sets
from ebbtide.runtime.distributed.experts.adapters import ExpertLayer
from ebbtide.runtime.distributed.gather import ChunkSharing

THERE, BACK, GRADIENTS = 1, 2, 4
"""Of a layer's exchanges, which one it is: ranks that are at different ones say so."""


@dataclass(frozen=True)
class _Way:
    """Rows to each rank and from each rank."""

    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> _Way:
        return _Way(self.received, self.sent)


class _ExchangedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        anchor: torch.Tensor,
        go: Callable[..., torch.Tensor],
        way: _Way,
        gain: float,
    ) -> torch.Tensor:
        ctx.go, ctx.way, ctx.gain = go, way, gain
        return go(rows, way)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.go(gradient, ctx.way.back) * ctx.gain, None, None, None, None


class _Tie(torch.autograd.Function):
    """What was made of no rows depends on them all the same."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows.shape
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_zeros(ctx.rows)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


class TokenExchange:
    """In place of a layer's forward."""

    def __init__(self, number: int, layer: ExpertLayer, sharing: ChunkSharing, lock: Any) -> None:
        """`lock`: whoever holds it may move chunks."""
        self.layer = layer
        self._number, self._sharing, self._ranks, self._lock = number, sharing, sharing.ranks, lock
        self._shares = expert_sets(layer.bank.count, self._ranks.size)
        """Sets of experts, each on as many ranks in a row."""
        alike, local = self._ranks.size // self._shares, layer.bank.count // self._shares
        mine, place = divmod(self._ranks.rank, alike)
        self.here = range(mine * local, (mine + 1) * local)
        self._row = list(range(place, self._ranks.size, alike))
        """The ranks that tokens go to and come from, one for each set."""
        self.load = [0] * layer.bank.count
        """By expert: rows of all ranks that it was given since the beginning."""
        self.dropped = 0
        """Choices of all ranks that went to no expert: it was full."""
        self.sent = 0
        """Bytes of rows that this rank sent to others."""
        self._before = layer.module.__dict__.get("forward")
        layer.module.forward = self.forward

    def facts(self) -> dict[str, Any]:
        return {"load": list(self.load), "dropped": self.dropped, "sent_bytes": self.sent}

    def remove(self) -> None:
        self.layer.module.__dict__.pop("forward", None)
        if self._before is not None:
            self.layer.module.forward = self._before

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer = self.layer
        rows, chosen, weights = layer.adapter.route(layer.module, *args, **kwargs)
        choices = chosen.shape[1]
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        came = self._loads(torch.bincount(flat[order], minlength=layer.bank.count), len(flat))
        out = came.view(self._ranks.size, self._shares, len(self.here)).sum(2)
        mine = self.here.start // len(self.here)
        way = _Way(self._along(out[self._ranks.rank].tolist()), self._along(out[self._row, mine].tolist()))
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled(), device="cpu")
        size = float(self._shares)
        # Each index once, so that gradients are added in one order.
        every = rows.unsqueeze(1).expand(-1, choices, -1).reshape(len(flat), rows.shape[1])
        arrived = _ExchangedRows.apply(
            every.index_select(0, order), anchor, partial(self._go, THERE), way, size
        )
        made = self._run(arrived, came[self._row, self.here.start : self.here.stop])
        answers = _ExchangedRows.apply(made, anchor, partial(self._go, BACK), way.back, 1.0 / size)
        placed = answers.new_zeros(len(flat), answers.shape[1]).index_copy(0, order, answers)
        weighed = placed.view(*chosen.shape, rows.shape[1]) * weights.unsqueeze(-1)
        return weighed.to(rows.dtype).sum(1)

    def _along(self, counts: Sequence[int]) -> list[int]:
        """By rank, where only those of the row have any."""
        found = [0] * self._ranks.size
        for rank, count in zip(self._row, counts, strict=True):
            found[rank] = count
        return found

    def _run(self, rows: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """`came`: (rank of the row, expert that is here), in the order of the rows."""
        experts = (
            torch.tensor(list(self.here), device="cpu").repeat(len(came)).repeat_interleave(came.reshape(-1))
        )
        if not len(rows):
            return _Tie.apply(torch.zeros_like(rows), rows)
        made = self.layer.adapter.run(self.layer.module, rows, experts.to(rows.device), self.here)
        if made.shape != rows.shape:
            raise UnsupportedError(
                f"{self.layer.name}: experts are expected to make rows of {tuple(rows.shape)} of such rows, found "
                f'{tuple(made.shape)}; set experts = "gathered"'
            )
        return made.to(rows.dtype)

    def _loads(self, mine: torch.Tensor, choices: int) -> torch.Tensor:
        """Rows of each rank for each expert."""
        load = mine.tolist()
        with self._lock:
            rows = self._sharing.loads(10 * self._number, (choices - sum(load), *load))
        found = torch.tensor([row[1:] for row in rows], device="cpu")
        if not _in_backward():  # else a checkpoint computes it again
            self.dropped += sum(row[0] for row in rows)
            self.load = [had + count for had, count in zip(self.load, found.sum(0).tolist(), strict=True)]
        return found

    def _go(self, phase: int, rows: torch.Tensor, way: _Way) -> torch.Tensor:
        """Rows of other ranks for these."""
        exchange = 10 * self._number + phase + (GRADIENTS if _in_backward() else 0)
        rows = rows.contiguous()
        found = rows.new_empty((sum(way.received), rows.shape[1]))
        with self._lock:
            self.sent += self._sharing.swap(exchange, found, rows, way.received, way.sent)
        return found
