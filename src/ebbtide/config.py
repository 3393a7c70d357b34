"""The settings of a run.

Which of the settings an engine can carry out is the engine's to say: names are stable, features arrive one
by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ebbtide.errors import ConfigError
from ebbtide.strict import (
    Auto,
    Section,
    build,
    choice,
    flag,
    folders,
    number,
    optional,
    pair,
    patterns,
    plain,
    read_file,
    refuse,
    size,
    text,
    unknown,
    whole,
)
from ebbtide.update_rules import UPDATE_RULES, RuleFacts

_fraction = number("a number in [0, 1)", lambda x: 0 <= x < 1)
_positive = number("a number above zero", lambda x: x > 0)
_not_negative = number("a number of at least zero", lambda x: x >= 0)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    path: ClassVar[str] = "optimizer"

    name: Annotated[str, choice(*UPDATE_RULES)] = "adamw"
    """The update rule. What is left out of its settings is torch.optim's default for the rule."""
    lr: Annotated[float, optional(_not_negative)] = None  # type: ignore[assignment]
    """Learning rate. A scheduler or a param group may change it."""
    betas: Annotated[tuple[float, float], optional(pair(_fraction))] = None  # type: ignore[assignment]
    """How much of the averages of gradients and of their squares stays at each update."""
    eps: Annotated[float, optional(_positive)] = None  # type: ignore[assignment]
    """Added to the denominator of adam and adamw."""
    momentum: Annotated[float, optional(_fraction)] = None  # type: ignore[assignment]
    """Of sgd: how much of the last update goes into the next one."""
    weight_decay: Annotated[float, optional(_not_negative)] = None  # type: ignore[assignment]
    """Decay of the weights: decoupled in adamw and lion, added to the gradient in adam and sgd."""
    follows: ClassVar[tuple[str, ...]] = ()
    """Settings that were left out."""

    @property
    def rule(self) -> RuleFacts:
        return UPDATE_RULES[self.name]

    @property
    def settings(self) -> dict[str, Any]:
        """Those that the rule reads."""
        return {key: getattr(self, key) for key in self.rule.defaults}

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None} - {"name"}
        for key in sorted(given - self.rule.defaults.keys()):
            known = ", ".join(self.rule.defaults)
            raise refuse(self.key(key), getattr(self, key), f"none: the rule {self.name!r} reads {known}")
        left_out = tuple(key for key in self.rule.defaults if key not in given)
        object.__setattr__(self, "follows", left_out)
        for key in left_out:
            object.__setattr__(self, key, self.rule.defaults[key])


Grown = Literal["least", "half"]
"""Budgets that the engine finds: they grow until a batch fits."""


@dataclass(frozen=True)
class DeviceConfig(Section):
    path: ClassVar[str] = "device"

    kind: Annotated[str, choice("auto", "cuda", "cpu")] = "auto"
    """Where the model computes; `auto`: on the GPU where there is one."""
    memory: Annotated[int | Auto | Grown, size(least=1, words=("least", "half"))] = "auto"
    """The whole budget: chunks and non-model data. `least`: what the batches turn out to need, no more; `half`: that,
    and half of the model data."""


@dataclass(frozen=True)
class HostConfig(Section):
    path: ClassVar[str] = "host"

    memory: Annotated[int | Auto, size(least=0)] = "auto"
    """RAM beside the device, for all ranks of the machine together. `auto`: most of what is free; on a CPU, where device
    and host are the same RAM, what `device.memory` leaves, and 0 where that is not set."""


