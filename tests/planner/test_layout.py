from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import LayoutError
from ebbtide.layout import (
    ALIGNMENT,
    ITEMSIZE,
    Layout,
    PagePiece,
    TensorSpec,
    build_layout,
    main_dtype,
    search_chunk_size,
    unit_elements,
)
from ebbtide.layout.chunk_size import TRIED_AT_MOST
from ebbtide.units import round_up

quick = settings(max_examples=50, deadline=None)

CUTS = ("chunk", "page", "tensor")
Mi = 2**20
Shapes = Iterable[tuple[str, tuple[int, ...]]]


def spec(name: str, *shape: int, dtype: str = "bf16") -> TensorSpec:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorSpec(name, shape, stride, dtype)


def flat(*sizes: int, dtype: str = "bf16") -> list[TensorSpec]:
    return [spec(f"t{index}", size, dtype=dtype) for index, size in enumerate(sizes)]


# Refusals and strides


@pytest.mark.parametrize(
    ("shape", "stride", "dtype", "message"),
    [
        ((4, 3), (3, 1), "int8", "'w' has dtype 'int8', expected one of bf16, fp16, fp32, fp64"),
        ((4, 0), (1, 1), "bf16", r"'w' is empty \(shape \(4, 0\)\)"),
        ((4, 3), (0, 1), "bf16", r"'w' overlaps itself: shape \(4, 3\) with strides \(0, 1\)"),
        ((4, 3), (1, 1), "bf16", "'w' overlaps itself"),
        ((4, 3), (4, 1), "bf16", r"'w' is not dense: shape \(4, 3\) with strides \(4, 1\)"),
        ((2, 2), (3, 3), "bf16", "'w' is not dense"),
        ((3,), (2,), "bf16", "'w' is not dense"),
        ((4, 3), (1,), "bf16", "'w' has 2 dimensions but 1 strides"),
    ],
)
def test_tensors_that_cannot_keep_their_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as error:
        TensorSpec("w", shape, stride, dtype)
    assert "'unmanaged'" in str(error.value)


@quick
@given(st.lists(st.integers(1, 6), max_size=4), st.randoms(use_true_random=False))
def test_permuted_tensors_keep_their_strides(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty(shape).permute(order)
    made = TensorSpec("w", tuple(tensor.shape), tensor.stride(), "fp32")
    assert made.extent == made.numel == tensor.numel()
    span = build_layout([made]).spans["w"]
    assert (span.shape, span.stride, span.numel) == (tuple(tensor.shape), tensor.stride(), tensor.numel())


@quick
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3))
def test_accepted_is_exactly_what_fills_its_storage_once(dims: list[tuple[int, int]]) -> None:
    shape, stride = zip(*dims, strict=True)
    reached = [0]
    for size, step in dims:
        reached = [base + index * step for base in reached for index in range(size)]
    try:
        TensorSpec("w", shape, stride, "fp32")
        accepted = True
    except LayoutError:
        accepted = False
    assert accepted == (sorted(reached) == list(range(math.prod(shape))))


@pytest.mark.parametrize(
    ("specs", "cut", "chunk_size", "message"),
    [
        (
            flat(5),
            "pages",
            None,
            r"expected a cut of chunk, page, tensor, found 'pages'; did you mean 'page'\?",
        ),
        ([], "chunk", None, "expected at least one tensor"),
        (
            [spec("a", 3), spec("b", 3), spec("a", 3)],
            "page",
            None,
            "expected each tensor once, found 'a' twice",
        ),
        (flat(5), "chunk", 1000, "multiples of 1024 elements, found 1000; the next one is 1024"),
        (flat(5), "page", 1025, "multiples of 1024 elements, found 1025; the next one is 2048"),
        (flat(5), "chunk", 0, "multiples of 1024 elements, found 0; the next one is 1024"),
        (flat(5), "page", -1024, "found -1024; the next one is 1024"),
        (flat(5), "tensor", 1024, "the cut 'tensor' has no chunk size"),
    ],
)
def test_layouts_that_cannot_be_made(
    specs: list[TensorSpec], cut: str, chunk_size: int | None, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        build_layout(specs, cut, chunk_size)


def test_bytes_become_elements_at_the_precision_of_the_model() -> None:
    mixed = [spec("norm", 10, dtype="fp32"), spec("w", 1000, dtype="bf16")]
    assert main_dtype(mixed) == "bf16"
    assert unit_elements(mixed, 4 * Mi) == 2 * Mi
    assert unit_elements(mixed, 4 * Mi + 2047) == 2 * Mi
    assert unit_elements(flat(5, dtype="fp32"), 4 * Mi) == Mi
    with pytest.raises(LayoutError, match=r"at least 4096 bytes \(1024 elements of fp32\), found 4090"):
        unit_elements(flat(5, dtype="fp32"), 4090)


# What holds for every layout


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorSpec], int]:
    unit = draw(st.sampled_from([1, 2, 3, 8])) * ALIGNMENT
    size = st.one_of(
        st.integers(1, 4 * unit), st.sampled_from([1, 1023, 1024, 1025, unit, unit - 1, unit + 1])
    )
    dtype = st.sampled_from(draw(st.sampled_from([("bf16",), ("bf16", "fp32"), ("fp16", "fp64", "bf16")])))
    made = draw(st.lists(st.tuples(size, dtype), min_size=1, max_size=40))
    return [spec(f"t{index}", size, dtype=kind) for index, (size, kind) in enumerate(made)], unit


