"""A run's lines as scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ebbtide.errors import ConfigError
from ebbtide.report.figures import own_seconds
from ebbtide.report.plain_files import is_number
from ebbtide.report.run_files import RunFiles

Scalar = tuple[str, float, int]
"""(tag, value, step)."""
PLAIN = ("loss", "grad_norm", "lr", "rss")
GROUPS = {"causes": "seconds", "bytes": "bytes", "peak": "peak"}
"""Tables of a line, and what their scalars are called."""


def write_scalars(run: RunFiles, folder: Path) -> int:
    """How many there are."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard: expected the package tensorboard, found none: pip install tensorboard"
        ) from None
    count = 0
    with SummaryWriter(str(folder)) as writer:
        for tag, value, step in scalars(run):
            writer.add_scalar(tag, value, step)
            count += 1
    return count


def scalars(run: RunFiles) -> Iterator[Scalar]:
    for line in run.steps:
        yield from _of_step(line)
    for event in run.events:
        for key, value in event.items():
            if key != "step" and is_number(value):
                yield f"{event['event']}/{key}", float(value), event["step"]


def _of_step(line: Mapping[str, Any]) -> Iterator[Scalar]:
    step = line["step"]
    for key in PLAIN:
        if is_number(line.get(key)):
            yield key, float(line[key]), step
    if line.get("tokens") and "seconds" in line:
        yield "tokens_per_second", line["tokens"] / own_seconds(line), step
    for key, name in GROUPS.items():
        for what, value in line.get(key, {}).items():
            if is_number(value):
                yield f"{name}/{what}", float(value), step
