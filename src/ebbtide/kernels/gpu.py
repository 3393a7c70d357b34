"""The kernels in Triton, for tensors on a GPU: the operations of adam.cpp, in its order, with its rounding.

Built without contraction, with correctly rounded division and square root, and without flushing subnormals,
so that every number has the bits it has on the CPU. No sum is left to the hardware: each reduction here
adds two numbers. bf16 memory is handled as int16 bits; offsets are 64 bits wide. Importing this needs
Triton.

Rules without a kernel here, and the rare conversions of master weights, run through the fallback.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton compiles the functions under @triton.jit and reads annotations in its own way.

from collections.abc import Sequence
from typing import SupportsFloat

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.kernels.base import BLOCK, LANES, TYPES, Operands, form_of, require_capture, require_vectors
from ebbtide.kernels.fallback import FallbackKernels, memory
from ebbtide.kernels.rule import Rule

ELEMENTS, BLOCKS, SUMS = 1024, 8, 1024
"""What one program takes in an update, in sums of squares, in adding up those sums."""

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
):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
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
    for row in range(BLOCK // LANES):
        i = first + row * LANES
        inside = i < n
        if DEED == "look":
            stored = tl.load(to_at + i, mask=inside, other=0)
        else:
            stored = tl.load(from_at + i, mask=inside, other=0)
            if DEED == "add":
                before = tl.load(to_at + i, mask=inside, other=0)
                stored = _nearest(_read(before, TYPE) + _read(stored, TYPE), TYPE)
            tl.store(to_at + i, stored, mask=inside)
        x = _read(stored, TYPE).to(tl.float64)
        total += x * x
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


class TritonKernels(FallbackKernels):
    """`Kernels` in Triton (see base.py). Sums stay on the device, in tensors, until they are read."""

    def update(self, rule: Rule, operands: Operands, coefficients: Sequence[float]) -> None:
        o = operands
        if rule.name not in DECOUPLED:
            return super().update(rule, o, coefficients)
        length = o.parameter.numel()
        if length == 0:
            return None
        parameter, gradient = _raw(o.parameter), _raw(o.gradient)
        with torch.cuda.device_of(o.parameter):
            _adam[(triton.cdiv(length, ELEMENTS),)](
                parameter,
                gradient,
                parameter if o.master is None else o.master,
                *o.states,
                length,
                *coefficients,
                DECOUPLED=DECOUPLED[rule.name],
                FORM=form_of(o.parameter, o.master),
                GRADIENT=TYPES[o.gradient.dtype],
                SIZE=ELEMENTS,
                enable_fp_fusion=False,
            )
        return None

    def capture(self, destination: Tensor, source: Tensor, add: bool) -> SupportsFloat:
        require_capture(destination, source)
        if (source.dtype, source.device, source.stride()) == (
            destination.dtype,
            destination.device,
            destination.stride(),
        ):
            return _sum("add" if add else "copy", memory(destination), memory(source))
        return super().capture(destination, source, add)

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        require_vectors(flat)
        return _sum("look", flat, flat)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _sum(deed: str, to: Tensor, source: Tensor) -> Tensor:
    sums = torch.empty(triton.cdiv(to.numel(), BLOCK), dtype=torch.float64, device=to.device)
    if sums.numel() == 0:
        return sums.new_zeros(())
    with torch.cuda.device_of(to):
        _squares[(triton.cdiv(sums.numel(), BLOCKS),)](
            _raw(to),
            _raw(source),
            sums,
            to.numel(),
            DEED=deed,
            TYPE=TYPES[to.dtype],
            BLOCKS=BLOCKS,
            BLOCK=BLOCK,
            LANES=LANES,
            enable_fp_fusion=False,
        )
        while sums.numel() > 1:
            fewer = sums.new_empty(triton.cdiv(sums.numel(), SUMS))
            _pairwise[(fewer.numel(),)](sums, fewer, sums.numel(), SUMS=SUMS, enable_fp_fusion=False)
            sums = fewer
    return sums[0]
