"""Answers for one model: traced once for each kind of input, planned and simulated for each machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.config import Config, Grown
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.forecasting.deep_models import SHALLOW, foresee, layers_alike
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.outlook import Outlook, Question, look
from ebbtide.forecasting.simulation.strategies import Ask, Model
from ebbtide.forecasting.simulation.verdict import Lift, lifts, more_memory, sentence
from ebbtide.layout import expert_sets
from ebbtide.models import ModelSpec, find_model
from ebbtide.models.recompute import checkpoint_activations as checkpoint
from ebbtide.nn.head_loss import LossInPieces, best_loss, obstacle
from ebbtide.planner.activation_trips import ALL, CHECKPOINTS, OFF
from ebbtide.planner.record import Record
from ebbtide.runtime.parameters.compiled_blocks import choose_blocks
from ebbtide.strict import Auto
from ebbtide.tracing.device_rules import RULES
from ebbtide.tracing.standalone import Trace, trace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Workload:
    """What a device is given."""

    batch: int = 1
    seq: int = 1024
    checkpoint_activations: bool = False
    offload_activations: bool = False

    def __post_init__(self) -> None:
        for flag, value, least in (("--batch", self.batch, 1), ("--seq", self.seq, 2)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{flag}: expected a whole number of at least {least}, found {value!r}")


@dataclass(frozen=True)
class Seen:
    """A model's traced iteration, as a rank sees it."""

    name: str
    trace: Trace
    params: int
    """Of the whole model; a rank may hold a share of its experts."""
    tokens: int
    expert: tuple[bool, ...]
    alike: int
    """Ranks that have the same experts."""
    sent: int
    """Bytes of tokens that a layer of experts exchanges, one way."""
    seconds: float


@dataclass(frozen=True)
class Largest:
    params: int
    layers: int | None
    batch: int

    def to_dict(self) -> dict[str, int | None]:
        return {"params": self.params, "layers": self.layers, "batch": self.batch}


