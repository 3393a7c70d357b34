"""Captured gradients, their sums in the stated order, copies, and several callers at a time."""

import threading

import numpy as np
import pytest
import torch

from ebbtide.kernels import NativeKernels, compiler
from sampling import crossed
from test_kernels import ALL, FALLBACK, NATIVE, SIZES, TYPES, bits, same, wild


def reference_sum(x):
    """The stated order, in numpy."""
    x = x.flatten().double().numpy()
    x = np.concatenate((x, np.zeros(-len(x) % 1024))).reshape(-1, 32, 32)
    total = np.zeros((len(x), 32))
    with np.errstate(invalid="ignore"):
        for row in range(32):
            total = total + x[:, row] * x[:, row]
        for half in (16, 8, 4, 2, 1):
            total = total[:, :half] + total[:, half : 2 * half]
        sums = list(total[:, 0])
        while len(sums) > 1:
            pairs = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)]
            sums = pairs + sums[len(pairs) * 2 :]
    return float(sums[0]) if sums else 0.0


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_follow_the_stated_order(dtype):
    plain = 0
    for n in (*SIZES, 1024 * 7 + 5):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        expected = reference_sum(x)
        for kernels in ALL.values():
            assert float(kernels.sum_of_squares(x)) == expected
        plain += float(x.double().square().sum()) != expected
    assert plain > 0, "the data cannot tell one order from another"


@pytest.mark.parametrize("many", [1, 9000], ids=["alone", "with helpers"])
def test_a_look_at_many_gives_the_sum_of_each(many):
    """Of several types and lengths, more elements than one thread takes among them."""
    flats = [torch.randn(n).to(dtype) for n in (*SIZES, 0, 2000 * many + 3) for dtype in TYPES]
    expected = [float(FALLBACK.sum_of_squares(flat)) for flat in flats]
    for kernels in ALL.values():
        assert [float(total) for total in kernels.look(flats, norm=True)] == expected
        assert kernels.look([], norm=True) == []


@pytest.mark.parametrize("add", [False, True], ids=["copy", "add"])
@pytest.mark.parametrize("dtype", TYPES)
def test_capture_is_torch_with_a_sum(dtype, add):
    for n in SIZES:
        before, gradient = wild(n, n, dtype), wild(n, n + 1, dtype)
        expected = before.clone()
        expected.add_(gradient) if add else expected.copy_(gradient)
        for kernels in ALL.values():
            space = before.clone()
            total = float(kernels.capture(space, gradient, add))
            assert same(space, expected)
            assert total == reference_sum(expected) or (total != total and not expected.isfinite().all())
        finite = wild(n, n, dtype).nan_to_num(0.5, 2.0, -2.0).clamp(-1e4, 1e4)
        space = finite.clone()
        total = NATIVE.capture(space, finite, add)
        assert total == FALLBACK.sum_of_squares(space) == reference_sum(space)


@pytest.mark.parametrize("dtype", TYPES)
def test_addition_of_any_bits_rounds_as_torch_does(dtype):
    width = torch.int32 if dtype == torch.float32 else torch.int16
    low, high = torch.iinfo(width).min, torch.iinfo(width).max
    generator = torch.Generator().manual_seed(5)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    a = torch.randint(low, high, (1 << 18,), generator=generator, dtype=torch.int64).to(width)
    b = torch.randint(low, high, (1 << 18,), generator=generator, dtype=torch.int64).to(width)
    if width == torch.int16:
        a[:65536], b[65536:131072] = every, every
    a, b = a.view(dtype), b.view(dtype)
    expected = a + b
    canonical = bits(torch.full((1,), torch.nan, dtype=dtype))
    for kernels in (NATIVE, FALLBACK):
        space = a.clone()
        kernels.capture(space, b, True)
        assert same(space, expected)
        assert bits(space)[expected.isnan()].eq(canonical).all()


@pytest.mark.parametrize(("bad", "dtype"), crossed([torch.inf, -torch.inf, torch.nan], TYPES))
def test_the_sum_is_finite_exactly_if_every_element_is(dtype, bad):
    largest = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
    for kernels in ALL.values():
        assert np.isfinite(float(kernels.sum_of_squares(largest)))
        assert [float(x) for x in kernels.look([largest, -largest], norm=False)] == [0.0, 0.0]
        for place in (0, 1030, 4999):
            x = torch.zeros(5000, dtype=dtype)
            x[place] = bad
            assert not np.isfinite(float(kernels.sum_of_squares(x)))
            long = torch.cat([largest.repeat(4000), x])
            seen = [float(y) for y in kernels.look([largest, x, long, largest], norm=False)]
            assert [y == 0.0 for y in seen] == np.isfinite(seen).tolist() == [True, False, False, True]
            assert not np.isfinite(float(kernels.capture(torch.zeros_like(x), x, True)))


