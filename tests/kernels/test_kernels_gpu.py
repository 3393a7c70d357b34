"""The Triton kernels against the fallback: on a GPU where there is one, else through Triton's interpreter."""

import math
import os

import pytest
import torch

from ebbtide.kernels import ADAMW, RULES, FallbackKernels, Operands, Rule, Scaling, gpu_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed; its kernels are checked where it is")

TRITON, FALLBACK = gpu_kernels(DEVICE), FallbackKernels()
assert type(TRITON) is not FallbackKernels
FORMS = {
    "split": (torch.bfloat16, torch.int16),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
    "fp32": (torch.float32, None),
}
VARIANTS = [(f, g) for f, (p, _) in FORMS.items() for g in dict.fromkeys((p, torch.float32))]
TYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, 1, 1023, 1025, 20_000) if DEVICE == "cpu" else (0, 1, 1023, 1025, 20_000, 3_000_001)
GROUP = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-20, "weight_decay": 0.1, "momentum": 0.9}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def same(a, b):
    """Equal in every bit, except that a NaN is a NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    width = INTEGERS[a.element_size()]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.view(width)[~a.isnan()], b.view(width)[~b.isnan()]
    )


def wild(n, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 10 ** torch.randint(-9, 3, (n,), generator=generator)
    inf, nan = torch.inf, torch.nan
    odd = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-41, -1e-45, 3e38, 65504.0, 6e-8, 1e-5])
    where = torch.randperm(n, generator=generator)[: n // 50]
    x[where] = odd[torch.arange(where.numel()) % odd.numel()]
    return x.to(DEVICE, dtype)


def make(form, gradient, n, rule=ADAMW):
    dtype, master_dtype = FORMS[form]
    parameter = torch.empty(n, dtype=dtype, device=DEVICE)
    master = None if master_dtype is None else torch.empty(n, dtype=master_dtype, device=DEVICE)
    FALLBACK.split(wild(n, 0), parameter, master)
    variance = wild(n, 2).abs() * 0.01
    given = wild(n, 3, gradient)
    variance[::7], given[::7] = 1e-41, 0.0  # a root of a subnormal, which must not be flushed to zero
    return Operands(parameter, given, master, (wild(n, 1) * 0.01, variance)[: len(rule.states)])


def copy_of(o):
    master = None if o.master is None else o.master.clone()
    return Operands(o.parameter.clone(), o.gradient.clone(), master, tuple(s.clone() for s in o.states))


def written(o):
    return [t for t in (o.parameter, o.master, *o.states) if t is not None]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize(("form", "gradient"), VARIANTS)
def test_update(rule, form, gradient):
    for n in SIZES:
        mine = make(form, gradient, n, rule)
        theirs = copy_of(mine)
        for step in (1, 2, 100):
            coefficients = rule.coefficients(GROUP, step, 0.37, 0.3 if step == 2 else math.inf)
            TRITON.update(rule, mine, coefficients)
            FALLBACK.update(rule, theirs, coefficients)
        for a, b in zip(written(mine), written(theirs), strict=True):
            assert same(a, b), n
        assert same(
            FALLBACK.join(mine.parameter, mine.master), FALLBACK.join(theirs.parameter, theirs.master)
        )


def many_sums(bad=None):
    """Those of gradients of all sizes, as captures leave them, with what the host reads of them; and losses."""
    generator = torch.Generator().manual_seed(5)
    lengths = [5000, 0, 1, *torch.randint(1, 9000, (37,), generator=generator).tolist(), 1024 * 1500 + 7]
    vectors = [
        torch.randn(n, generator=generator).to(DEVICE) for n in lengths if n < 10_000 or DEVICE == "cuda"
    ]
    if bad == "gradient":
        vectors[7][-1] = torch.inf
    sums = [TRITON.sum_of_squares(vector) for vector in vectors]
    sums[3] = torch.as_tensor(FALLBACK.sum_of_squares(vectors[3]), device=DEVICE)
    found = torch.tensor([0.3, torch.nan if bad == "loss" else 2.0], dtype=torch.bfloat16, device=DEVICE)
    return sums, list(found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [None, "gradient", "loss"])
def test_guarded_updates(form, bad):
    """The same as others, or none at all; the decision says which."""
    sums, losses = many_sums(bad)
    for n in SIZES:
        mine = make(form, FORMS[form][0], n)
        theirs, before = copy_of(mine), copy_of(mine)
        guarded = TRITON.guarded(ADAMW, sums, losses, Scaling(0.37, 0.7))
        guarded.update_all(ADAMW, [(mine, ADAMW.coefficients(GROUP, 3, 77.0))])
        found = guarded.decision()
        assert (found is None) is (bad is not None)
        if found is not None:
            TRITON.update(ADAMW, theirs, ADAMW.coefficients(GROUP, 3, found.factor))
        for a, b, c in zip(written(mine), written(theirs), written(before), strict=True):
            assert same(a, b)
            assert found is not None or same(a, c)


@pytest.mark.parametrize("clip", [None, 0.3, 1e9, 1e-9])
@pytest.mark.parametrize("unscale", [1.0, 1 / 3, 2.0**-16 / 7])
def test_the_device_decides_as_the_host(clip, unscale):
    sums, losses = many_sums()
    total = 0.0
    for one in TRITON.read(sums):
        total += one
    scaling = Scaling(unscale, clip)
    for count in (len(sums), 1):
        some = sum(TRITON.read(sums[:count])) if count == 1 else total
        assert TRITON.guarded(ADAMW, sums[:count], losses, scaling).decision() == scaling.decide(some)
        assert TRITON.guarded(ADAMW, sums[:count], [], scaling).decision() == scaling.decide(some)


@pytest.fixture
def defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_guarded_updates_whatever_the_defaults_are(dtype, defaults):
    sums, losses = many_sums()
    mine = make("split", torch.bfloat16, 1025)
    theirs, coefficients = copy_of(mine), ADAMW.coefficients(GROUP, 3, 77.0)
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    guarded = TRITON.guarded(ADAMW, sums, losses, Scaling(0.37, 0.7))
    guarded.update_all(ADAMW, [(mine, coefficients)])
    found = guarded.decision()
    TRITON.update(ADAMW, theirs, ADAMW.coefficients(GROUP, 3, found.factor))
    assert all(same(a, b) for a, b in zip(written(mine), written(theirs), strict=True))


def test_what_the_host_has_to_look_at_is_not_guarded():
    sums, losses = many_sums()
    scaling = Scaling(1.0, None)
    assert TRITON.guarded(ADAMW, [], losses, scaling) is None
    assert TRITON.guarded(ADAMW, [*sums, 3.0], losses, scaling) is None
    assert TRITON.guarded(ADAMW, [*sums, None], losses, scaling) is None
    assert TRITON.guarded(Rule("unknown", (), ADAMW.coefficients, None), sums, losses, scaling) is None


def test_gradient_in_the_parameters_space():
    apart = make("bf16", torch.bfloat16, 5000)
    space = apart.gradient.clone()
    together = Operands(space, space, apart.master.clone(), tuple(s.clone() for s in apart.states))
    for o in (apart, together):
        TRITON.update(ADAMW, o, ADAMW.coefficients(GROUP, 3, 1.0))
    for a, b in zip(written(apart), written(together), strict=True):
        assert same(a, b)


def test_a_rule_of_ones_own_runs_its_formula():
    def formula(p32, g32, states, coefficients):
        p32.sub_(g32 * coefficients[0])

    plain = Rule("plain", (), lambda group, step, scale: (0.5,), formula)
    o = make("split", torch.float32, 3000)
    expected = copy_of(o)
    TRITON.update(plain, o, (0.5,))
    FALLBACK.update(plain, expected, (0.5,))
    assert same(o.parameter, expected.parameter)
    assert same(o.master, expected.master)


@pytest.mark.parametrize("add", [False, True], ids=["copy", "add"])
@pytest.mark.parametrize("dtype", TYPES)
def test_capture(dtype, add):
    for n in SIZES:
        mine = wild(n, n, dtype).nan_to_num(0.5, 2.0, -2.0).clamp(-1e4, 1e4)
        theirs, source = mine.clone(), wild(n, 9, dtype).nan_to_num(0.5, 3.0, -3.0).clamp(-1e4, 1e4)
        assert float(TRITON.capture(mine, source, add)) == float(FALLBACK.capture(theirs, source, add))
        assert same(mine, theirs)
        assert float(TRITON.sum_of_squares(mine)) == float(FALLBACK.sum_of_squares(mine))
        mine, theirs, source = wild(n, n, dtype), wild(n, n, dtype), wild(n, 9, dtype)
        total = float(TRITON.capture(mine, source, add))
        FALLBACK.capture(theirs, source, add)
        assert same(mine, theirs)
        assert (total - total == 0) == bool(mine.isfinite().all())


@pytest.mark.parametrize("add", [False, True], ids=["copy", "add"])
def test_capture_keeps_strides(add):
    space = torch.randn(33, 65, device=DEVICE).t()
    for source in (torch.randn(33, 65, device=DEVICE).t(), torch.randn(65, 33, device=DEVICE)):
        expected = space + source if add else source.clone()
        total = float(TRITON.capture(space, source, add))
        assert torch.equal(space, expected)
        assert total == float(FALLBACK.sum_of_squares(space.t().reshape(-1)))


def test_sums_of_many_blocks():
    """More than one program's worth of blocks, and of sums of blocks."""
    n = (1 << 20) + 1024 * 5 + 3 if DEVICE == "cuda" else 1024 * 37 + 3
    x = torch.randn(n).to(DEVICE)
    assert float(TRITON.sum_of_squares(x)) == float(FALLBACK.sum_of_squares(x))


