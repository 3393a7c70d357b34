"""The kernels' contract: one formula and one rounding, whoever computes."""

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ebbtide.kernels import ADAM, ADAMW, RULES, Operands, Rule, cpu_kernels

NATIVE = cpu_kernels(threads=2, native=True)
ALONE = cpu_kernels(threads=1, native=True)
FALLBACK = cpu_kernels(native=False)
ALL = {"native": NATIVE, "one thread": ALONE, "fallback": FALLBACK}
TYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = {
    "split": (torch.bfloat16, torch.int16),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
    "fp32": (torch.float32, None),
}
VARIANTS = [(f, g) for f, (p, _) in FORMS.items() for g in dict.fromkeys((p, torch.float32))]
SIZES = (0, 1, 31, 1023, 1024, 1025, 5000, 140_001, 300_003)
GROUP = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
EVERY = GROUP | {"momentum": 0.9}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    return x.view(INTEGERS[x.element_size()]) if x.is_floating_point() else x


def same(a, b):
    """Equal in every bit, except that a NaN is a NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])


def wild(n, seed, dtype=torch.float32):
    """Ordinary numbers over many magnitudes, and every awkward one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 10 ** torch.randint(-9, 3, (n,), generator=generator)
    odd = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41, -1e-45, 3e38, 65504.0, 6e-8, 1e-5]
    )
    where = torch.randperm(n, generator=generator)[: n // 50]
    x[where] = odd[torch.arange(where.numel()) % odd.numel()]
    return x.to(dtype)


def make(form, gradient, n, seed=0, rule=ADAMW):
    dtype, master_dtype = FORMS[form]
    parameter = torch.empty(n, dtype=dtype)
    master = None if master_dtype is None else torch.empty(n, dtype=master_dtype)
    FALLBACK.split(wild(n, seed), parameter, master)
    states = (wild(n, seed + 1) * 0.01, wild(n, seed + 2).abs() * 0.01)
    return Operands(parameter, wild(n, seed + 3, gradient), master, states[: len(rule.states)])


def copy_of(o):
    master = None if o.master is None else o.master.clone()
    return Operands(o.parameter.clone(), o.gradient.clone(), master, tuple(s.clone() for s in o.states))


def written(o):
    return [t for t in (o.parameter, o.master, *o.states) if t is not None]


# -- update -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize(("form", "gradient"), VARIANTS)
@pytest.mark.parametrize("limit", [math.inf, 0.3])
def test_update_gives_the_same_bits_everywhere(rule, form, gradient, limit):
    for n in SIZES[:-1] if form != "split" else SIZES:
        start = make(form, gradient, n, rule=rule)
        mine = {name: copy_of(start) for name in ALL}
        for step in (1, 2, 100):
            coefficients = rule.coefficients(EVERY, step, 0.37, limit)
            for name, kernels in ALL.items():
                kernels.update(rule, mine[name], coefficients)
        for name, o in mine.items():
            for a, b in zip(written(o), written(mine["fallback"]), strict=True):
                assert same(a, b), (name, n)
            numbers = NATIVE.join(o.parameter, o.master)
            assert bits(numbers)[numbers.isnan()].eq(0x7FC00000).all()


def test_the_data_tells_contraction_from_separate_rounding():
    o = make("fp32", torch.float32, 5000)
    other = copy_of(o)
    coefficients = ADAMW.coefficients(GROUP, 2, 1.0)
    NATIVE.update(ADAMW, o, coefficients)
    _, _, b1, rest1, *_ = coefficients
    contracted = (other.states[0].double() * b1 + other.gradient.double() * rest1).float()
    assert not same(contracted, o.states[0])
    assert torch.allclose(contracted, o.states[0], rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("kernels", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_gradient_in_the_parameters_space(kernels, form):
    apart = make(form, FORMS[form][0], 140_001)
    space = apart.gradient.clone()
    together = Operands(space, space, apart.master.clone(), tuple(s.clone() for s in apart.states))
    coefficients = ADAMW.coefficients(GROUP, 3, 1.0)
    kernels.update(ADAMW, apart, coefficients)
    kernels.update(ADAMW, together, coefficients)
    for a, b in zip(written(apart), written(together), strict=True):
        assert same(a, b)


@pytest.mark.parametrize(("form", "gradient"), VARIANTS)
def test_update_stays_within_its_range_at_any_offset(form, gradient):
    whole = make(form, gradient, 3000)
    expected = copy_of(whole)
    coefficients = ADAMW.coefficients(GROUP, 1, 1.0)
    for at in (slice(0, 7), slice(7, 1500), slice(1501, 2999)):
        parts = [None if t is None else t[at] for t in (whole.parameter, whole.gradient, whole.master)]
        NATIVE.update(ADAMW, Operands(*parts, tuple(s[at] for s in whole.states)), coefficients)
    untouched = copy_of(expected)
    FALLBACK.update(ADAMW, expected, coefficients)
    for now, before, after in zip(written(whole), written(untouched), written(expected), strict=True):
        for i in (1500, 2999):
            assert same(now[i : i + 1], before[i : i + 1])
        inside = [i for i in range(3000) if i not in (1500, 2999)]
        assert same(now[inside], after[inside])


@pytest.mark.parametrize("kernels", ALL.values(), ids=ALL.keys())
def test_the_gradient_is_left_alone(kernels):
    for form, gradient in VARIANTS:
        o = make(form, gradient, 2000)
        before = o.gradient.clone()
        kernels.update(ADAM, o, ADAM.coefficients(GROUP, 1, 0.5))
        assert torch.equal(bits(o.gradient), bits(before))


@pytest.mark.parametrize("rule", [ADAM, ADAMW], ids=lambda rule: rule.name)
@pytest.mark.parametrize("form", FORMS)
def test_fifty_steps_agree_with_torch(rule, form):
    """Stated tolerance: 2e-6 of the largest weight.

    The gradients are kept from cancelling against the weight decay that Adam adds to them.
    """
    torch.manual_seed(1)
    start = torch.randn(4000).to(FORMS[form][0]).float()
    theirs = torch.nn.Parameter(start.clone())
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[rule.name]
    optimizer = kind([theirs], **GROUP)
    parameter = torch.empty(4000, dtype=FORMS[form][0])
    master = None if FORMS[form][1] is None else torch.empty(4000, dtype=FORMS[form][1])
    NATIVE.split(start, parameter, master)
    states = (torch.zeros(4000), torch.zeros(4000))
    for step in range(1, 51):
        gradient = (torch.randn(4000).sign() * (1 + torch.rand(4000))).to(parameter.dtype)
        theirs.grad = gradient.float() * 0.5
        optimizer.step()
        NATIVE.update(
            rule, Operands(parameter, gradient, master, states), rule.coefficients(GROUP, step, 0.5)
        )
    mine = NATIVE.join(parameter, master)
    assert (mine - theirs.detach()).abs().max() < 2e-6 * theirs.abs().max()
    assert (mine - start).abs().max() > 0.01
    assert torch.allclose(states[1], optimizer.state[theirs]["exp_avg_sq"], rtol=1e-5)


def test_coefficients_are_fp32_numbers_and_steps_start_at_one():
    for rule in RULES.values():
        for value in rule.coefficients(EVERY | {"lr": torch.tensor(1e-3)}, 7, 1 / 3):
            assert np.float32(value) == value
    for rule in (ADAM, ADAMW):
        with pytest.raises(ValueError, match="found step 0"):
            rule.coefficients(GROUP, 0, 1.0)


def _sign_coefficients(group, step, scale):
    b1, b2 = group["betas"]
    return tuple(ctypes.c_float(x).value for x in (scale, b1, 1 - b1, b2, 1 - b2, group["lr"]))


def _signs(p32, g32, states, coefficients):
    scale, b1, rest1, b2, rest2, lr = coefficients
    g = g32 * scale
    p32.sub_((states[0] * b1 + g * rest1).sign_().mul_(lr))
    states[0].mul_(b2).add_(g * rest2)


@pytest.mark.parametrize("form", FORMS)
def test_a_rule_of_ones_own_needs_only_its_formula(form):
    signs = Rule("signs", ("momentum",), _sign_coefficients, _signs)
    start, gradient = torch.randn(300_000), torch.randn(300_000)
    expected, momentum = start.clone(), torch.zeros(300_000)
    results = []
    for kernels in (NATIVE, FALLBACK):
        dtype, master_dtype = FORMS[form]
        parameter = torch.empty(300_000, dtype=dtype)
        master = None if master_dtype is None else torch.empty(300_000, dtype=master_dtype)
        kernels.split(start, parameter, master)
        o = Operands(parameter, gradient, master, (torch.zeros(300_000),))
        for step in (1, 2, 3):
            kernels.update(signs, o, signs.coefficients(GROUP, step, 0.5))
        results.append(kernels.join(parameter, master))
    for step in (1, 2, 3):
        _signs(expected, gradient, (momentum,), signs.coefficients(GROUP, step, 0.5))
    assert same(results[0], expected)
    assert same(results[1], expected)


def test_operands_say_what_is_wrong():
    half, whole, full = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8), torch.zeros(4)
    with pytest.raises(ValueError, match=r"torch\.float16 with a master of torch\.int16"):
        Operands(half.half(), half, torch.zeros(4, dtype=torch.int16), (full,))
    with pytest.raises(ValueError, match=r"on one device; found .*\(8,\)"):
        Operands(full, full.clone(), None, (full.clone(), whole))
    with pytest.raises(ValueError, match=r"\(4,\) strided \(2,\)"):
        Operands(full, whole[::2], None, (full.clone(),))
    with pytest.raises(ValueError, match=r"found torch\.float16"):
        Operands(half, half.half(), full, (full.clone(),))
    with pytest.raises(ValueError, match="no separate master"):
        Operands(half, half, torch.zeros(4, dtype=torch.int16), (full,))


# -- master weights -----------------------------------------------------------------------------------------

LOW = [0, 1, 0x7FFF, 0x8000, 0xFFFF]
PATTERNS = arrays.arrays(
    np.uint32,
    st.integers(0, 70),
    elements=st.one_of(
        st.integers(0, 2**32 - 1),
        st.builds(lambda high, low: high << 16 | low, st.integers(0, 0xFFFF), st.sampled_from(LOW)),
        st.sampled_from([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800000, 0x7F7FFFFF, 0x80000000, 0x00000001]),
    ),
)


def expected_bits(pattern):
    nan = (pattern & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, np.uint32(0x7FC00000), pattern)


@settings(max_examples=150, deadline=None)
@given(pattern=PATTERNS)
def test_split_and_join_are_exact_for_any_bits(pattern):
    numbers = torch.from_numpy(pattern.view(np.float32).copy())
    kept = expected_bits(pattern)
    high = ((kept.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    for kernels in ALL.values():
        for form, (dtype, master_dtype) in FORMS.items():
            parameter = torch.empty(numbers.shape, dtype=dtype)
            master = None if master_dtype is None else torch.empty(numbers.shape, dtype=master_dtype)
            kernels.split(numbers, parameter, master)
            assert np.array_equal(bits(kernels.join(parameter, master)).numpy().view(np.uint32), kept), form
            if dtype == torch.bfloat16:
                assert np.array_equal(bits(parameter).numpy().view(np.uint16), high)
            if dtype == torch.float16:
                nearest = torch.from_numpy(kept.view(np.float32)).half()
                assert torch.equal(bits(parameter), bits(nearest))
            if dtype != torch.float32:
                alone = torch.empty_like(parameter)
                kernels.split(numbers, alone, None)
                assert torch.equal(bits(alone), bits(parameter))
    assert np.array_equal(numbers.numpy().view(np.uint32), pattern)


def test_fp16_rounding_at_every_border():
    """All fp16 numbers, what lies half way between neighbours, and the fp32 numbers next to those."""
    exact = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    exact = exact[exact.isfinite()]
    between = (exact[:-1].double() + exact[1:].double()).div(2).float()
    numbers = torch.cat((exact, between))
    beside = [torch.nextafter(numbers, numbers + sign) for sign in (1, -1)]
    numbers = torch.cat((numbers, *beside))
    rounded = torch.empty(numbers.shape, dtype=torch.float16)
    NATIVE.split(numbers, rounded, None)
    assert torch.equal(bits(rounded), bits(numbers.half()))
