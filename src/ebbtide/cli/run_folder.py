"""A run's folder: metrics as they come, then a model that `--model FOLDER` starts from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch

from ebbtide.cli.loop import Step, Training
from ebbtide.errors import ConfigError


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


class MovesLog:
    """A line for each step: what each chunk of this rank moved in it, over which link."""

    def __init__(self, path: Path | None) -> None:
        self._before: dict[int, dict[str, int]] = {}
        try:
            self._file: IO[str] | None = None if path is None else path.open("w")
        except OSError as error:
            raise ConfigError(
                f"--log-moves: {path} cannot be written ({error.strerror}); name a file in a folder that can"
            ) from None

    def __enter__(self) -> MovesLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, step: int, moved: dict[int, dict[str, int]]) -> None:
        """`moved`: bytes by chunk and link since the beginning."""
        if self._file is None:
            return
        before, self._before = self._before, moved
        new = {
            chunk: {
                link: count - before.get(chunk, {}).get(link, 0)
                for link, count in links.items()
                if count > before.get(chunk, {}).get(link, 0)
            }
            for chunk, links in moved.items()
        }
        line = {"step": step, "moved": {chunk: links for chunk, links in new.items() if links}}
        print(json.dumps(line), file=self._file, flush=True)


def save_model(training: Training, folder: Path) -> None:
    """Master weights in safetensors beside the model's config."""
    training.engine.export(folder, torch.float32)
