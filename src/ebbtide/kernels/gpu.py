"""The kernels in Triton, for tensors on a GPU: the operations of native.cpp, in its order, with its rounding.

What they compute is in `gpu_code.py`. Importing this needs Triton.

Rules without a kernel here, and the rare conversions of master weights, run through the fallback.

Note [many small launches]: a model has hundreds of gradients, and Triton takes longer to find out which of its compiled
kernels a call wants than most of them take to run. So that is remembered here (`_Kernel`), and what a gradient's blocks
add up to is finished by the host, for all gradients in one go, when somebody asks (`Sums`).
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import Any, SupportsFloat

import torch
import triton
from torch import Tensor

from ebbtide.kernels import gpu_code
from ebbtide.kernels.base import (
    BLOCK,
    CLIP_EPS,
    LANES,
    TYPES,
    Decision,
    Operands,
    Scaling,
    form_of,
    require_capture,
    require_vectors,
)
from ebbtide.kernels.fallback import FallbackKernels, memory
from ebbtide.kernels.rule import Rule

ELEMENTS, BLOCKS, SUMS = 1024, 32, 1024
"""What one program takes in an update, in sums of squares, in adding up those sums."""
ALIGNED, NARROW = 16, 1 << 31
"""Triton compiles anew for addresses and lengths that are no multiples of so much, and for lengths from so much on."""


class _Kernel:
    """A function in Triton, with what it was compiled to."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._made: dict[Any, Any] = {}

    def __call__(
        self, programs: int, tensors: Sequence[Tensor], length: int, numbers: Sequence[float], *constants: Any
    ) -> None:
        """`length`: of the vectors; more than 1, for Triton takes a 1 as part of the code."""
        # The function is launched on the device that is current, as Triton does.
        with torch.cuda.device_of(tensors[0]):
            key, addresses = None, 0
            for tensor in tensors:
                addresses |= tensor.data_ptr()
            if not addresses % ALIGNED and 1 < length < NARROW:
                key = (tensors[0].device, length % ALIGNED == 0, *(t.dtype for t in tensors), *constants)
                made = self._made.get(key)
                if made is not None:
                    made[(programs, 1, 1)](*tensors, length, *numbers, *constants)
                    return
            made = self._function[(programs,)](*tensors, length, *numbers, *constants, enable_fp_fusion=False)
            if key is not None and made is not None:  # Triton's interpreter makes nothing
                self._made[key] = made


_UPDATE, _SQUARES, _PAIRWISE = _Kernel(gpu_code.update), _Kernel(gpu_code.squares), _Kernel(gpu_code.pairwise)
_TOTALS, _DECIDE = _Kernel(gpu_code.totals), _Kernel(gpu_code.decide)


class Sums:
    """The sum of squares of a vector: sums of its blocks, or of 1,024 of those, which are added up when it is read."""

    __slots__ = ("parts",)

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts

    def __float__(self) -> float:
        return _in_pairs(self.parts.tolist())


def _in_pairs(sums: list[float]) -> float:
    """As the kernel goes on (Note "sums" in base.py)."""
    while len(sums) > 1:
        odd = sums[-1:] if len(sums) % 2 else []
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
    return sums[0] if sums else 0.0


