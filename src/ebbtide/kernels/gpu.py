"""The kernels in Triton, for tensors on a GPU: the operations of adam.cpp, in its order, with its rounding.

Built without contraction, with correctly rounded division and square root, and without flushing subnormals,
so that every number has the bits it has on the CPU. No sum is left to the hardware: each reduction here
adds two numbers. bf16 memory is handled as int16 bits; offsets are 64 bits wide. Importing this needs
Triton.

Rules without a kernel here, and the rare conversions of master weights, run through the fallback.

Note [many small launches]: a model has hundreds of gradients, and Triton takes longer to find out which of its compiled
kernels a call wants than most of them take to run. So that is remembered here (`_Kernel`), and what a gradient's blocks
add up to is finished by the host, for all gradients in one go, when somebody asks (`Sums`).
"""

# mypy: disable-error-code="no-untyped-def"
# Triton compiles the functions under @triton.jit and reads annotations in its own way.

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, SupportsFloat

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.kernels.base import BLOCK, LANES, TYPES, Operands, form_of, require_capture, require_vectors
from ebbtide.kernels.fallback import FallbackKernels, memory
from ebbtide.kernels.rule import Rule

ELEMENTS, BLOCKS, SUMS = 1024, 32, 1024
"""What one program takes in an update, in sums of squares, in adding up those sums."""
ALIGNED, NARROW = 16, 1 << 31
"""Triton compiles anew for addresses and lengths that are no multiples of so much, and for lengths from so much on."""

