"""Ways to place and move model data, ours and others', as inputs of one planner and one simulator.

What distinguishes a strategy is a handful of facts: bytes a parameter, what a rank holds of a chunk, whether moves
are made ahead, where updates run. Others' are taken from their papers, not fitted to a machine:

- `patrickstar` (Fang et al. 2022): fp16 parameters, fp32 master, momentum and variance in chunks of one size, which is
  searched for least waste (6.1) and holds the largest tensor, embeddings excepted; gradients take the parameters'
  space, so 14 bytes a parameter; a communication group is one whole chunk of every rank, fetched together (6.2); moves
  and collectives happen when a chunk is accessed (Algorithm 1), updates after backward; while the warm-up iteration is
  traced, at most 20 % of the device holds model data (7.3).
- `angel-ptm` (Nie et al. 2023): pages of 4 MiB, fp32 master and moments beside fp16 parameters and gradients, 16
  bytes; moves and gathers scheduled ahead in two phases (Algorithm 1); optimizer state cached on the device where
  there is room; updates on the host beside the computation; SSD for what RAM cannot hold.
- `static` (ZeRO-Offload: Ren et al. 2021): fp16 parameters whole on every device, gradients and optimizer state in
  slices on the host, 2 + 12 bytes; updated there, then sent back.
- `all-on-device`: everything on every device, 2 + 2 + 12 bytes; gradients are summed over ranks while backward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ebbtide.config import Config
from ebbtide.errors import BudgetError, ConfigError
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.layout import (
    ALIGNMENT,
    ITEMSIZE,
    Layout,
    Slicing,
    TensorSpec,
    build_layout,
    grouped,
    joined,
    main_dtype,
    search_uniform,
    unit_elements,
)
from ebbtide.planner.shape import ModelShape, Settings, update_bytes
from ebbtide.units import format_size, round_up

WARM_UP_SHARE = 0.2
EMBEDDINGS = ("wte", "wpe", "embed", "shared.")
"""In names: what PatrickStar keeps out of chunks, so that it does not decide how large they are (v1, 7.2)."""


@dataclass(frozen=True)
class Model:
    """What is trained, as the planner sees it."""

    tensors: tuple[TensorSpec, ...]
    runs: tuple[tuple[int, ...], ...]
    expert: tuple[bool, ...] = ()
    """By tensor: it belongs to an expert, of which this rank holds its share; other ranks hold other experts."""
    alike: int = 1
    """Ranks that have the same experts, in slices."""

    @property
    def elements(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class Setup:
    """A strategy applied to a model and a machine."""

    layout: Layout
    shape: ModelShape
    settings: Settings
    update_bytes: tuple[int, ...]
    captured: tuple[int, ...] = ()
    blocking: bool = True
    all_reduce: bool = False
    lock_free: bool = False
    warm_up: int | None = None
    """Bytes of the device that model data may take before there is a trace."""
    chunk_size: int = 0
    exchange: int = 0
    """Bytes of the device that are kept for what ranks send each other of a chunk's gradients."""
    in_slices: bool = False
    """They exchange a slice at a time."""

    def exchanging(self, count: int) -> Setup:
        """`count` bytes of the device are kept for exchanges between ranks."""
        left = self.settings.device + self.exchange - count
        return replace(self, settings=replace(self.settings, device=left), exchange=count)

    def sliced(self) -> Setup | None:
        """What ranks go over to where whole chunks leave them no plan: one slice at a time has room, of as many
        slices as there are ranks. None where that is no less."""
        shape = self.shape
        shared = [g for g, whole in zip(shape.gradient_bytes, shape.whole_bytes, strict=False) if whole]
        count = max(shared, default=0)
        if self.in_slices or count >= self.exchange:
            return None
        return replace(self.exchanging(count), in_slices=True)