class TritonKernels(FallbackKernels):
    """`Kernels` in Triton (see base.py). Sums stay on the device until they are read."""

    def update(self, rule: Rule, operands: Operands, coefficients: Sequence[float]) -> None:
        if rule.name in gpu_code.RULES:
            _update(rule, operands, coefficients, None)
        else:
            super().update(rule, operands, coefficients)

    def guarded(
        self,
        rule: Rule,
        sums: Sequence[SupportsFloat],
        losses: Sequence[Tensor],
        scaling: Scaling,
    ) -> "_Guarded | None":
        parts = [one.parts if isinstance(one, Sums) else one for one in sums]
        numbers = [one.reshape(-1).to(torch.float64) for one in (*parts, *losses) if isinstance(one, Tensor)]
        known = len(parts) + len(losses) - len(numbers)
        if not sums or known or len({one.device for one in numbers}) > 1 or rule.name not in gpu_code.RULES:
            return None  # some of it is the host's
        return _Guarded(numbers, len(sums), scaling)

    def capture(self, destination: Tensor, source: Tensor, add: bool) -> SupportsFloat:
        require_capture(destination, source)
        if (source.dtype, source.device, source.stride()) == (
            destination.dtype,
            destination.device,
            destination.stride(),
        ):
            return _sum("add" if add else "copy", memory(destination), memory(source))
        return super().capture(destination, source, add)

    def sum_of_squares(self, flat: Tensor) -> SupportsFloat:
        require_vectors(flat)
        return _sum("look", flat, flat)

    def read(self, sums: Sequence[SupportsFloat]) -> list[float]:
        """All in one go: reading waits for the device."""
        parts = [one.parts for one in sums if isinstance(one, Sums)]
        numbers = iter(torch.cat(parts).tolist() if parts else ())
        return [
            _in_pairs(list(islice(numbers, one.parts.numel()))) if isinstance(one, Sums) else float(one)
            for one in sums
        ]


class _Guarded:
    """`Guarded`: the decision is made on the device, and copied to the host before anything else is done."""

    def __init__(self, numbers: Sequence[Tensor], gradients: int, scaling: Scaling) -> None:
        """`numbers`: what each gradient's squares add up to, in parts, in the order in which they are added; losses."""
        device, pinned = numbers[0].device, numbers[0].is_cuda
        fixed = (scaling.unscale, math.inf if scaling.clip is None else scaling.clip, CLIP_EPS)
        begins = accumulate((one.numel() for one in numbers), initial=0)
        terms = torch.tensor([*fixed, *begins], dtype=torch.float64, device="cpu", pin_memory=pinned)
        terms = terms.to(device, non_blocking=True)
        totals, found = (torch.empty(n, dtype=torch.float64, device=device) for n in (len(numbers), 2))
        self._scale = torch.empty(1, dtype=torch.float32, device=device)
        together = torch.cat(tuple(numbers))
        _TOTALS(len(numbers), (together, terms, totals), gradients, (), len(fixed), SUMS)
        _DECIDE(1, (totals, terms, found, self._scale), gradients, (), len(numbers) - gradients)
        self._found = torch.empty(2, dtype=torch.float64, device="cpu", pin_memory=pinned)
        self._found.copy_(found, non_blocking=True)
        self._event = None
        if pinned:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        for operands, coefficients in pieces:
            _update(rule, operands, coefficients, self._scale)

    def decision(self) -> Decision | None:
        if self._event is not None:
            self._event.synchronize()
        norm, factor = self._found.tolist()
        return None if math.isnan(factor) else Decision(norm, factor)


def _update(rule: Rule, o: Operands, coefficients: Sequence[float], scale: Tensor | None) -> None:
    """`scale`: on the device, in place of that among the coefficients; NaN changes nothing."""
    length = o.parameter.numel()
    if length == 0:
        return
    parameter = _raw(o.parameter)
    master = parameter if o.master is None else o.master
    first, second = o.states[0], o.states[-1]
    _UPDATE(
        triton.cdiv(length, ELEMENTS),
        (parameter, _raw(o.gradient), master, first, second, first if scale is None else scale),
        length,
        (*coefficients, *[0.0] * (gpu_code.COEFFICIENTS - len(coefficients))),
        rule.name,
        len(o.states),
        form_of(o.parameter, o.master),
        TYPES[o.gradient.dtype],
        ELEMENTS,
        scale is not None,
    )


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _sum(deed: str, to: Tensor, source: Tensor) -> Sums:
    length = to.numel()
    count = triton.cdiv(length, BLOCK)
    sums = torch.empty(count, dtype=torch.float64, device=to.device)
    if count:
        vectors = (_raw(to), _raw(source), sums)
        _SQUARES(triton.cdiv(count, BLOCKS), vectors, length, (), deed, TYPES[to.dtype], BLOCKS, BLOCK, LANES)
    while count > SUMS:
        fewer = sums.new_empty(triton.cdiv(count, SUMS))
        _PAIRWISE(fewer.numel(), (sums, fewer), count, (), SUMS)
        sums, count = fewer, fewer.numel()
    return Sums(sums)
