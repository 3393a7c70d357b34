"""What operators reach, measured where they run: in the forward and backward pass of transformer blocks.

A loop over one product finds its operands in a cache and its result's memory at hand; inside a pass neither is
so. Every operator of some blocks is therefore timed on its way, with the work that the trace counts for it, and
the tables are keyed by the very operations a byte that the forecast looks them up with.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.forecasting.doctor.block import Block, Head
from ebbtide.forecasting.simulation.machine import Curve
from ebbtide.planner.record import ATTENTION, MATMUL, Work
from ebbtide.tracing.operator_cost import work_of

BLOCKS_A_HEAD = 12
"""How often a block counts beside one head in the pointwise rate: as in the smallest GPT-2."""
MERGE = 1.25
"""Products whose operations a byte differ by less are one point of the curve."""

Seconds = dict[Work, list[float]]


@dataclass(frozen=True)
class ProductShape:
    batch: int
    seq: int
    width: int
    vocabulary: int = 0
    """Not zero: the head of a language model in place of a block."""

    @property
    def flops(self) -> float:
        """Of forward and backward, roughly."""
        tokens = self.batch * self.seq
        if self.vocabulary:
            return 6.0 * tokens * self.width * self.vocabulary
        return tokens * (72.0 * self.width**2 + 14 * self.seq * self.width)

    @property
    def bytes(self) -> int:
        """Of activations and weights with gradients, roughly."""
        tokens = self.batch * self.seq
        if self.vocabulary:
            return 16 * tokens * self.vocabulary + 4 * self.width * self.vocabulary
        return 80 * tokens * self.width + 48 * self.width**2

    def __str__(self) -> str:
        what = "head" if self.vocabulary else "block"
        return f"{what} {self.batch}x{self.seq}x{self.width}"


SHAPES = (
    ProductShape(1, 64, 64),
    ProductShape(2, 64, 128),
    ProductShape(8, 64, 256),
    ProductShape(2, 128, 256),
    ProductShape(1, 256, 1024),
    ProductShape(2, 256, 768),
    ProductShape(2, 256, 768, 50257),
    ProductShape(1, 512, 1024),
    ProductShape(1, 1024, 768),
    ProductShape(1, 2048, 512),
    ProductShape(1, 1024, 2048),
    ProductShape(4, 1024, 2048),
    ProductShape(4, 1024, 4096),
    ProductShape(8, 2048, 4096),
)
"""From small to large; a machine measures those that it computes within the time it has."""


@dataclass(frozen=True)
class Operators:
    launch: float
    pointwise: float
    start: float
    """Seconds that an operator which only reads and writes takes beside, where it is large enough for all cores."""
    matmul: Curve
    attention: Curve
    flops: float
    """The most that any product reached."""
    large: float
    """What the products with the most operations a byte reached."""
    drift: float
    """The slowest over the fastest of one and the same product, but for a tenth at either end."""
    rows: tuple[dict[str, Any], ...]
    """By shape: what one pass took, and what its parts reached."""


class Timer(TorchDispatchMode):
    """Seconds of every operator that does work, in order."""

    def __init__(self, cuda: bool) -> None:
        super().__init__()
        self._cuda = cuda
        self._seen: list[tuple[Work, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin = self._now()
        out = func(*args, **kwargs)
        end = self._now()
        work = work_of(func, args, kwargs, out)
        if work is not None:
            self._seen.append((work, begin, end))
        return out

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> list[tuple[Work, float]]:
        if self._cuda:
            torch.cuda.synchronize()
            return [(work, begin.elapsed_time(end) / 1e3) for work, begin, end in self._seen]
        return [(work, end - begin) for work, begin, end in self._seen]


class Measurement:
    """Rounds of one pass of each shape; what came of them, at any time."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: int, limit: float) -> None:
        """The first `shapes` of SHAPES; `limit`: seconds that one pass may take."""
        self._tiny = _Probe(ProductShape(1, 8, 16), device, dtype)
        self._probes = _affordable(device, dtype, shapes, limit)

        self._pace = _Pace(device, dtype)

    def round(self) -> None:
        """One pass of each in turn, so that a machine that is slow for a while is slow for all of them."""
        for probe in (self._tiny, *self._probes):
            probe.run(self._pace)

    def warm_up(self) -> None:
        """A round that does not count: memory is faulted in."""
        self.round()
        for probe in (self._tiny, *self._probes):
            probe.forget()

    def result(self) -> Operators:
        """What was measured so far: at least one round."""
        tiny, probes = self._tiny, self._probes
        usual, drift = self._pace.usual(), self._pace.drift()
        for probe in (tiny, *probes):
            probe.settle(usual)
        inside = statistics.median(s for seconds in tiny.seconds.values() for s in seconds)
        matmul = _curve(probes, MATMUL, inside, MERGE)
        products = [y for _, y in matmul]
        start, pointwise = _pointwise(probes, inside)
        return Operators(
            launch=_rounded(tiny.whole / tiny.count),
            pointwise=_rounded(pointwise),
            start=_rounded(start),
            matmul=matmul,
            attention=_curve(probes, ATTENTION, inside, 1.0),
            flops=max(products),
            large=products[-1],
            drift=round(drift, 2),
            rows=tuple(probe.row(inside) for probe in probes),
        )