@dataclass(frozen=True)
class Ask:
    """Model, machine and settings."""

    model: Model
    machine: Machine
    config: Config

    @property
    def ranks(self) -> int:
        return self.machine.devices

    @property
    def device(self) -> int:
        return self.machine.device.memory - self.machine.device.reserved

    @property
    def host(self) -> int:
        """A device's share. Where the cores are the device, its memory is a part of the host's."""
        host = self.machine.host
        left = host.memory - host.reserved
        if self.machine.device.kind == "cpu":
            left -= self.machine.device.memory
        return max(0, left) // self.machine.devices_per_node

    @property
    def ssd(self) -> int:
        """A card reaches it through the host's memory."""
        beside = self.machine.device.kind == "cpu" or self.host > 0
        return self.machine.ssd.memory // self.machine.devices_per_node if beside else 0

    @property
    def master(self) -> str:
        return self.config.resolved_master

    @property
    def other_master(self) -> str:
        """Of systems that know no split master."""
        return "none" if self.config.precision == "fp32" else "separate"

    def settings(self, **changes: object) -> Settings:
        base = Settings(
            self.device,
            self.host,
            self.config.placement,
            self.config.eviction,
            self.config.prefetch,
            self.config.accumulate,
            self.config.updates == "in-backward",
            ssd=self.ssd,
            given={tier: getattr(self.machine, tier).memory for tier in ("device", "host", "ssd")},
            sharers=self.machine.devices_per_node,
        )
        return replace(base, **changes)  # type: ignore[arg-type]


def ebbtide(ask: Ask) -> Setup:
    config = ask.config
    specs = ask.model.tensors
    size = None if config.chunk_size == "auto" else unit_elements(specs, int(config.chunk_size))
    layout = _layout(ask.model, config.layout, size)
    in_parameter_space = (
        ask.master == "separate"
        and config.accumulate == 1
        and config.updates == "exact"
        and config.placement != "static"
        and ask.ranks == 1  # gradients that ranks share are reduced to a space of their own
    )
    settings = ask.settings(
        in_parameter_space=in_parameter_space,
        waiting_width=config.waiting_width,
        max_staleness=config.max_staleness,
        one_memory=ask.machine.device.kind == "cpu" and ask.ranks == 1,
    )
    one_tier = ask.machine.device.kind == "cpu" and settings.alone
    setup = _setup(
        ask,
        layout,
        ask.master,
        settings,
        captured=not one_tier,
        blocking=not config.prefetch,
        lock_free=config.updates == "lock-free",
    )
    return setup.exchanging(max(setup.shape.whole_bytes, default=0))


def patrickstar(ask: Ask) -> Setup:
    specs = ask.model.tensors
    warm_up = int(WARM_UP_SHARE * ask.device)
    inner = [spec for spec in specs if not any(part in spec.name for part in EMBEDDINGS)] or list(specs)
    largest = max(round_up(spec.numel, ALIGNMENT) for spec in inner)
    most = warm_up // ask.ranks // ITEMSIZE[main_dtype(specs)] // ALIGNMENT * ALIGNMENT
    size = search_uniform(inner, largest, most)
    layout = grouped(build_layout(specs, "chunk", size), ask.ranks)
    settings = ask.settings(
        placement="auto",
        eviction="farthest-next-use",
        prefetch=False,
        in_backward=False,
        in_parameter_space=ask.config.accumulate == 1 and ask.other_master == "separate",
        ssd=0,
    )
    setup = _setup(ask, layout, ask.other_master, settings, whole_slices=True)
    return replace(setup, warm_up=warm_up, chunk_size=size)


def angel_ptm(ask: Ask) -> Setup:
    layout = _layout(ask.model, "page", None)
    settings = ask.settings(placement="auto", eviction="farthest-next-use", prefetch=True, in_backward=False)
    lock_free = ask.config.updates == "lock-free"
    return _setup(ask, layout, ask.other_master, settings, blocking=False, lock_free=lock_free)


def static(ask: Ask) -> Setup:
    layout = _layout(ask.model, "chunk", None)
    settings = ask.settings(placement="static", returned=True, in_backward=False, ssd=0)
    return _setup(ask, layout, ask.other_master, settings)


def all_on_device(ask: Ask) -> Setup:
    layout = _layout(ask.model, "chunk", None)
    settings = ask.settings(placement="auto", in_backward=False, host=0, ssd=0)
    setup = _setup(
        replace(ask, machine=replace(ask.machine, nodes=1, devices_per_node=1)),
        layout,
        ask.other_master,
        settings,
    )
    return replace(setup, settings=settings, all_reduce=ask.ranks > 1, captured=())


STRATEGIES: dict[str, Callable[[Ask], Setup]] = {
    "ebbtide": ebbtide,
    "patrickstar": patrickstar,
    "angel-ptm": angel_ptm,
    "static": static,
    "all-on-device": all_on_device,
}


KNOW_EXPERTS = ("ebbtide", "angel-ptm", "static")