def test_sums_stay_on_the_device_until_they_are_read():
    x, empty = torch.ones(5000, device=DEVICE), torch.ones(0, device=DEVICE)
    sums = [TRITON.sum_of_squares(x), TRITON.capture(torch.zeros_like(x), x, True)]
    assert all(one.parts.device == x.device and one.parts.dtype == torch.float64 for one in sums)
    assert TRITON.read([*sums, 7.0, TRITON.sum_of_squares(empty)]) == [5000.0, 5000.0, 7.0, 0.0]
    assert TRITON.read([]) == []


def test_vectors_of_any_alignment_one_after_the_other():
    """What Triton compiles for one is not right for another."""
    x, y = wild(6000, 1), wild(6000, 2)
    for first, last in ((0, 4096), (0, 4096), (1, 4097), (0, 4095), (3, 5003), (0, 4096), (7, 8)):
        mine, theirs, source = x[first:last].clone(), x[first:last].clone(), y[first:last]
        for one, space in ((TRITON, mine), (FALLBACK, theirs)):
            one.capture(space, source, False)
        assert same(mine, theirs)
        found = float(TRITON.sum_of_squares(source.nan_to_num(0.5, 2.0, -2.0)))
        assert found == float(FALLBACK.sum_of_squares(source.nan_to_num(0.5, 2.0, -2.0)))
        there, states = x.clone()[first:last], tuple(torch.zeros_like(x)[first:last] for _ in "mv")
        operands = Operands(there, source, None, states)
        expected = copy_of(operands)
        for one, some in ((TRITON, operands), (FALLBACK, expected)):
            one.update(ADAMW, some, ADAMW.coefficients(GROUP, 2, 0.5))
        for a, b in zip(written(operands), written(expected), strict=True):
            assert same(a, b), (first, last)


def test_split_join_copy():
    numbers = wild(3000, 4)
    for dtype, master_dtype in FORMS.values():
        parameter = torch.empty(3000, dtype=dtype, device=DEVICE)
        master = None if master_dtype is None else torch.empty(3000, dtype=master_dtype, device=DEVICE)
        TRITON.split(numbers, parameter, master)
        assert same(TRITON.join(parameter, master), numbers)
    source = torch.randint(0, 256, (999,), dtype=torch.uint8, device=DEVICE)
    space = torch.zeros_like(source)
    TRITON.copy(space, source)
    assert torch.equal(space, source)
