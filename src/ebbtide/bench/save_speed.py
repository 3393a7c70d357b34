"""How fast a checkpoint is written, against what the disk takes in the same folder in the same minute.

Blocks that are new to a file cost the file system more than old ones, so both are measured: a checkpoint of its own
beside a file of its own, and one that goes into the files of a checkpoint that is not kept beside a file that is written
over. The plain writer has one buffer and nothing else to do.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ebbtide.bench.ssd_steps import peak_rss
from ebbtide.bench.steps import LR, Ours, alone, drawn_quickly, tokens
from ebbtide.checkpoint.rank_files import PIECE, File
from ebbtide.devices.pool import map_memory
from ebbtide.memory.disk.data_files import SystemIO
from ebbtide.memory.disk.extents import BLOCK
from ebbtide.models import find_model


def run(
    model: str = "gpt2-1b",
    repeats: int = 6,
    folder: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        report(f"{model}: {repeats} checkpoints of each kind")
        rows, size = alone(_rounds, model, repeats, Path(scratch))
    found: dict[str, Any] = {"model": model, "checkpoint_bytes": size, "rounds": rows}
    for kind in ("new", "again"):
        found[f"{kind}_over_disk"] = statistics.median(
            row[f"{kind}_disk_seconds"] / row[f"{kind}_seconds"] for row in rows
        )
        found[f"{kind}_bytes_per_second"] = statistics.median(size / row[f"{kind}_seconds"] for row in rows)
    found["rss_rise_share"] = max(row["rss_rise_bytes"] for row in rows) / size
    return found


def _rounds(model: str, repeats: int, folder: Path) -> tuple[list[dict[str, float]], int]:
    """Seconds of each, and the bytes of a checkpoint."""
    config = {"optimizer": {"lr": LR}, "device": {"kind": "cpu"}}
    ours = Ours(model, tokens(model, 1, 32), config, module=drawn_quickly(find_model(model)))
    ours.step()
    kept = folder / "kept"
    size = _bytes(ours.engine.save(kept, keep=1))
    ours.engine.save(kept, keep=1)  # from now on there is one that is not kept
    plain, alone = folder / "plain", folder / "alone"
    _plain(plain, size)
    rows = []
    for _ in range(repeats):
        row = {"again_disk_seconds": _plain(plain, size)}
        row["again_seconds"], row["rss_rise_bytes"] = _timed(ours, kept)
        rows.append(row)
    for row in rows:
        _remove(plain)
        row["new_disk_seconds"] = _plain(plain, size)
        row["new_seconds"], rise = _timed(ours, alone)
        row["rss_rise_bytes"] = max(rise, row["rss_rise_bytes"])
        _remove(alone)
    ours.close()
    return rows, size


def _remove(path: Path) -> None:
    """For good: else the disk has to do it while somebody is measured."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    os.sync()


def _timed(ours: Ours, folder: Path) -> tuple[float, int]:
    """Seconds, and by how much RSS rose meanwhile."""
    ours.engine.synchronize()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    ours.engine.save(folder, keep=1)
    return time.perf_counter() - start, max(0, peak_rss() - before)


def _plain(path: Path, size: int) -> float:
    """Seconds to write so many bytes there, and to have them on the disk."""
    memory = map_memory(PIECE).fill_(1)
    file = File(path, os.O_RDWR | os.O_CREAT, SystemIO())
    start = time.perf_counter()
    file.allocate(size)
    for offset in range(0, size, PIECE):
        file.write([memory[: min(PIECE, size - offset) // BLOCK * BLOCK]], offset)
    os.fsync(file.number)
    seconds = time.perf_counter() - start
    file.close()
    return seconds


def _bytes(checkpoint: Path) -> int:
    return sum(entry.stat().st_size for entry in checkpoint.rglob("*") if entry.is_file())
