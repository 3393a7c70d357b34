"""A run's folder: metrics as they come, then a model that `--model FOLDER` starts from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch

from ebbtide.cli.loop import Step, Training


class Metrics:
    """`metrics.jsonl`, a line for each step; nothing without a folder."""

    def __init__(self, folder: Path | None, before: Iterable[Step] = ()) -> None:
        """`before`: the steps that a run which goes on has behind it."""
        self._file: IO[str] | None = None if folder is None else (folder / "metrics.jsonl").open("w")
        for step in before:
            self.add(step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, step: Step) -> None:
        if self._file is not None:
            found = {key: value for key, value in asdict(step).items() if value is not None}
            print(json.dumps(found), file=self._file, flush=True)


def save_model(training: Training, folder: Path) -> None:
    """Master weights in safetensors beside the model's config."""
    training.engine.export(folder, torch.float32)
