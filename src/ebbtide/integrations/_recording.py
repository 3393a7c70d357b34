"""What the frameworks' callbacks share: a run's folder, kept while a Trainer trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.engine import Engine
from ebbtide.engine.recording import Recording
from ebbtide.errors import ConfigError


class RecordedRun:
    """One for a callback."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder
        self._recording: Recording | None = None

    def begin(self, engine: Engine | None, trainer: str) -> None:
        if engine is None:
            raise ConfigError(
                f"recording into {str(self.folder)!r}: no engine has the model; take {trainer} of ebbtide.integrations"
            )
        self._recording = engine.record(self.folder)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        if self._recording is not None:
            numbers = {key: float(value) for key, value in metrics.items() if _is_number(value)}
            self._recording.mark("evaluated", **numbers)

    def saved(self, where: str) -> None:
        if self._recording is not None:
            self._recording.mark("checkpoint", folder=where)

    def end(self) -> None:
        """Also of a run that raised: what it had is kept."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (
        hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1
    )