@dataclass(frozen=True)
class Forecast:
    """The answer; `outlook` has all that the simulation gave."""

    model: str
    machine: str
    gpus: int
    workload: Workload
    outlook: Outlook
    trace_seconds: float
    plan_seconds: float
    max: Largest | None = None
    lifts: tuple[Lift, ...] = ()
    would_fit: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """What the simulation gave can be asked for here, too: `forecast.step_seconds`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.outlook, name)

    @property
    def verdict(self) -> str:
        text = sentence(self.outlook, list(self.lifts))
        return text + (f"; it would with {' or '.join(self.would_fit)}" if self.would_fit else "")

    def to_dict(self) -> dict[str, Any]:
        found = self.outlook
        short = found.short
        return {
            "model": self.model,
            "machine": self.machine,
            "gpus": self.gpus,
            "strategy": found.strategy,
            "batch": self.workload.batch,
            "seq": self.workload.seq,
            "checkpoint_activations": self.workload.checkpoint_activations,
            "offload_activations": self.workload.offload_activations,
            "fits": found.fits,
            "verdict": self.verdict,
            "short": None
            if short is None
            else {"tier": short.tier, "bytes": short.bytes, "message": short.message},
            "would_fit": list(self.would_fit),
            "bytes": {tier: dict(tags) for tier, tags in found.bytes.items()},
            "peak_bytes": {tier: sum(tags.values()) for tier, tags in found.bytes.items()},
            "moved_bytes": dict(found.moved_bytes),
            "ssd_written_bytes": found.ssd_written,
            "endurance_days": found.endurance_days,
            "params": found.params,
            "chunk_size": found.chunk_size,
            "utilisation": found.utilisation,
            "margin_chunks": found.margin_chunks,
            "step_seconds": found.step_seconds,
            "tokens_per_second": found.tokens_per_second,
            "tflops_per_device": found.tflops_per_device,
            "bound_seconds": found.bound_seconds,
            "achieved_over_bound": found.achieved_over_bound,
            "must_seconds": dict(found.must_seconds),
            "bottleneck": found.bottleneck,
            "busy_seconds": dict(found.busy_seconds),
            "critical_seconds": dict(found.critical_seconds),
            "stalls": [vars_of(stall) for stall in found.stalls],
            "staleness": found.staleness,
            "exchange_in_slices": found.exchange_in_slices,
            "lifts": [vars_of(lift) for lift in self.lifts],
            "max": None if self.max is None else self.max.to_dict(),
            "notes": list(self.notes),
            "trace_seconds": self.trace_seconds,
            "plan_seconds": self.plan_seconds,
        }


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


class Forecaster:
    """Answers for one model; what was traced is kept."""

    def __init__(
        self,
        model: str | ModelSpec | nn.Module | Callable[[], nn.Module],
        config: Config | Mapping[str, object] | str | Path | None = None,
        example: Any = None,
        tokens: int | None = None,
    ) -> None:
        self.config = Config.read(config)
        self.spec = (
            find_model(model) if isinstance(model, str) else model if isinstance(model, ModelSpec) else None
        )
        self._model = None if self.spec is not None else model
        self._example, self._tokens = example, tokens
        self._seen: dict[tuple[object, ...], Seen] = {}
        self._shallow: dict[tuple[object, ...], list[Trace]] = {}
        self._alike: bool | None = None
        """Whether the model's layers are alike; None until a deep one has been asked for."""
        if self.spec is None and example is None:
            raise ConfigError(
                "a module needs an example of its input: forecast(module, machine, example={...})"
            )

    @property
    def name(self) -> str:
        return self.spec.name if self.spec is not None else type(self._model).__name__

    # -- tracing --------------------------------------------------------------------------------------

    def see(
        self, work: Workload, machine: Machine, layers: int | None = None, strategy: str = "ebbtide"
    ) -> Seen:
        shared = machine.devices if self.spec is not None and self.spec.experts else 1
        sets = self._expert_sets(shared, strategy)
        target = machine.device.kind
        saved = self._offload(work) != OFF
        key = (work.batch, work.seq, work.checkpoint_activations, shared, sets, layers, target, saved)
        if key not in self._seen:
            start = time.perf_counter()
            seen = (
                self._of_spec(work, shared, sets, layers, target, saved)
                if self.spec is not None
                else self._of_module(work, target, saved)
            )
            self._seen[key] = replace(seen, seconds=time.perf_counter() - start)
        return self._seen[key]

    def _expert_sets(self, ranks: int, strategy: str) -> int:
        """As the engine has experts: in as many sets as they and the ranks can be divided by, and gathered by all ranks
        where the config says so or updates are in backward. Others spread them always."""
        if self.spec is None or not self.spec.experts:
            return 1
        gathered = self.config.experts != "spread" or self.config.updates == "in-backward"
        return 1 if gathered and strategy == "ebbtide" else expert_sets(self.spec.experts, ranks)

    def _of_spec(
        self, work: Workload, ranks: int, shares: int, layers: int | None, target: str, saved: bool
    ) -> Seen:
        assert self.spec is not None
        spec = self.spec if layers is None else self.spec.with_layers(layers)
        dtype = DTYPES[self.config.precision]
        traced = self._traced(spec, work, shares, target, saved)
        spread = spec.experts and (shares > 1 or ranks == 1)
        expert = tuple(".experts." in tensor.name for tensor in traced.tensors) if spread else ()
        tokens = spec.tokens(work.batch, work.seq)
        sent = tokens * int(getattr(spec.config, "hidden_size", 0)) * dtype.itemsize
        sent *= int(getattr(spec.config, "num_experts_per_tok", 1) or 1)
        params = spec.parameters if spec.experts else sum(tensor.numel for tensor in traced.tensors)
        return Seen(
            spec.name, traced, params, tokens, expert, ranks // shares, sent if any(expert) else 0, 0.0
        )

    def _traced(self, spec: ModelSpec, work: Workload, shares: int, target: str, saved: bool) -> Trace:
        foreseen = self._foreseen(spec, work, shares, target, saved)
        if foreseen is not None:
            return foreseen
        share = spec.share_of_experts(shares)
        module = share.on_meta()
        if work.checkpoint_activations:
            checkpoint(module, spec.name)
        if best_loss(self.config.loss, module) == "pieces" and not obstacle(
            module
        ):  # as `ebbtide train` does
            LossInPieces(module)
        dtype = DTYPES[self.config.precision]
        example = share.example(work.batch, work.seq, dtype)
        # With its experts spread a model runs as it is written.
        blocks = self._blocks(module) if shares == 1 else []
        return trace(module, example, dtype, False, target, saved, blocks)

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        """Those that the engine would run compiled."""
        return [block.module for block in choose_blocks(module, self.config.compile == "blocks", ()).all]

    def _foreseen(
        self, spec: ModelSpec, work: Workload, shares: int, target: str, saved: bool
    ) -> Trace | None:
        """From traces of few layers, where all are alike: the first deep model that is asked for shows it."""
        if spec.layers <= sum(SHALLOW) or self._alike is False:
            return None
        found = foresee(self._few(work, shares, target, saved), spec.layers)
        if self._alike is None:
            module = spec.share_of_experts(shares).on_meta()
            shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
            same = found is not None and [(t.name, t.shape) for t in found.tensors] == shapes
            self._alike = same and layers_alike(module, spec.config, spec.layers)
        return found if self._alike else None

    def _few(self, work: Workload, shares: int, target: str, saved: bool) -> list[Trace]:
        """Of the same model with few layers."""
        assert self.spec is not None
        key = (work.batch, work.seq, work.checkpoint_activations, shares, target, saved)
        if key not in self._shallow:
            specs = [self.spec.with_layers(layers) for layers in SHALLOW]
            self._shallow[key] = [self._traced(spec, work, shares, target, saved) for spec in specs]
        return self._shallow[key]

    def with_layers(self, layers: int) -> Forecaster:
        """For the same model with so many layers; what was traced of few serves it, too."""
        assert self.spec is not None
        other = Forecaster(self.spec.with_layers(layers), self.config)
        other._shallow = self._shallow
        return other

    def _of_module(self, work: Workload, target: str, saved: bool) -> Seen:
        module = self._model if isinstance(self._model, nn.Module) else self._built()
        found = {p.dtype for p in module.parameters() if p.dtype.is_floating_point}
        dtype = DTYPES[self.config.precision] if len(found) == 1 else None
        with _checkpointed(module, work.checkpoint_activations):
            blocks = self._blocks(module)
            traced = trace(module, self._example, dtype, target=target, saved=saved, blocks=blocks)
        tokens = self._tokens if self._tokens is not None else _positions(self._example)
        return Seen(
            type(module).__name__, traced, sum(t.numel for t in traced.tensors), tokens, (), 1, 0, 0.0
        )

    def _built(self) -> nn.Module:
        assert callable(self._model)
        with torch.device("meta"):
            module = self._model()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"model: expected a function that builds an nn.Module, it gave a {type(module).__name__}"
            )
        return module

    # -- answers --------------------------------------------------------------------------------------

    def question(
        self, machine: Machine, work: Workload, strategy: str, layers: int | None = None
    ) -> Question:
        machine = self.budgeted(machine)
        seen = self.see(work, machine, layers, strategy)
        record = seen.trace.record
        model = Model(seen.trace.tensors, seen.trace.runs, seen.expert, seen.alike)
        exchanges = _exchanges(record, seen) if machine.devices > 1 else {}
        ask = Ask(model, machine, self.config)
        return Question(ask, record, seen.tokens, exchanges, strategy, self._offload(work), seen.params)

    def answer(
        self, machine: Machine, work: Workload, strategy: str = "ebbtide", explain: bool = True
    ) -> Forecast:
        machine = self.budgeted(machine)
        question = self.question(machine, work, strategy)
        seen = self.see(work, machine, strategy=strategy)
        start = time.perf_counter()
        found = look(question)
        lifted = tuple(lifts(question, found)) if explain and found.fits else ()
        would = tuple(self._would_fit(machine, work, strategy, found)) if explain and not found.fits else ()
        seconds = time.perf_counter() - start
        rules = RULES.get(machine.device.kind)
        notes = (seen.trace.note, rules.note if rules else "", *self._not_foreseen(machine, work, found))
        return Forecast(
            seen.name,
            machine.name,
            machine.devices,
            work,
            found,
            seen.seconds,
            seconds,
            None,
            lifted,
            would,
            tuple(note for note in notes if note),
        )

    def budgeted(self, machine: Machine) -> Machine:
        """With the budgets that the config sets. Config and machine both say how much SSD there is, and none is what a
        config says that does not speak of it: then it is the machine's."""
        config = self.config
        return machine.with_memory(
            _said(config.device.memory), _said(config.host.memory), _said(config.ssd.memory) or None
        )

    def _offload(self, work: Workload) -> str:
        """Which activations leave the device."""
        return ALL if work.offload_activations else self.config.offload_activations

    def _not_foreseen(self, machine: Machine, work: Workload, found: Outlook) -> Iterator[str]:
        """What the config says that a forecast cannot follow."""
        config, measured = self.config, machine.device.precision
        if measured not in (None, config.precision):
            yield (
                f"precision = {config.precision!r}, and {machine.name} was measured in {measured}: "
                "times may be far from these"
            )
        if config.unmanaged or config.host_modules:
            yield "unmanaged and host_modules are not foreseen: all parameters are planned in chunks"
        which, away = self._offload(work), None if found.plan is None else found.plan.away
        if which == CHECKPOINTS and not work.checkpoint_activations:
            yield 'offload_activations = "checkpoints" sends nothing away without checkpoints'
        elif away is not None and not away.sizes:
            yield "nothing of what forward saves could be traced: no activations are foreseen to leave the device"
        if not config.ssd.memory and any(found.bytes.get("ssd", {}).values()):
            yield "the plan uses the machine's SSD; training does where the config sets ssd.memory and ssd.folder"

    def _would_fit(self, machine: Machine, work: Workload, strategy: str, found: Outlook) -> list[str]:
        """Changes of the workload, and of memory, with which it fits."""
        assert found.short is not None
        fitting = []
        other = replace(work, checkpoint_activations=True)
        if not work.checkpoint_activations and (self.spec is not None or _can_checkpoint(self._model)):
            # Some models cannot: then this is no advice.
            with suppress(UnsupportedError):
                if look(self.question(machine, other, strategy), quick=True).fits:
                    fitting.append("--checkpoint-activations")
        batch = work.batch // 2
        while batch and found.short.tier == "device" and self.spec is not None:
            if look(self.question(machine, replace(work, batch=batch), strategy), quick=True).fits:
                fitting.append(f"--batch {batch}")
                break
            batch //= 2
        fitting += more_memory(self.question(machine, work, strategy), found)
        return fitting


