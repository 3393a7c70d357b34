"""From a run's folder to its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbtide.errors import ConfigError
from ebbtide.report.figures import figures
from ebbtide.report.page import page
from ebbtide.report.plain_files import replace
from ebbtide.report.run_files import RunFiles
from ebbtide.report.run_verdict import run_verdict
from ebbtide.report.what_if import WhatIf, what_if


def figures_of(run: RunFiles) -> dict[str, Any]:
    """Asks the planner what would change the last step that was recorded."""
    asked = _asked_again(run)
    found = figures(run)
    if asked is not None:
        shown = [one for one in found["recorded"] if one["rank"] == run.rank][-1]
        if shown["plan"] is not None:
            shown["plan"] = {**shown["plan"], "seconds": asked.seconds}
    return {**found, "verdict": run_verdict(run, found["recorded"], asked).plain()}


def _asked_again(run: RunFiles) -> WhatIf | None:
    if not run.recorded:
        return None
    try:
        kind = run.facts.get("machine", {}).get("device", "cpu")
        return what_if(run.recorded[-1], kind, int(run.facts.get("ranks", 1)))
    except Exception as error:  # the rest of the page is worth showing
        run.problems.append(f"the planner could not be asked again ({type(error).__name__}: {error})")
        return None


def write_page(found: dict[str, Any], path: Path) -> None:
    try:
        replace(path, page(found).encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"report: {str(path)!r} cannot be written ({error.strerror}); name another file with --out"
        ) from None
