"""From flags to a config and checked numbers; an error names the flag, not the key behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbtide.config import Config
from ebbtide.errors import ConfigError, nearest

SIZE = "such as 24GB or 512MiB"
CHECKPOINTS = "checkpoints"
"""In --out."""

CONFIG_KEYS = {
    "--precision": "precision",
    "--master": "master",
    "--layout": "layout",
    "--chunk-size": "chunk_size",
    "--placement": "placement",
    "--eviction": "eviction",
    "--prefetch": "prefetch",
    "--updates": "updates",
    "--offload-activations": "offload_activations",
    "--max-staleness": "max_staleness",
    "--accumulate": "accumulate",
    "--clip": "clip",
    "--lr": "optimizer.lr",
    "--device": "device.kind",
    "--device-memory": "device.memory",
    "--host-memory": "host.memory",
    "--ssd-memory": "ssd.memory",
    "--ssd-dir": "ssd.folder",
}
OFFLOAD, AUTO = "--offload-activations", "auto"
SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class TrainTask:
    """What is trained on what, and for how long; where it lies is the config's."""

    model: str
    data: str | None
    steps: int
    batch: int
    seq: int
    seed: int = 0
    schedule: str = "constant"
    eval_every: int = 0
    checkpoint_activations: bool = False
    save_every: int = 0
    keep: int = 2
    """Checkpoints."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            at_least(f"--{name}", getattr(self, name), 1)
        at_least("--seq", self.seq, 2)
        at_least("--seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"--seed: expected a whole number below 2**63, found {self.seed}")
        if self.data == "":
            raise ConfigError("--data: expected a text file or folder, found an empty path")
        at_least("--eval-every", self.eval_every, 0)
        at_least("--save-every", self.save_every, 0)
        at_least("--keep", self.keep, 1)
        one_of("--schedule", self.schedule, SCHEDULES)


def at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag}: expected a whole number of at least {least}, found {value}")


def one_of(flag: str, value: str, choices: Iterable[str]) -> str:
    if value in (known := list(choices)):
        return value
    allowed = ", ".join(f"'{choice}'" for choice in known)
    raise ConfigError(f"{flag}: expected one of {allowed}, found {value!r}{nearest(value, known)}")


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """No flag of typer's may have its value left out: a bare --offload-activations of `train` gets one."""
    made = list(arguments)
    for place, argument in enumerate(made):
        alone = argument == OFFLOAD and (place + 1 == len(made) or made[place + 1].startswith("--"))
        if alone and made[0] == "train":
            made[place] = f"{OFFLOAD}={AUTO}"
    return made


def offloaded(value: str | None, checkpointed: bool) -> str | None:
    """What --offload-activations asks for; bare, it is what there is to offload."""
    if value is None:
        return None
    if one_of(OFFLOAD, value, (AUTO, "checkpoints", "all", "off")) == AUTO:
        return "checkpoints" if checkpointed else "all"
    if value == "checkpoints" and not checkpointed:
        raise ConfigError(
            f"{OFFLOAD}: expected --checkpoint-activations beside 'checkpoints', for without it there are none, or 'all'"
        )
    return value


def configure(file: Path | None, flags: Mapping[str, object]) -> Config:
    """The config file's settings, with the flags that were given (those that are not None) in their place."""
    given = {flag: value for flag, value in flags.items() if value is not None}
    config = Config.read(file)
    try:
        return config.with_({CONFIG_KEYS[flag]: value for flag, value in given.items()})
    except ConfigError as error:
        message = str(error)
        for flag in given:
            message = message.replace(f"config key '{CONFIG_KEYS[flag]}'", flag)
        raise ConfigError(message) from None