@dataclass(frozen=True)
class SsdConfig(Section):
    path: ClassVar[str] = "ssd"

    folder: Annotated[tuple[str, ...], folders] = ()
    """One on each disk, all used alike; a string for a single one."""
    memory: Annotated[int | Auto, optional(size(least=0))] = None  # type: ignore[assignment]
    """Of all folders together. Left out, `auto` where a folder is named, and else 0."""
    checksums: Annotated[bool, flag] = False
    """What is read is compared with what was written."""
    endurance: Annotated[int, size(least=0, auto=False)] = 0
    """Bytes that may be written in the disks' life (TBW), such as '600TB'; 0: not known."""
    follows: ClassVar[tuple[str, ...]] = ()
    """Settings that were left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "follows", ("memory",) if self.memory is None else ())
        if self.follows:
            object.__setattr__(self, "memory", "auto" if self.folder else 0)


@dataclass(frozen=True)
class Config(Section):
    precision: Annotated[str, choice("bf16", "fp16", "fp32")] = "bf16"
    """The dtype that the model computes in. A module that mixes dtypes keeps them parameter by parameter."""
    master: Annotated[str, choice("auto", "split", "separate")] = "auto"
    """How fp32 masters are kept: `split` beside a bf16 parameter as its other 16 bits, `separate` as a whole tensor."""
    layout: Annotated[str, choice("chunk", "page", "tensor")] = "chunk"
    """How tensors are cut into chunks: `chunk`: several in one, `page`: small pages of one size, `tensor`: one each."""
    chunk_size: Annotated[int | Auto, size(least=1)] = "auto"
    """Bytes of a chunk at parameter precision; of a page where the layout is `page`."""
    placement: Annotated[str, choice("auto", "host", "static")] = "auto"
    """Where optimizer state lives: `auto`: where least moves, `host`: never on the device. `static`: all parameters
    stay on the device."""
    eviction: Annotated[str, choice("farthest-next-use", "lru", "list-order")] = "farthest-next-use"
    """Which chunk leaves the device when room is short."""
    prefetch: Annotated[bool, flag] = True
    """Whether chunks come before they are needed; without it every move happens on demand, for comparison."""
    warmup_share: Annotated[float, number("a share in (0, 1]", lambda x: 0 < x <= 1)] = 0.2
    """The share of the device that model data may take in a first pass that could not be traced."""
    nonfinite: Annotated[str, choice("stop", "continue")] = "stop"
    """What a gradient that is not finite does: `stop` raises, `continue` leaves the step out."""
    updates: Annotated[str, choice("exact", "in-backward", "lock-free")] = "exact"
    """When weights are updated: `exact` by `step()`, `in-backward` as gradients come, `lock-free` behind the passes."""
    max_staleness: Annotated[int, whole()] = 4
    """Of lock-free updates: how many steps' gradients the values of a pass may lack."""
    accumulate: Annotated[int, whole(most=1_000_000)] = 1
    """Backward passes whose mean gradient makes one update."""
    clip: Annotated[float | None, optional(_not_negative)] = None
    """Gradients are scaled down to this global norm; absent or 0: no clipping."""
    clip_value: Annotated[float | None, optional(_not_negative)] = None
    """Each element of the mean gradient is kept within it, up and down; absent or 0: no clipping."""
    compile: Annotated[str, choice("off", "blocks")] = "off"
    """`blocks`: torch.compile for the blocks that repeat. Blocks that the script has compiled run compiled anyway."""
    loss: Annotated[str, choice("auto", "whole", "pieces")] = "auto"
    """Head and loss of a causal model by blocks of tokens, where all logits would be larger than a block: `pieces`.
    `auto`: where the loop is `ebbtide train` or Hugging Face's Trainer, which read no logits; else `whole`."""
    unmanaged: Annotated[tuple[str, ...], patterns] = ()
    """Name patterns of parameters that stay on the device as plain tensors, outside the chunks."""
    host_modules: Annotated[tuple[str, ...], patterns] = ()
    """Name patterns of modules that compute on the host, where their weights live (large embeddings)."""
    offload_activations: Annotated[str, choice("off", "checkpoints", "all")] = "off"
    """What forward saves for backward goes to the host in between: inputs of checkpointed regions, or everything."""
    experts: Annotated[str, choice("spread", "gathered")] = "spread"
    """On several ranks: each has some experts of a layer and tokens go to them, where the layer is known and its experts
    divide by the ranks; or they are gathered like everything else."""
    threads: Annotated[int | Auto, whole(auto=True, most=1024)] = "auto"
    """Intra-op threads, fixed for the whole run: their number changes gradients."""
    machine: Annotated[str, text] = ""
    """A machine file: plans are chosen by the time that they take there; left out, by the bytes that they move."""
    poison: Annotated[bool, flag] = False
    """For tests: freed slots are filled with NaN."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    host: HostConfig = field(default_factory=HostConfig)
    ssd: SsdConfig = field(default_factory=SsdConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("clip", "clip_value"):
            if not getattr(self, key):
                object.__setattr__(self, key, None)
        if self.clip is not None and self.clip_value is not None:
            raise refuse(self.key("clip_value"), self.clip_value, "one of clip and clip_value, found both")
        if self.precision == "fp16" and self.master == "split":
            raise refuse(
                self.key("master"),
                "split",
                "'separate' or 'auto' with precision 'fp16': its bits are no half of fp32's",
            )
        if self.precision == "fp32" and self.master != "auto":
            raise refuse(
                self.key("master"), self.master, "'auto' with precision 'fp32': there is no master to keep"
            )
        if self.updates == "in-backward" and self.clip is not None:
            raise refuse(
                self.key("clip"),
                self.clip,
                "no clipping with updates 'in-backward': the norm is known only after backward",
            )
        if self.updates == "in-backward" and self.nonfinite == "continue":
            raise refuse(
                self.key("nonfinite"),
                self.nonfinite,
                "'stop' with updates 'in-backward': weights change before all gradients are known",
            )
        if self.updates == "in-backward" and self.accumulate > 1:
            raise refuse(
                self.key("accumulate"),
                self.accumulate,
                "1 with updates 'in-backward': every backward changes the weights",
            )

    @property
    def resolved_master(self) -> Literal["split", "separate", "none"]:
        if self.precision == "fp32":
            return "none"
        if self.master == "separate" or self.precision == "fp16":
            return "separate"
        return "split"

    @property
    def waiting_width(self) -> int:
        """Bytes that hold a byte of a gradient while it waits for a lock-free update; 0 where updates are not. Sums of
        several fp16 gradients would overflow, for their scale is made as large as one of them allows."""
        return 0 if self.updates != "lock-free" else 2 if self.precision == "fp16" else 1

    @classmethod
    def read(cls, source: Config | Mapping[str, object] | str | Path | None = None) -> Config:
        """From a config, a dict, a TOML or JSON file; None gives the defaults."""
        if isinstance(source, Config):
            return source
        if source is None:
            return cls()
        if isinstance(source, str | Path):
            path = Path(source)
            try:
                return build(cls, read_file(path, "config"))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
        if isinstance(source, Mapping):
            return build(cls, source)
        raise ConfigError(
            f"expected a Config, a dict or the path of a TOML or JSON file, found a {type(source).__name__}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and TOML can hold; `read` gives an equal config back."""
        return plain(self)

    def _as_asked(self) -> dict[str, Any]:
        """As `to_dict`, without what follows from other keys: that is to follow from the changed ones."""
        asked = self.to_dict()
        for table in ("optimizer", "ssd"):
            for key in getattr(self, table).follows:
                del asked[table][key]
        return asked

    def with_(self, changes: Mapping[str, object]) -> Config:
        """A copy with some keys changed; keys inside tables are dotted: `{"device.memory": "1GB"}`."""
        changed = self._as_asked()
        for key, value in changes.items():
            *tables, last = key.split(".")
            table = changed
            for name in tables:
                table = table.setdefault(name, {})
                if not isinstance(table, dict):
                    raise unknown(Config, key)
            table[last] = value
        return Config.read(changed)
