"""From a run's folder to its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbtide.errors import ConfigError
from ebbtide.report.figures import figures
from ebbtide.report.page import page
from ebbtide.report.run_files import RunFiles
from ebbtide.report.run_folder import replace
from ebbtide.report.run_verdict import run_verdict


def figures_of(run: RunFiles) -> dict[str, Any]:
    found = figures(run)
    return {**found, "verdict": run_verdict(run, found["recorded"]).plain()}


def write_page(found: dict[str, Any], path: Path) -> None:
    try:
        replace(path, page(found).encode())
    except OSError as error:
        raise ConfigError(
            f"report: {str(path)!r} cannot be written ({error.strerror}); name another file with --out"
        ) from None