DECOUPLED = {"adam": False, "adamw": True}


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _canonical(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@triton.jit
def _read(stored, TYPE: tl.constexpr):
    if TYPE == "bf16":
        return _number(stored.to(tl.int32) << 16)
    else:
        return stored.to(tl.float32)


@triton.jit
def _nearest(x, TYPE: tl.constexpr):
    bits = _canonical(x)
    if TYPE == "bf16":
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif TYPE == "fp16":
        return _number(bits).to(tl.float16)
    else:
        return _number(bits)


@triton.jit
def _adam(
    p_at,
    g_at,
    master_at,
    m_at,
    v_at,
    guard_at,
    n,
    scale,
    b1,
    rest1,
    b2,
    rest2,
    inv_sqrt_bc2,
    eps,
    step_size,
    decay,
    DECOUPLED: tl.constexpr,
    FORM: tl.constexpr,
    GRADIENT: tl.constexpr,
    SIZE: tl.constexpr,
    GUARDED: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if GUARDED:
        n = n * tl.load(guard_at)  # 1 or 0
    inside = i < n
    if FORM == "split":
        high = tl.load(p_at + i, mask=inside, other=0).to(tl.int32)
        p = _number((high << 16) + tl.load(master_at + i, mask=inside, other=0).to(tl.int32))
    elif FORM == "fp32":
        p = tl.load(p_at + i, mask=inside, other=0.0)
    else:
        p = tl.load(master_at + i, mask=inside, other=0.0)

    g = _read(tl.load(g_at + i, mask=inside, other=0), GRADIENT) * scale
    if not DECOUPLED:
        g = g + decay * p
    m = b1 * tl.load(m_at + i, mask=inside, other=0.0) + rest1 * g
    v = b2 * tl.load(v_at + i, mask=inside, other=0.0) + (rest2 * g) * g
    d = tl.math.sqrt_rn(v) * inv_sqrt_bc2 + eps
    if DECOUPLED:
        p = p * decay
    p = p - step_size * tl.math.div_rn(m, d)

    tl.store(m_at + i, m, mask=inside)
    tl.store(v_at + i, v, mask=inside)
    bits = _canonical(p)
    high = (bits + 0x8000) >> 16
    if FORM == "fp32":
        tl.store(p_at + i, _number(bits), mask=inside)
    elif FORM == "fp16":
        tl.store(p_at + i, _number(bits).to(tl.float16), mask=inside)
    else:
        tl.store(p_at + i, high.to(tl.int16), mask=inside)
    if FORM == "split":
        tl.store(master_at + i, (bits - (high << 16)).to(tl.int16), mask=inside)
    elif FORM != "fp32":
        tl.store(master_at + i, _number(bits), mask=inside)


@triton.jit
def _take(to_at, from_at, i, inside, DEED: tl.constexpr, TYPE: tl.constexpr):
    """What will lie at `to_at`."""
    if DEED == "look":
        return tl.load(to_at + i, mask=inside, other=0)
    stored = tl.load(from_at + i, mask=inside, other=0)
    if DEED == "add":
        before = tl.load(to_at + i, mask=inside, other=0)
        stored = _nearest(_read(before, TYPE) + _read(stored, TYPE), TYPE)
    return stored


@triton.jit
def _square(stored, TYPE: tl.constexpr):
    x = _read(stored, TYPE).to(tl.float64)
    return x * x


@triton.jit
def _squares(
    to_at,
    from_at,
    sums_at,
    n,
    DEED: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    first = block[:, None] * BLOCK + tl.arange(0, LANES)[None, :]
    total = tl.zeros((BLOCKS, LANES), tl.float64)
    for row in range(0, BLOCK // LANES, 4):
        # Four at a time: what is written may be what is read next, for all that the compiler knows, so it would wait.
        i = first + row * LANES
        j, k, m = i + LANES, i + 2 * LANES, i + 3 * LANES
        w = _take(to_at, from_at, i, i < n, DEED, TYPE)
        x = _take(to_at, from_at, j, j < n, DEED, TYPE)
        y = _take(to_at, from_at, k, k < n, DEED, TYPE)
        z = _take(to_at, from_at, m, m < n, DEED, TYPE)
        if DEED != "look":
            tl.store(to_at + i, w, mask=i < n)
            tl.store(to_at + j, x, mask=j < n)
            tl.store(to_at + k, y, mask=k < n)
            tl.store(to_at + m, z, mask=m < n)
        total = total + _square(w, TYPE)
        total = total + _square(x, TYPE)
        total = total + _square(y, TYPE)
        total = total + _square(z, TYPE)
    for k in tl.static_range(5):
        total = tl.sum(tl.reshape(total, (BLOCKS, 2, LANES >> (k + 1))), axis=1)
    tl.store(sums_at + block[:, None] + tl.arange(0, 1)[None, :], total, mask=block[:, None] * BLOCK < n)


@triton.jit
def _pairwise(sums_at, out_at, n, SUMS: tl.constexpr):
    i = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    total = tl.load(sums_at + i, mask=i < n, other=0.0)
    for k in tl.static_range(10):
        total = tl.sum(tl.reshape(total, (SUMS >> (k + 1), 2)), axis=1)
    tl.store(out_at + tl.program_id(0) + tl.arange(0, 1), total)


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


_ADAM, _SQUARES, _PAIRWISE = _Kernel(_adam), _Kernel(_squares), _Kernel(_pairwise)


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
        if rule.name in DECOUPLED:
            _update(rule, operands, coefficients, None)
        else:
            super().update(rule, operands, coefficients)

    def guarded(self, sums: Sequence[SupportsFloat], losses: Sequence[Tensor]) -> "_Guarded | None":
        parts = [one.parts if isinstance(one, Sums) else one for one in sums]
        numbers = [one.reshape(-1).to(torch.float64) for one in (*parts, *losses) if isinstance(one, Tensor)]
        if len(numbers) < len(parts) + len(losses) or len({one.device for one in numbers}) != 1:
            return None  # some of it is the host's to look at
        return _Guarded(self, numbers)

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
    """`Guarded`: a flag on the device, and a copy for the host that is made before anything else is."""

    def __init__(self, kernels: TritonKernels, numbers: Sequence[Tensor]) -> None:
        self._kernels = kernels
        self._flag = torch.cat(tuple(numbers)).isfinite().all().to(torch.int32).view(1)
        self._said = torch.empty(1, dtype=torch.int32, pin_memory=self._flag.is_cuda)
        self._said.copy_(self._flag, non_blocking=True)
        self._event = None
        if self._flag.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._flag.device))

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        if rule.name in DECOUPLED:
            for operands, coefficients in pieces:
                _update(rule, operands, coefficients, self._flag)
        elif self.finite():
            self._kernels.update_all(rule, pieces)

    def finite(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._said.item())


def _update(rule: Rule, o: Operands, coefficients: Sequence[float], guard: Tensor | None) -> None:
    length = o.parameter.numel()
    if length == 0:
        return
    parameter = _raw(o.parameter)
    master = parameter if o.master is None else o.master
    _ADAM(
        triton.cdiv(length, ELEMENTS),
        (parameter, _raw(o.gradient), master, *o.states, o.states[0] if guard is None else guard),
        length,
        coefficients,
        DECOUPLED[rule.name],
        form_of(o.parameter, o.master),
        TYPES[o.gradient.dtype],
        ELEMENTS,
        guard is not None,
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
