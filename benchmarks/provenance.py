"""Where a result comes from: date, command, commit, machine, versions of packages. Each file of benchmarks/results has
them."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "deepspeed", "torchao", "numpy")


def provenance(command: str) -> dict[str, Any]:
    """`command`: that which measures, as somebody would type it."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "commit": commit_of(),
        "machine": machine_of(),
        "versions": versions_of(),
    }


def commit_of() -> str:
    """With `-dirty` where files that git follows are not as it says."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine_of() -> dict[str, Any]:
    import torch

    from ebbtide.forecasting.doctor.system import read_system

    system = read_system()
    found: dict[str, Any] = {
        "cpu": system.cpu,
        "cores": len(os.sched_getaffinity(0)),
        "flags": system.flags,
        "ram_bytes": system.memory,
    }
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found |= {"gpu": facts.name, "gpu_bytes": facts.total_memory}
    return found


def versions_of() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