def build(specs: list[TensorSpec], cut: str, unit: int) -> Layout:
    return build_layout(specs, cut, None if cut == "tensor" else unit)


@pytest.mark.parametrize("cut", CUTS)
@quick
@given(model=models())
def test_every_tensor_has_one_place_in_order(cut: str, model: tuple[list[TensorSpec], int]) -> None:
    specs, unit = model
    layout = build(specs, cut, unit)
    assert list(layout.spans) == [one.name for one in specs]
    assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
    end = [0] * len(layout.chunks)
    for one, span in zip(specs, layout.spans.values(), strict=True):
        assert (span.name, span.numel, span.shape, span.stride) == (
            one.name,
            one.numel,
            one.shape,
            one.stride,
        )
        assert layout.chunks[span.chunk].dtype == one.dtype
        assert span.offset % ALIGNMENT == 0
        assert span.offset == round_up(end[span.chunk], ALIGNMENT)  # neither overlap nor gap
        end[span.chunk] = span.offset + span.numel
    for chunk in layout.chunks:
        assert chunk.used == round_up(end[chunk.index], ALIGNMENT) <= chunk.size
        assert chunk.size % ALIGNMENT == chunk.start % ALIGNMENT == 0
    names = [name for chunk in layout.chunks for name in layout.names_of(chunk.index)]
    assert sorted(names) == sorted(layout.spans)
    order = list(layout.spans)
    firsts = [order.index(layout.names_of(chunk.index)[0]) for chunk in layout.chunks]
    assert firsts == sorted(firsts)  # numbered in the order of their first tensors


@pytest.mark.parametrize("cut", CUTS)
@quick
@given(model=models())
def test_the_address_space_of_a_dtype_has_no_holes(cut: str, model: tuple[list[TensorSpec], int]) -> None:
    layout = build(*model[:1], cut, model[1])
    space: dict[str, int] = defaultdict(int)
    for chunk in layout.chunks:
        assert chunk.start == space[chunk.dtype]
        space[chunk.dtype] += chunk.size
    if cut == "page":
        space = {dtype: round_up(end, layout.unit) for dtype, end in space.items()}
    assert layout.allocated == sum(space.values())
    assert layout.bytes == sum(end * ITEMSIZE[dtype] for dtype, end in space.items())
    assert layout.elements == sum(one.numel for one in model[0])
    assert layout.utilisation == layout.elements / layout.allocated


@pytest.mark.parametrize("cut", CUTS)
@quick
@given(model=models(), frozen=st.sets(st.integers(0, 39)))
def test_what_is_trained_is_laid_out_as_if_it_were_alone_and_so_is_the_rest(
    cut: str, model: tuple[list[TensorSpec], int], frozen: set[int]
) -> None:
    specs = [replace(one, trained=place not in frozen) for place, one in enumerate(model[0])]
    layout = build(specs, cut, model[1])
    pages: list[set[int]] = []
    for trained in (True, False):
        part = [one for one in specs if one.trained == trained]
        names = {one.name for one in part}
        mine = [chunk for chunk in layout.chunks if names & set(layout.names_of(chunk.index))]
        pages.append({piece.page for chunk in mine for piece in layout.pages(chunk.index)})
        if not part:
            continue
        alone = build(part, cut, model[1])
        assert [layout.names_of(chunk.index) for chunk in mine] == [
            alone.names_of(chunk.index) for chunk in alone.chunks
        ]
        assert [(one.dtype, one.size, one.used) for one in mine] == [
            (one.dtype, one.size, one.used) for one in alone.chunks
        ]
        assert [layout.spans[name].offset for name in alone.spans] == [
            span.offset for span in alone.spans.values()
        ]
    assert not pages[0] & pages[1]
    taken = sorted((chunk.dtype, chunk.start, chunk.start + chunk.size) for chunk in layout.chunks)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(taken))
    assert layout.page_count == len(pages[0] | pages[1])


