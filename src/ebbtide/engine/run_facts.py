"""What a run is, as its folder says it: machine, versions, settings as asked and as resolved, the model in chunks."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from ebbtide.config import Config
from ebbtide.engine.core import EngineCore
from ebbtide.planner.shape import TIERS
from ebbtide.runtime.session import Session
from ebbtide.units import format_size


def run_facts(core: EngineCore) -> dict[str, Any]:
    session, ranks = core.session, core.session.ranks
    return {
        "ebbtide": version("ebbtide"),
        "commit": _commit(),
        "machine": machine_facts(session.backend.kind),
        "ranks": 1 if ranks is None else ranks.size,
        "rank": 0 if ranks is None else ranks.rank,
        "settings": settings_rows(core.config, session),
        "budgets": dict(session.ledger.budgets),
        "model": _model(session),
    }


def machine_facts(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram": psutil.virtual_memory().total,
        "device": kind,
    }
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Of the user's code, where the run was started in a checkout; empty where it was not."""
    try:
        made = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return made.stdout.strip() if made.returncode == 0 else ""


def settings_rows(config: Config, session: Session) -> list[dict[str, str]]:
    """Every setting: what was asked for, what it came to, and why where these differ."""
    asked, plain = _flat(config.to_dict()), _flat(Config().to_dict())
    resolved = _resolved(config, session)
    rows = []
    for key, value in asked.items():
        now, why = resolved.get(key, (str(value), ""))
        if not why:
            why = "the default" if plain.get(key) == value else "as asked"
        rows.append({"setting": key, "asked": str(value), "resolved": now, "why": why})
    return rows


def _resolved(config: Config, session: Session) -> dict[str, tuple[str, str]]:
    """By setting: what it came to, and why."""
    ledger, kind, found = session.ledger, session.backend.kind, dict[str, tuple[str, str]]()
    for tier in TIERS:
        section = getattr(config, tier)
        if section.memory in ("auto", "least", "half"):
            found[f"{tier}.memory"] = (
                format_size(ledger.budgets[tier]),
                _why_budget(tier, section.memory, kind),
            )
    if config.device.kind == "auto":
        found["device.kind"] = kind, "a GPU was found" if kind == "cuda" else "no GPU was found"
    if config.master == "auto":
        form = config.resolved_master
        why = (
            "a bf16 parameter is half of its fp32 master"
            if form == "split"
            else "the precision has no split form"
        )
        found["master"] = form, why
    if config.chunk_size == "auto":
        sizes = [session.data.parameter_chunk(i).nbytes for i in range(len(session.layout.chunks))]
        largest = format_size(max(sizes, default=0))
        found["chunk_size"] = largest, f"{100 * session.layout.utilisation:.1f} % of the chunks is used so"
    if config.threads == "auto":
        found["threads"] = str(torch.get_num_threads()), "what torch takes"
    return found


def _why_budget(tier: str, asked: str, kind: str) -> str:
    if asked == "least":
        return "grows until the batches fit"
    if asked == "half":
        return "grows until the batches fit, and half of the model data"
    if tier == "host" and kind == "cpu":
        return "device and host are both RAM: what the device's budget leaves, where that was set"
    return "most of what was free when the engine started"


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def _chunks_of(session: Session, runs: Sequence[int]) -> list[int]:
    return sorted({chunk for run in runs for chunk in session.data.run_chunks[run]})


def _model(session: Session) -> dict[str, Any]:
    data = session.data
    names = {unit.index: unit.name for unit in session.parts.units}
    runs = {unit.index: unit.runs for unit in session.parts.units}
    outside = session.unmanaged.parameters
    return {
        "class": type(session.module).__name__,
        "parameters": sum(p.numel() for p in data.parameters) + sum(p.numel() for p in outside.values()),
        "outside": sorted(outside),
        "tensors": list(data.names),
        "units": [names.get(index, f"unit {index}") for index in range(1 + max(names, default=-1))],
        "runs": list(data.run_names),
        "unit_chunks": [
            _chunks_of(session, runs.get(index, ())) for index in range(1 + max(names, default=-1))
        ],
        "run_chunks": [sorted(set(found)) for found in data.run_chunks],
        "chunks": [
            {"bytes": data.parameter_chunk(index).nbytes, "tensors": list(members)}
            for index, members in enumerate(data.members)
        ],
    }
