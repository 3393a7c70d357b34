"""`train --log-moves`: what each chunk moved, step by step, as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from ebbtide.errors import ConfigError


class MovesLog:
    """A line for each step: what each chunk of this rank moved in it, over which link."""

    def __init__(self, path: Path | None) -> None:
        self._before: dict[int, dict[str, int]] = {}
        self._begun = False
        try:
            self._file: IO[str] | None = None if path is None else path.open("a")
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
        if not self._begun and self._file.seekable():
            self._file.truncate(0)  # only now: a run that is refused leaves another's lines as they were
        self._begun = True
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