@quick
@given(model=models())
def test_chunks_are_uniform(model: tuple[list[TensorSpec], int]) -> None:
    specs, unit = model
    layout = build(specs, "chunk", unit)
    for dtype in {one.dtype for one in specs}:
        chunks = [chunk for chunk in layout.chunks if chunk.dtype == dtype]
        shared = [
            chunk
            for chunk in chunks
            if round_up(layout.spans[layout.names_of(chunk.index)[0]].numel, ALIGNMENT) <= unit
        ]
        for chunk in chunks:
            if chunk not in shared:
                assert len(layout.names_of(chunk.index)) == 1
                assert chunk.size == chunk.used
        assert all(chunk.size == unit for chunk in shared[:-1])
        assert all(chunk.size == chunk.used for chunk in shared[-1:])  # nothing follows: trimmed
        # a chunk is left only when the next shared tensor does not fit
        for chunk, following in pairwise(shared):
            first = layout.spans[layout.names_of(following.index)[0]]
            assert chunk.used + first.numel > unit


@quick
@given(model=models())
def test_pages_cover_runs_and_hold_two_at_most(model: tuple[list[TensorSpec], int]) -> None:
    specs, unit = model
    layout = build(specs, "page", unit)
    runs: dict[int, list[int]] = defaultdict(list)
    taken: dict[int, list[PagePiece]] = defaultdict(list)
    for chunk in layout.chunks:
        fragments = layout.pages(chunk.index)
        assert [one.chunk_offset for one in fragments] == [0, *accumulate(one.length for one in fragments)][
            :-1
        ]
        assert sum(one.length for one in fragments) == chunk.size
        assert [one.page for one in fragments] == list(
            range(fragments[0].page, fragments[0].page + len(fragments))
        )
        for one in fragments:
            runs[one.page].append(chunk.index)
            taken[one.page].append(one)
    assert sorted(taken) == list(range(layout.page_count))
    assert layout.allocated == layout.page_count * unit
    dtype_of = {page: layout.chunks[owners[0]].dtype for page, owners in runs.items()}
    for page, owners in runs.items():
        assert len(owners) <= 2
        assert {layout.chunks[owner].dtype for owner in owners} == {dtype_of[page]}
        pieces = sorted(taken[page], key=lambda one: one.page_offset)
        assert pieces[0].page_offset == 0
        assert all(a.page_offset + a.length == b.page_offset for a, b in pairwise(pieces))
        full = pieces[-1].page_offset + pieces[-1].length == unit
        assert full or dtype_of.get(page + 1) != dtype_of[page]  # only the last one may be partly empty
    by_dtype = defaultdict(list)
    for chunk in layout.chunks:
        by_dtype[chunk.dtype].append(chunk)
    for chunks in by_dtype.values():
        for run in chunks[:-1]:
            *before, _ = layout.names_of(run.index)
            assert run.size >= unit > sum(round_up(layout.spans[name].numel, ALIGNMENT) for name in before)


@quick
@given(model=models())
def test_tensor_cut_and_single_fragments(model: tuple[list[TensorSpec], int]) -> None:
    specs, unit = model
    layout = build(specs, "tensor", unit)
    assert [layout.names_of(chunk.index) for chunk in layout.chunks] == [(one.name,) for one in specs]
    assert layout.allocated - layout.elements < ALIGNMENT * len(specs)
    for cut in ("tensor", "chunk"):
        layout = build(specs, cut, unit)
        assert layout.page_count == len(layout.chunks)
        for chunk in layout.chunks:
            assert layout.pages(chunk.index) == [PagePiece(chunk.index, 0, 0, chunk.size)]


