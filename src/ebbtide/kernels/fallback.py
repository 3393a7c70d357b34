"""The kernels in plain torch: the same bits, without a compiler, on any device, for any rule."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

from ebbtide.kernels.base import (
    BLOCK,
    LANES,
    TYPES,
    Guarded,
    Operands,
    Scaling,
    form_of,
    require_bytes,
    require_capture,
    require_numbers,
    require_ranks,
    require_vectors,
    require_weighed,
)
from ebbtide.kernels.rule import Rule

STRIDE = 64 * BLOCK
"""Elements taken at a time. Temporaries four times as large are handed back to the system at every operation."""


class FallbackKernels:
    """`Kernels` in torch (see base.py)."""

    @torch.no_grad()
    def update(self, rule: Rule, operands: Operands, coefficients: Sequence[float]) -> None:
        o = operands
        for at in _spans(o.parameter):
            parameter, master = o.parameter[at], None if o.master is None else o.master[at]
            number = _load(parameter, master)
            gradient = o.gradient[at].to(torch.float32)
            rule.formula(number, gradient, tuple(state[at] for state in o.states), coefficients)
            _store(number, parameter, master)

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        for operands, coefficients in pieces:
            self.update(rule, operands, coefficients)

    def guarded(
        self, rule: Rule, sums: Sequence[SupportsFloat], losses: Sequence[Tensor], scaling: Scaling
    ) -> Guarded | None:
        return None

    def capture(self, destination: Tensor, source: Tensor, add: bool) -> SupportsFloat:
        require_capture(destination, source)
        deliver(destination, source, add)
        return self.sum_of_squares(memory(destination))

    @torch.no_grad()
    def weigh(self, destination: Tensor, source: Tensor, weight: float, add: bool) -> None:
        require_weighed(destination, source)
        for at in _spans(source):
            weighted = source[at].to(torch.float32) * torch.tensor(weight, dtype=torch.float32, device="cpu")
            if add:
                weighted = destination[at].to(torch.float32) + weighted
            destination[at] = _make_nan_canonical(weighted)

    @torch.no_grad()
    def sum_of_squares(self, flat: Tensor) -> SupportsFloat:
        require_vectors(flat)
        total = pairwise(block_sums(flat))
        return total.item() if total.is_cpu else total

    def read(self, sums: Sequence[SupportsFloat]) -> list[float]:
        waiting = [one for one in sums if isinstance(one, Tensor)]
        numbers = iter(torch.stack(waiting).tolist() if waiting else ())
        return [next(numbers) if isinstance(one, Tensor) else float(one) for one in sums]

    def block_sums(self, flat: Tensor) -> Tensor:
        require_vectors(flat)
        return block_sums(flat)

    def pairwise(self, sums: Tensor) -> SupportsFloat:
        total = pairwise(sums)
        return total.item() if total.is_cpu else total

    @torch.no_grad()
    def sum_ranks(self, destination: Tensor, received: Tensor, scale: float) -> None:
        ranks = require_ranks(destination, received)
        rows = received.view(ranks, -1)
        number = torch.tensor(scale, dtype=torch.float32, device="cpu")
        for at in _spans(destination):
            total = rows[0, at].to(torch.float32, copy=True)
            for rank in range(1, ranks):
                total += rows[rank, at].to(torch.float32)
            destination[at] = _make_nan_canonical(total * number)

    @torch.no_grad()
    def look(self, flats: Sequence[Tensor], norm: bool) -> Sequence[SupportsFloat]:
        if norm:
            return [self.sum_of_squares(flat) for flat in flats]
        for flat in flats:
            require_vectors(flat)
        found = [torch.where(flat.isfinite().all(), 0.0, torch.nan) for flat in flats]
        return [one.item() if one.is_cpu else one for one in found]

    @torch.no_grad()
    def split(self, master32: Tensor, parameter: Tensor, master: Tensor | None) -> None:
        require_numbers(master32)
        require_vectors(master32, parameter, master)
        if master is not None:
            form_of(parameter, master)
        for at in _spans(parameter):
            _store(master32[at].clone(), parameter[at], None if master is None else master[at])

    @torch.no_grad()
    def join(self, parameter: Tensor, master: Tensor | None, out: Tensor | None = None) -> Tensor:
        form_of(parameter, master)
        if out is None:
            out = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        require_numbers(out)
        require_vectors(parameter, master, out)
        for at in _spans(parameter):
            out[at] = _load(parameter[at], None if master is None else master[at])
        return out

    def copy(self, destination: Tensor, source: Tensor) -> None:
        require_bytes(destination, source)
        destination.copy_(source, non_blocking=True)


def memory(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def deliver(destination: Tensor, source: Tensor, add: bool) -> None:
    """Copy or add between any strides and types, as torch does, but with NaN made canonical by addition."""
    if not add:
        destination.copy_(source)
        return
    destination.add_(source)
    flat = memory(destination)
    for at in _spans(flat):
        _make_nan_canonical(flat[at])


def block_sums(flat: Tensor) -> Tensor:
    """The fp64 sum of squares of each block (Note "sums" in base.py)."""
    if flat.dtype not in TYPES:
        raise ValueError(f"expected {', '.join(TYPES.values())} to sum the squares of, found {flat.dtype}")
    out = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float64, device=flat.device)
    for at in _spans(flat):
        x = flat[at].to(torch.float64)
        if x.numel() % BLOCK:
            x = torch.cat((x, x.new_zeros(-x.numel() % BLOCK)))
        squares = (x * x).view(-1, BLOCK // LANES, LANES)
        total = squares[:, 0].clone()
        for row in range(1, BLOCK // LANES):
            total.add_(squares[:, row])
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        first = at.start // BLOCK
        out[first : first + total.shape[0]] = total[:, 0]
    return out


def pairwise(sums: Tensor) -> Tensor:
    """The sum over a tensor's blocks (Note "sums" in base.py)."""
    if sums.numel() == 0:
        return sums.new_zeros(())
    while sums.numel() > 1:
        even = sums.numel() // 2 * 2
        pairs = sums[:even].view(-1, 2)
        sums = torch.cat((pairs[:, 0] + pairs[:, 1], sums[even:]))
    return sums[0]


def _spans(vector: Tensor) -> Iterator[slice]:
    length = vector.numel()
    return (slice(at, min(at + STRIDE, length)) for at in range(0, length, STRIDE))


def _make_nan_canonical(x: Tensor) -> Tensor:
    if x.is_cpu and math.isfinite(x.sum()):
        return x  # the usual case; comparing is slow on a CPU, and reading a sum on a GPU
    return x.masked_fill_(x.isnan(), float("nan"))


def _load(parameter: Tensor, master: Tensor | None) -> Tensor:
    """The fp32 numbers held; where they lie as such, that memory."""
    if master is None:
        return parameter
    if master.dtype == torch.float32:
        return master
    high = parameter.view(torch.int16).to(torch.int32)
    return high.bitwise_left_shift_(16).add_(master).view(torch.float32)


def _store(number: Tensor, parameter: Tensor, master: Tensor | None) -> None:
    """Store fp32 numbers, made canonical in place, as parameter and master."""
    bits = _make_nan_canonical(number).view(torch.int32)
    if parameter.dtype == torch.bfloat16:
        high = (bits + 0x8000).bitwise_right_shift_(16)
        parameter.view(torch.int16).copy_(high)
        if master is not None and master.dtype == torch.int16:
            master.copy_(bits - high.bitwise_left_shift_(16))
            return
    else:
        parameter.copy_(number)
    if master is not None:
        master.copy_(number)