@contextmanager
def _checkpointed(module: nn.Module, wanted: bool) -> Iterator[None]:
    """The user's module is as it was afterwards."""
    if not wanted or getattr(module, "is_gradient_checkpointing", False):
        yield
        return
    checkpoint(module, type(module).__name__)
    try:
        yield
    finally:
        module.gradient_checkpointing_disable()  # type: ignore[operator]


def _positions(example: Any) -> int:
    """What a batch trains, where nobody says: token ids, else rows."""
    values = [value for value in tree_leaves(example) if isinstance(value, torch.Tensor)]
    ids = next((value for value in values if not value.is_floating_point() and value.dim() > 1), None)
    return ids.numel() if ids is not None else next((len(value) for value in values if value.dim()), 1)


def _said(budget: int | Auto | Grown) -> int | None:
    return budget if isinstance(budget, int) else None


def _can_checkpoint(model: object) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def _exchanges(record: Record, seen: Seen) -> dict[int, int]:
    """Tokens go to their experts before a layer of experts begins, and come back when it has ended."""
    if not seen.sent:
        return {}
    sparse = [any(seen.expert[p] for p in run) for run in seen.trace.runs]
    found: dict[int, int] = {}
    inside = False
    for access in record.accesses:
        if sparse[access.run] != inside:
            inside = not inside
            found[access.first] = found.get(access.first, 0) + seen.sent
    return found