def test_a_large_tensor_leaves_the_open_chunk_open() -> None:
    layout = build_layout(flat(1024, 9000, 1000, 2048), "chunk", 4096)
    assert [layout.names_of(index) for index in range(2)] == [("t0", "t2", "t3"), ("t1",)]
    assert [chunk.size for chunk in layout.chunks] == [4096, 9216]


def test_a_large_tensor_joins_the_small_ones_before_it_in_a_run() -> None:
    layout = build_layout(flat(1024, 9000, 1000, 5000, 10), "page", 4096)
    assert [layout.names_of(chunk.index) for chunk in layout.chunks] == [("t0", "t1"), ("t2", "t3"), ("t4",)]
    assert [chunk.start for chunk in layout.chunks] == [0, 10240, 16384]
    assert layout.pages(1) == [PagePiece(2, 2048, 0, 2048), PagePiece(3, 0, 2048, 4096)]


def test_pages_of_a_second_dtype_are_other_pages() -> None:
    specs = [spec("a", 5000), spec("norm", 10, dtype="fp32"), spec("b", 5000)]
    layout = build_layout(specs, "page", 4096)
    assert [(chunk.dtype, chunk.start) for chunk in layout.chunks] == [
        ("bf16", 0),
        ("fp32", 0),
        ("bf16", 5120),
    ]
    assert [[one.page for one in layout.pages(index)] for index in range(3)] == [[0, 1], [3], [1, 2]]
    assert layout.page_count == 4


# Padding on real models


def of_model(make: Callable[[], torch.nn.Module]) -> Callable[[], list[TensorSpec]]:
    def specs() -> list[TensorSpec]:
        with torch.device("meta"):
            model = make()
        return [TensorSpec(name, tuple(p.shape), p.stride(), "bf16") for name, p in model.named_parameters()]

    return specs


def llama(layers: int, width: int, inner: int, key_value: int, vocabulary: int = 32000) -> list[TensorSpec]:
    specs = [spec("embed.weight", vocabulary, width)]
    shapes: Shapes = [
        ("q", (width, width)), ("k", (key_value, width)), ("v", (key_value, width)), ("o", (width, width)),
        ("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner)),
        ("norm_1", (width,)), ("norm_2", (width,)),
    ]  # fmt: skip
    specs += [spec(f"layers.{layer}.{name}", *shape) for layer in range(layers) for name, shape in shapes]
    return [*specs, spec("norm", width), spec("lm_head.weight", vocabulary, width)]


def gpt(layers: int, width: int) -> list[TensorSpec]:
    specs = [spec("wte", 50257, width), spec("wpe", 2048, width)]
    shapes: Shapes = [
        ("ln_1.weight", (width,)), ("ln_1.bias", (width,)), ("qkv.weight", (width, 3 * width)),
        ("qkv.bias", (3 * width,)), ("proj.weight", (width, width)), ("proj.bias", (width,)),
        ("ln_2.weight", (width,)), ("ln_2.bias", (width,)), ("fc.weight", (width, 4 * width)),
        ("fc.bias", (4 * width,)), ("out.weight", (4 * width, width)), ("out.bias", (width,)),
    ]  # fmt: skip
    specs += [spec(f"h.{layer}.{name}", *shape) for layer in range(layers) for name, shape in shapes]
    return [*specs, spec("ln_f.weight", width), spec("ln_f.bias", width)]


T = transformers
PRESETS: dict[str, Callable[[], list[TensorSpec]]] = {
    "gpt2-124M": of_model(lambda: T.GPT2LMHeadModel(T.GPT2Config())),
    "gpt2-350M": of_model(lambda: T.GPT2LMHeadModel(T.GPT2Config(n_embd=1024, n_layer=24, n_head=16))),
    "gpt2-1.5B": lambda: gpt(48, 1600),
    "gpt-1B": lambda: gpt(24, 1920),
    "bert-base": of_model(lambda: T.BertForMaskedLM(T.BertConfig())),
    "t5-base": of_model(
        lambda: T.T5ForConditionalGeneration(T.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12))
    ),
    "t5-large": of_model(
        lambda: T.T5ForConditionalGeneration(T.T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16))
    ),
    "vit-large": of_model(
        lambda: T.ViTForImageClassification(
            T.ViTConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
            )
        )
    ),
    "llama-7B": lambda: llama(32, 4096, 11008, 4096),
    "llama-70B": lambda: llama(80, 8192, 28672, 1024),
    "gpt-175B": lambda: gpt(96, 12288),
}