@pytest.mark.parametrize("kernels", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("add", [False, True], ids=["copy", "add"])
def test_capture_keeps_strides_and_takes_any_source(kernels, add):
    torch.manual_seed(2)
    shape = (33, 65, 3)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        space = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(3)])
        memory = space.as_strided((space.numel(),), (1,))
        sources = {
            "the same strides": torch.empty_like(space).copy_(torch.randn(shape)),
            "other strides": torch.randn(65, 33, 3).transpose(0, 1),
            "expanded": torch.tensor(0.3).expand(shape),
            "another type": torch.randn(shape).bfloat16(),
            "needs no graph": torch.randn(shape, requires_grad=True),
        }
        for name, source in sources.items():
            expected = space + source if add else source.float()
            stride = space.stride()
            total = float(kernels.capture(space, source, add))
            assert torch.equal(space, expected), name
            assert space.stride() == stride
            assert not space.requires_grad
            assert total == reference_sum(memory), name


def test_capture_refuses_what_it_cannot_hold():
    for kernels in ALL.values():
        with pytest.raises(ValueError, match=r"expected a gradient of shape \(3, 4\), found \(4, 3\)"):
            kernels.capture(torch.zeros(3, 4), torch.zeros(4, 3), False)
        with pytest.raises(ValueError, match="expected dense memory"):
            kernels.capture(torch.zeros(3, 4)[:, ::2], torch.zeros(3, 2), False)
        with pytest.raises(ValueError, match=r"torch\.float64"):
            kernels.capture(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), False)


@pytest.mark.parametrize("kernels", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("n", [0, 1, 4097, 5_000_001])
def test_copy(kernels, n):
    source = torch.randint(0, 256, (n + 1,), dtype=torch.uint8)[1:]
    space = torch.zeros(n + 2, dtype=torch.uint8)
    kernels.copy(space[1:-1], source)
    assert torch.equal(space[1:-1], source)
    assert space[0] == space[-1] == 0
    with pytest.raises(ValueError, match="uint8"):
        kernels.copy(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=f"expected {n} bytes"):
        kernels.copy(source, torch.zeros(n + 1, dtype=torch.uint8))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_callers_at_the_same_time_do_not_disturb_each_other(threads):
    kernels = NativeKernels(compiler.load(), threads)
    gradients = [torch.randn(200_000 + 1024 * i).bfloat16() for i in range(4)]
    expected = [reference_sum(g) for g in gradients]
    wrong = []

    def work(i):
        space = torch.empty_like(gradients[i])
        for _ in range(30):
            space.zero_()
            if kernels.capture(space, gradients[i], True) != expected[i] or not torch.equal(
                space, gradients[i]
            ):
                wrong.append(i)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("add", [False, True], ids=["copy", "add"])
@pytest.mark.parametrize("dtype", TYPES)
def test_weighted_gradients_are_rounded_once(dtype, add):
    kept = torch.float32 if dtype == torch.float16 else dtype
    for n in SIZES:
        before, gradient = wild(n, n, kept), wild(n, n + 1, dtype)
        weighted = gradient.float() * torch.tensor(0.3)
        expected = (before.float() + weighted if add else weighted).to(kept)
        for kernels in (NATIVE, FALLBACK):
            space = before.clone()
            kernels.weigh(space, gradient, 0.3, add)
            assert same(space, expected)
    for kernels in (NATIVE, FALLBACK):
        with pytest.raises(ValueError, match="expected gradients"):
            kernels.weigh(torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.float16), 1.0, add)


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_by_block_add_up_wherever_ranks_cut(dtype):
    for n in (1024 * 7 + 5, 300_000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        for kernels in ALL.values():
            for cut in (0, 1024, 5 * 1024, n):
                sums = torch.cat([kernels.block_sums(x[:cut]), kernels.block_sums(x[cut:])])
                assert float(kernels.pairwise(sums)) == reference_sum(x)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_ranks_sent_is_added_in_their_order_and_rounded_once(dtype, ranks):
    for n in SIZES:
        received = torch.cat([wild(n, n + rank, dtype) for rank in range(ranks)])
        total = torch.zeros(n) if not n else received[:n].float()
        for rank in range(1, ranks):
            total = total + received[rank * n : (rank + 1) * n].float()
        expected = (total * torch.tensor(1 / ranks, dtype=torch.float32)).to(dtype)
        for kernels in ALL.values():
            found = torch.full((n,), -7.0).to(dtype)
            if n:
                kernels.sum_ranks(found, received, 1 / ranks)
            assert same(found, expected)
    if ranks > 2:
        x = torch.randn(ranks * 5000, generator=torch.Generator().manual_seed(1)).to(dtype)
        backwards = x.view(ranks, -1).flip(0).reshape(-1)
        found = [torch.empty(5000, dtype=dtype) for _ in range(2)]
        for one, values in zip(found, (x, backwards), strict=True):
            NATIVE.sum_ranks(one, values, 1.0)
        assert dtype != torch.float32 or not same(*found), "the data cannot tell one order from another"