def set_up(strategy: str, ask: Ask) -> Setup:
    if strategy not in KNOW_EXPERTS and any(ask.model.expert):
        raise ConfigError(
            f"strategy {strategy!r} spreads no experts over ranks; expected one of {', '.join(KNOW_EXPERTS)}"
        )
    return STRATEGIES[strategy](ask)


def check_warm_up(setup: Setup) -> None:
    """The first iteration, which has no trace, within its share of the device."""
    if setup.warm_up is None:
        return
    shape = setup.shape
    largest = shape.largest
    if largest > setup.warm_up:
        raise BudgetError(
            f"device: a communication group has {format_size(largest)}, and the warm-up iteration gives model data "
            f"{format_size(setup.warm_up)} of the device: short by {format_size(largest - setup.warm_up)}",
            tier="device",
            short=int((largest - setup.warm_up) / WARM_UP_SHARE),
            advice="take fewer devices, or ones with more memory",
        )
    total = sum(shape.parameter_bytes) + sum(shape.state_bytes)
    short = total - setup.settings.host - setup.warm_up
    if short > 0:
        raise BudgetError(
            f"host: model data of {format_size(total)} a rank does not fit {format_size(setup.settings.host)} and the "
            f"warm-up share of the device: short by {format_size(short)}",
            tier="host",
            short=short,
            advice=f"raise host.memory by {short} bytes a device",
        )


def _setup(
    ask: Ask,
    layout: Layout,
    master: str,
    settings: Settings,
    *,
    captured: bool = True,
    blocking: bool = True,
    lock_free: bool = False,
    whole_slices: bool = False,
) -> Setup:
    model = ask.model
    trained = [False] * len(layout.chunks)
    for tensor in model.tensors:
        trained[layout.spans[tensor.name].chunk] |= tensor.trained
    shared = _shared(model, layout) if ask.ranks > 1 else frozenset()
    slices, whole, states = [], [], []
    moments = ask.config.optimizer.rule.state_bytes
    for chunk in layout.chunks:
        item = ITEMSIZE[chunk.dtype]
        ranks = ask.ranks if chunk.index in shared else model.alike
        count = chunk.size // ranks if whole_slices else Slicing(ranks).slice(chunk.size)
        state = (moments + _master_bytes(master, chunk.dtype)) * count if trained[chunk.index] else 0
        slices.append(count * item)
        whole.append((chunk.size if whole_slices else count * ranks) * item if ranks > 1 else 0)
        states.append(state)
    grads = [size if wanted else 0 for size, wanted in zip(slices, trained, strict=True)]
    places = tuple(layout.spans[tensor.name].chunk for tensor in model.tensors)
    run_chunks = tuple(tuple(sorted({places[p] for p in run})) for run in model.runs)
    pages, page_bytes = ((), ()) if shared else layout.stored
    sizes = tuple(tensor.numel * ITEMSIZE[tensor.dtype] for tensor in model.tensors)
    shape = ModelShape(
        run_chunks,
        places,
        tuple(slices),
        tuple(grads),
        tuple(states),
        tuple(whole) if shared else (),
        pages,
        page_bytes,
        tuple(n if one.trained else 0 for n, one in zip(sizes, model.tensors, strict=True)),
        tuple(map(tuple, model.runs)),
    )
    return Setup(
        layout,
        shape,
        settings,
        update_bytes(shape, master),
        sizes if captured else (),
        blocking,
        False,
        lock_free,
        None,
        layout.unit,
    )


def _master_bytes(master: str, dtype: str) -> int:
    """Of an element, beside the parameter."""
    return 0 if dtype == "fp32" else 2 if master == "split" else 4


def _shared(model: Model, layout: Layout) -> frozenset[int]:
    """The chunks that ranks hold slices of: all but experts'."""
    own = {
        layout.spans[tensor.name].chunk
        for tensor, expert in zip(model.tensors, model.expert or [False] * len(model.tensors), strict=True)
        if expert
    }
    return frozenset(range(len(layout.chunks))) - own


def _layout(model: Model, cut: str, size: int | None) -> Layout:
    """Experts' tensors and the others never share a chunk."""
    if not any(model.expert):
        return build_layout(model.tensors, cut, size)
    groups = [
        [tensor for tensor, expert in zip(model.tensors, model.expert, strict=True) if expert == wanted]
        for wanted in (False, True)
    ]
    return joined([build_layout(group, cut, size) for group in groups if group])