@pytest.mark.parametrize("name", PRESETS)
def test_padding_on_presets(name: str) -> None:
    specs = PRESETS[name]()
    search = search_chunk_size(specs)
    layouts = {cut: build_layout(specs, cut) for cut in CUTS}
    assert layouts["chunk"].utilisation == search.utilisation >= 0.97
    assert layouts["chunk"].unit == search.chunk_size
    assert search.target // 2 <= search.chunk_size <= 128 * Mi
    assert len(layouts["chunk"].chunks) >= 8
    assert layouts["page"].unit == 2 * Mi  # 4 MiB of bf16
    assert layouts["page"].utilisation >= 0.98
    assert layouts["tensor"].utilisation >= 0.98
    assert len(search.tried) <= TRIED_AT_MOST


def test_whole_layers_are_tried_and_preferred() -> None:
    layer = (7 * Mi, Mi // 2, 3 * Mi, 13 * ALIGNMENT)
    specs = [TensorSpec(f"h.{i}.{j}", (n,), (1,), "bf16") for i in range(67) for j, n in enumerate(layer)]
    search = search_chunk_size(specs)
    assert search.utilisation >= 0.97
    assert search.chunk_size == sum(layer)
    assert [one.whole_layers for one in search.tried if one.chunk_size == sum(layer)] == [True]


@pytest.mark.parametrize("name", list(PRESETS))
def test_enough_chunks_to_fill_a_room(name: str) -> None:
    """The more chunks, the closer what fits comes to the room: a chunk's state is at most a few per cent of all,
    but for single tensors."""
    specs = PRESETS[name]()
    layout = build_layout(specs, "chunk", search_chunk_size(specs).chunk_size)
    assert len(layout.chunks) >= 40


def test_the_default_page_shrinks_with_the_model() -> None:
    assert build_layout(flat(*[30 * Mi] * 10), "page").unit == 2 * Mi
    assert build_layout(flat(*[30 * Mi] * 10, dtype="fp32"), "page").unit == Mi
    small = build_layout(flat(*[300_000] * 10), "page")
    assert small.unit == 128 * 1024
    assert small.utilisation > 0.97


@st.composite
def adversaries(draw: st.DrawFn) -> list[TensorSpec]:
    """Models of 100M parameters or more with a thousand tensors a 100M at the most, of hostile sizes."""
    just_over = st.builds(
        lambda part, power: int(part * 2**power), st.floats(0.26, 1.01), st.integers(12, 26)
    )
    pool = draw(st.lists(st.one_of(just_over, st.integers(1, 40 * Mi)), min_size=1, max_size=8))
    random = draw(st.randoms(use_true_random=False))
    total = draw(st.sampled_from([100_000_000, 400_000_000, 2_000_000_000]))
    sizes: list[int] = []
    while sum(sizes) < total and len(sizes) < total // 100_000:
        sizes += [random.choice(pool) for _ in range(50)]
    while sum(sizes) < total:
        sizes.append(random.randint(10 * Mi, 40 * Mi))
    return flat(*sizes)


@settings(max_examples=20, deadline=None)
@given(adversaries())
def test_padding_on_any_large_model(specs: list[TensorSpec]) -> None:
    search = search_chunk_size(specs)
    assert search.utilisation >= 0.90
    assert len(search.tried) <= TRIED_AT_MOST
    aligned = sum(round_up(one.numel, ALIGNMENT) for one in specs)
    page = build_layout(specs, "page")
    assert build_layout(specs, "tensor").allocated == aligned
    assert page.allocated - aligned <= 0.015 * aligned
    assert 1 - page.elements / aligned <= 0.0103  # what alignment alone can cost so many tensors


def test_describe() -> None:
    specs = [spec("a", 5000), spec("norm", 10, dtype="fp32"), spec("b", 500)]
    assert build_layout(specs, "chunk", 2048).describe() == (
        "3 tensors of 5,510 elements in 2 chunks of 2,048 elements (4.00 KiB of bf16 or 8.00 KiB of fp32) "
        "and 1 larger, of one tensor each; 16.0 KiB, 23.13 % of it padding"
    )
    assert "4 pages" in build_layout(specs, "page", 2048).describe()
    assert "3 chunks, one a tensor" in build_layout(specs, "tensor").describe()