class _Pace:
    """One product again and again, between everything else. Where cores are shared with others they compute at half
    their speed for a while; what is measured then is stated at the usual pace."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._operands = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 2048, dtype=dtype)
        self._seen: list[float] = []
        self._fixed = device.type != "cpu"

    def take(self) -> float:
        if self._fixed:
            return 1.0
        begin = time.perf_counter()
        torch.mm(*self._operands)
        self._seen.append(time.perf_counter() - begin)
        return self._seen[-1]

    def usual(self) -> float:
        return statistics.median(self._seen) if self._seen else 1.0

    def drift(self) -> float:
        ordered = sorted(self._seen)
        tenth = len(ordered) // 10
        return ordered[-1 - tenth] / ordered[tenth] if ordered else 1.0


class _Probe:
    def __init__(self, shape: ProductShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.seconds: Seconds = {}
        self.count = 0
        self.whole = 0.0
        """Seconds of a pass that is not timed operator by operator."""
        self._rounds: list[tuple[float, float, list[tuple[Work, float]]]] = []
        self._cuda = device.type == "cuda"
        module = Head(shape.width, shape.vocabulary) if shape.vocabulary else Block(shape.width)
        self._module = module.to(device, dtype)
        x = torch.randn(shape.batch, shape.seq, shape.width, generator=torch.Generator().manual_seed(0))
        self._input = x.to(device, dtype).requires_grad_()
        self.step()  # the first touches memory and sets libraries up

    def step(self) -> float:
        """Seconds of a pass."""
        begin = time.perf_counter()
        self._module(self._input).backward()
        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self._input.grad = None
        self._module.zero_grad()
        return seconds

    def run(self, pace: _Pace) -> None:
        seconds = self.step() if self.shape.width <= 64 else 0.0
        before = pace.take()
        with Timer(self._cuda) as timer:
            self.step()
        found = timer.take()
        self._rounds.append(((before + pace.take()) / 2, seconds, found))

    def forget(self) -> None:
        self._rounds.clear()

    def settle(self, usual: float) -> None:
        """Brings products to the usual pace; what waits for memory hardly depends on it."""
        self.seconds = defaultdict(list)
        for pace, _, found in self._rounds:
            for work, seconds in found:
                self.seconds[work].append(seconds * (usual / pace if work.flops else 1.0))
        self.count = len(self._rounds[0][2])
        self.whole = statistics.median(seconds for _, seconds, _ in self._rounds)

    def of(self, kind: str, inside: float) -> Iterable[tuple[Work, float, int]]:
        """Work of a kind, its median seconds without what calling it takes, and how often a pass does it."""
        rounds = len(self._rounds)
        for work, seconds in self.seconds.items():
            if work.kind == kind:
                middle = statistics.median(seconds)
                yield work, max(middle - inside, 0.1 * middle), len(seconds) // rounds

    def row(self, inside: float) -> dict[str, Any]:
        total = sum(sum(seconds) for seconds in self.seconds.values()) / len(self._rounds)
        values: dict[str, Any] = {"shape": str(self.shape), "seconds": total}
        for kind in (MATMUL, ATTENTION):
            done = [(w.flops * n, s * n) for w, s, n in self.of(kind, inside)]
            if done:
                values[kind] = sum(f for f, _ in done) / sum(s for _, s in done)
        _, moved, spent = _streamed(self, inside)
        values["pointwise"] = moved / spent
        return values


def _affordable(device: torch.device, dtype: torch.dtype, most: int, limit: float) -> list[_Probe]:
    probes: list[_Probe] = []
    rate = 0.0
    room = 10**9
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 4
    for shape in SHAPES[:most]:
        if shape.bytes > room or (rate and shape.flops / rate > limit):
            continue
        probe = _Probe(shape, device, dtype)
        seconds = min(
            probe.step() for _ in range(2)
        )  # the first makes what it needs, which no pass does again
        rate = max(rate, shape.flops / seconds)
        probes.append(probe)
    return probes


def _curve(probes: Iterable[_Probe], kind: str, inside: float, merge: float) -> Curve:
    """Points by operations a byte. Those that are close become one: the mean of seconds an operation, in which
    large work counts more, but not by its size: a head would outweigh all blocks."""
    points: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for probe in probes:
        for work, seconds, _ in probe.of(kind, inside):
            points[work.flops / work.bytes].append((math.sqrt(work.flops), seconds / work.flops))
    groups: list[list[float]] = []
    for x in sorted(points):
        if groups and x <= groups[-1][0] * merge:
            groups[-1].append(x)
        else:
            groups.append([x])
    curve = []
    for group in groups:
        costs = [cost for x in group for cost in points[x]]
        rate = sum(weight for weight, _ in costs) / sum(weight * cost for weight, cost in costs)
        curve.append((_rounded(statistics.mean(group)), _rounded(rate)))
    return tuple(curve)


Streamed = tuple[int, int, float]
"""Operators, bytes and seconds."""


def _streamed(probe: _Probe, inside: float) -> Streamed:
    done = list(probe.of("other", inside))
    return sum(n for _, _, n in done), sum(w.bytes * n for w, _, n in done), sum(s * n for _, s, n in done)


def _pointwise(probes: Sequence[_Probe], inside: float) -> tuple[float, float]:
    """Seconds an operator and bytes a second of all that only reads and writes, in a model of some blocks and a head."""
    found: dict[bool, list[Streamed]] = defaultdict(list)
    large = [p for p in probes if p.shape.batch * p.shape.seq * p.shape.width >= 1 << 18]
    for probe in large or probes[-1:]:
        found[bool(probe.shape.vocabulary)].append(_streamed(probe, inside))
    start = _start(found[False])
    moved = spent = 0.0
    for is_head, rows in found.items():
        weight = (1 if is_head else BLOCKS_A_HEAD) / max(len(rows), 1)
        moved += weight * sum(count for _, count, _ in rows)
        spent += weight * sum(max(seconds - start * n, 0.1 * seconds) for n, _, seconds in rows)
    return start, moved / spent


def _start(blocks: Sequence[Streamed]) -> float:
    """What operators take whatever their bytes are: by the straight line through blocks of different sizes, each as
    important as the others."""
    nn = nb = bb = ns = bs = 0.0
    for number, count, seconds in blocks:
        n, b = number / seconds, count / seconds
        nn, nb, bb, ns, bs = nn + n * n, nb + n * b, bb + b * b, ns + n, bs + b
    if nn * bb - nb * nb <= 1e-9 * nn * bb:
        return 0.0  # all of one size
    return max(0.0, (ns * bb - bs * nb) / (nn * bb - nb * nb))


def single_product(device: torch.device, dtypes: Mapping[str, torch.dtype], rounds: int) -> dict[str, float]:
    """Operations a second of one large product, by dtype, in turn."""
    found: dict[str, list[float]] = {name: [] for name in dtypes}
    flops = 2 * 512 * 1024 * 4096
    operands = {
        name: (
            torch.ones(512, 1024, dtype=dtype, device=device),
            torch.ones(1024, 4096, dtype=dtype, device=device),
        )
        for name, dtype in dtypes.items()
    }
    for number in range(rounds + 1):
        for name, (a, b) in operands.items():
            begin = time.perf_counter()
            torch.mm(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                found[name].append(flops / (time.perf_counter() - begin))
    return {name: statistics.median(rates) for name, rates in found.items()}


def _rounded(value: float) -> float:
    """To three digits: more would pretend."""
    return float(f"{value:.3g}")
