"""The file of a script's result: machine, versions, commit, command; a part for each measurement, written at once."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import provenance
from provenance import ROOT

RESULTS = provenance.RESULTS / "gpu"
SECONDS = 230.0
"""A script ends within four minutes."""


def source_of() -> str:
    """What of the project is measured, as a short hash of its source."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in (".py", ".cpp"):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


class Store:
    def __init__(self, folder: Path, name: str, question: str, commit: str, small: bool) -> None:
        self._file = folder / f"{name}.json"
        self._begin = time.monotonic()
        self.failed = False
        whence = provenance.provenance(
            f"python benchmarks/gpu/run_queue.py run {name}" + (" --small" if small else "")
        )
        self._found: dict[str, Any] = {
            "name": name,
            "question": question,
            **whence,
            "commit": commit or whence["commit"],
            "source": source_of(),
            "whole": False,
            "parts": {},
        }
        self._write()

    @property
    def left(self) -> float:
        """Seconds."""
        return SECONDS - (time.monotonic() - self._begin)

    def part(
        self, name: str, measure: Callable[[], dict[str, Any]], needs: float = 20.0, anothers: bool = False
    ) -> dict[str, Any]:
        """Stores what `measure` gives, or its error: one must not hide the others. `needs`: seconds, at least.
        `anothers`: it is somebody else's program, and that it fails is a result."""
        began = time.monotonic()
        found: dict[str, Any]
        if self.left < needs:
            found, anothers = {"error": f"not run: {self.left:.0f} s were left, it needs {needs:.0f}"}, False
        else:
            try:
                found = measure()
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
        self.failed |= "error" in found and not anothers
        found["took_seconds"] = time.monotonic() - began
        self._found["parts"][name] = found
        self._write()
        print(f"{name}: {json.dumps(found)[:600]}; {self.left:.0f} s left", flush=True)
        let_go()
        return found

    def parts(self) -> dict[str, dict[str, Any]]:
        return dict(self._found["parts"])

    def close(self) -> None:
        self._found["whole"] = not self.failed
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._found, indent=1) + "\n")


def let_go() -> None:
    """Of what the last measurement left, so that the next has the card to itself."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
