"""The kernels' functions in Triton: what is computed, for `gpu.py` to launch.

Built without contraction, with correctly rounded division and square root, and without flushing subnormals,
so that every number has the bits it has on the CPU. No sum is left to the hardware: each reduction here
adds two numbers. bf16 memory is handled as int16 bits; offsets are 64 bits wide. Numbers in fp64 come from memory, for
Triton takes those that it is given, or that stand here, to be fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton compiles the functions under @triton.jit and reads annotations in its own way.

import triton
import triton.language as tl


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


RULES = ("adam", "adamw", "lion", "sgd")
"""Those that `_step` knows."""
COEFFICIENTS = 10
"""That `update` takes, scale and limit included; a rule's may be fewer."""


@triton.jit
def _adam(p, g, m, v, b1, rest1, b2, rest2, inv_sqrt_bc2, eps, step_size, decay, DECOUPLED: tl.constexpr):
    if not DECOUPLED:
        g = g + decay * p
    m = b1 * m + rest1 * g
    v = b2 * v + (rest2 * g) * g
    d = tl.math.sqrt_rn(v) * inv_sqrt_bc2 + eps
    if DECOUPLED:
        p = p * decay
    p = p - step_size * tl.math.div_rn(m, d)
    return p, m, v


@triton.jit
def _lion(p, g, m, b1, rest1, b2, rest2, lr, keep):
    direction = b1 * m + rest1 * g
    sign = tl.where(direction > 0, 1.0, 0.0) - tl.where(direction < 0, 1.0, 0.0)
    return p * keep - lr * sign, b2 * m + rest2 * g


@triton.jit
def _sgd(p, g, m, kept, lr, decay):
    m = kept * m + (g + decay * p)
    return p - lr * m, m


@triton.jit
def _step(p, g, m, v, c1, c2, c3, c4, c5, c6, c7, c8, RULE: tl.constexpr):
    """An element's update: `p`, and its state, after it; a rule without a second state leaves `v` as it is."""
    if RULE == "lion":
        p, m = _lion(p, g, m, c1, c2, c3, c4, c5, c6)
    elif RULE == "sgd":
        p, m = _sgd(p, g, m, c1, c2, c3)
    else:
        p, m, v = _adam(p, g, m, v, c1, c2, c3, c4, c5, c6, c7, c8, RULE == "adamw")
    return p, m, v


@triton.jit
def update(
    p_at,
    g_at,
    master_at,
    m_at,
    v_at,
    scale_at,
    n,
    scale,
    limit,
    c1,
    c2,
    c3,
    c4,
    c5,
    c6,
    c7,
    c8,
    RULE: tl.constexpr,
    STATES: tl.constexpr,
    FORM: tl.constexpr,
    GRADIENT: tl.constexpr,
    SIZE: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """`c1` to `c8`: the rule's coefficients after scale and limit, in their order."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if GUARDED:
        scale = tl.load(scale_at)
        n = tl.where(scale == scale, n, 0)
    inside = i < n
    if FORM == "split":
        high = tl.load(p_at + i, mask=inside, other=0).to(tl.int32)
        p = _number((high << 16) + tl.load(master_at + i, mask=inside, other=0).to(tl.int32))
    elif FORM == "fp32":
        p = tl.load(p_at + i, mask=inside, other=0.0)
    else:
        p = tl.load(master_at + i, mask=inside, other=0.0)

    g = _read(tl.load(g_at + i, mask=inside, other=0), GRADIENT) * scale
    g = tl.where(g > limit, limit, tl.where(g < -limit, -limit, g))
    m = tl.load(m_at + i, mask=inside, other=0.0)
    v = m
    if STATES == 2:
        v = tl.load(v_at + i, mask=inside, other=0.0)
    p, m, v = _step(p, g, m, v, c1, c2, c3, c4, c5, c6, c7, c8, RULE)

    tl.store(m_at + i, m, mask=inside)
    if STATES == 2:
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
def squares(
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
def pairwise(sums_at, out_at, n, SUMS: tl.constexpr):
    i = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    total = tl.load(sums_at + i, mask=i < n, other=0.0)
    for k in tl.static_range(10):
        total = tl.sum(tl.reshape(total, (SUMS >> (k + 1), 2)), axis=1)
    tl.store(out_at + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit
def totals(parts_at, terms_at, totals_at, n, FIRST: tl.constexpr, SUMS: tl.constexpr):
    """What each run of parts adds up to; `terms_at + FIRST`: where they begin, and the last one ends."""
    at = terms_at + FIRST + tl.program_id(0)
    i = tl.load(at).to(tl.int64) + tl.arange(0, SUMS)
    total = tl.load(parts_at + i, mask=i < tl.load(at + 1).to(tl.int64), other=0.0)
    for k in tl.static_range(10):
        total = tl.sum(tl.reshape(total, (SUMS >> (k + 1), 2)), axis=1)
    tl.store(totals_at + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit
def decide(totals_at, terms_at, found_at, scale_at, n, LOSSES: tl.constexpr):
    """By what gradients are multiplied, as `Stepping` has it; NaN where something of it all is not finite. `totals_at`:
    sums of squares of n gradients, then losses."""
    total = tl.load(totals_at)
    for k in range(1, n):
        total = total + tl.load(totals_at + k)
    doubt = total * 0
    for k in range(n, n + LOSSES):
        doubt = doubt + tl.load(totals_at + k) * 0
    unscale = tl.load(terms_at)
    norm = tl.sqrt(total) * unscale
    share = tl.load(terms_at + 1) / (norm + tl.load(terms_at + 2))
    factor = unscale * tl.where(share < 1, share, 1) + doubt
    tl.store(found_at, norm)
    tl.store(found_at + 1, factor)
    tl.store(scale_at, factor.to(tl.float32))
