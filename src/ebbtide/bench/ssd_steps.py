"""State on SSD against the bound: how near a step comes to what the disk or the cores must do.

RAM is one tier; its budget leaves a share of the optimizer state to the disk, by the plan. Every engine runs in a
process of its own, in turn with a process that does forward and backward alone, so that both see the same machine.
All ceilings are measured in the same run, and what the disk gives to reads and writes at once in every turn: it is
not the same all the time. All processes have their memory as the command has it (`backend.heap`).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from ebbtide.bench.progress import BenchProgress
from ebbtide.bench.ssd_budgets import for_share
from ebbtide.bench.steps import LR, Ours, drawn_quickly, in_process, suited, tokens
from ebbtide.devices.heap import tune_memory
from ebbtide.forecasting.doctor import disk_rates as disks
from ebbtide.forecasting.doctor.ram import streams, update
from ebbtide.forecasting.simulation.bound import least_streamed
from ebbtide.models import find_model
from ebbtide.planner.shape import update_bytes
from ebbtide.runtime.parameters.selection import PRECISIONS

MODELS = ("gpt2-350m", "gpt2-1b")
SHARES = (0.5, 0.9)
WARM_UP = 2
TURN = 0.5
"""Seconds of the disk alone in every turn."""
GB = 10**9


def run(
    models: tuple[str, ...] = MODELS,
    shares: tuple[float, ...] = SHARES,
    seq: int = 256,
    repeats: int = 5,
    folder: Path | None = None,
    precision: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    precision = suited(precision)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        report("measuring the disk and the memory")
        ceilings = measure_ceilings(Path(scratch))
        rows = []
        progress = BenchProgress(len(models) * len(shares) * 3 * (WARM_UP + repeats), report)
        for model in models:
            for share in shares:
                report(f"{model}, {share:.0%} of its optimizer state on SSD")
                row = _row(model, share, seq, repeats, Path(scratch), precision, ceilings, progress)
                clipped = row["with_clipping"]["achieved_over_critical_path"]
                report(
                    f"  {row['achieved_over_bound']:.2f} of the bound, with clipping {clipped:.2f} of the critical "
                    f"path, without prefetch {row['without_prefetch']['ratio']:.2f} times as long"
                )
                rows.append(row)
    common = {"seq": seq, "batch": 1, "repeats": repeats, "precision": precision}
    return common | {"ceilings": ceilings, "rows": rows}


def measure_ceilings(folder: Path) -> dict[str, float]:
    """Bytes a second; `disk_cores`: seconds of all cores for a byte to or from the disk."""
    threads = torch.get_num_threads()
    disk = disks.measure(folder, 4 * GB, 3, 2.0)
    return {
        "disk_read": disk.read,
        "disk_write": disk.write,
        "disk_mixed": disk.mixed,
        "disk_cores": disk.cpu / threads,
        "memory_add": streams(threads, 1 << 28, 5)["add"],
        "update": update(threads, 20_000_000, 5),
    }


def _row(
    model: str,
    share: float,
    seq: int,
    repeats: int,
    folder: Path,
    precision: str,
    ceilings: Mapping[str, float],
    progress: BenchProgress,
) -> dict[str, Any]:
    in_backward = {"updates": "in-backward", "precision": precision}
    config = in_backward | for_share(in_backward, model, share, 1, seq, folder)
    row: dict[str, Any] = {"model": model, "share_on_ssd": share, "budget_bytes": config["device"]["memory"]}
    row |= _against(model, seq, config, repeats, ceilings, progress, clipped=False)
    on_demand = _against(model, seq, config | {"prefetch": False}, repeats, ceilings, progress, clipped=False)
    row["without_prefetch"] = {
        "step_seconds": on_demand["step_seconds"],
        "ratio": on_demand["relative"] / row["relative"],
    }
    clipping = {"clip": 1.0, "precision": precision}
    config = clipping | for_share(clipping, model, share, 1, seq, folder)
    row["with_clipping"] = _against(model, seq, config, repeats, ceilings, progress, clipped=True)
    row["with_clipping"]["budget_bytes"] = config["device"]["memory"]
    return row


def _against(
    model: str,
    seq: int,
    config: dict[str, Any],
    repeats: int,
    ceilings: Mapping[str, float],
    progress: BenchProgress,
    clipped: bool,
) -> dict[str, Any]:
    """Steps of an engine in turn with plain passes."""
    scratch = Path(config["ssd"]["folder"])
    with (
        disks.mixed_rates(scratch, 2 * GB, TURN) as mixed,
        in_process(_start_plain, _end, model, seq, config["precision"]) as plain,
        in_process(_start_engine, _end, model, seq, config) as engine,
    ):
        passes, rates, steps = [], [], []
        for number in range(WARM_UP + repeats):
            turn = plain.submit(_plain_pass).result(), mixed(), engine.submit(_engine_step).result()
            if number >= WARM_UP:
                passes.append(turn[0])
                rates.append(turn[1])
                steps.append(turn[2])
            progress.done()
        facts = engine.submit(_engine_facts, repeats).result()
    forward = statistics.median(one for one, _ in passes)
    backward = statistics.median(other for _, other in passes)
    step = statistics.median(steps)
    found = bound_of(forward, backward, facts, {**ceilings, "disk_mixed": statistics.median(rates)}, clipped)

    def achieved(what: str) -> float:
        """Each step against what the passes and the disk beside it say: what else the machine does weighs on all."""
        bounds = [
            bound_of(*both, facts, {**ceilings, "disk_mixed": rate}, clipped)[what]
            for both, rate in zip(passes, rates, strict=True)
        ]
        return statistics.median(bound / step for bound, step in zip(bounds, steps, strict=True))

    return {
        "step_seconds": step,
        "relative": statistics.median(step / sum(both) for step, both in zip(steps, passes, strict=True)),
        "forward_seconds": forward,
        "backward_seconds": backward,
        "disk_mixed": statistics.median(rates),
        **found,
        "achieved_over_bound": achieved("bound_seconds"),
        **({"achieved_over_critical_path": achieved("critical_path_seconds")} if clipped else {}),
        **facts,
    }


def bound_of(
    forward: float, backward: float, facts: Mapping[str, Any], ceilings: Mapping[str, float], clipped: bool
) -> dict[str, Any]:
    streamed = facts["least_streamed_bytes"]
    disk = max(
        streamed / ceilings["disk_read"],
        streamed / ceilings["disk_write"],
        2 * streamed / ceilings["disk_mixed"],
    )
    updating = facts["update_bytes"] / ceilings["update"]
    # The cores have the transfers to do, too: for a direct one the system still walks its pages and completes it.
    transfers = 2 * streamed * ceilings["disk_cores"]
    seconds = {"disk": disk} if streamed else {}
    seconds["cores"] = forward + backward + updating + transfers
    found: dict[str, Any] = {
        "bound_seconds": max(seconds.values()),
        "resource_seconds": seconds | {"cores_for_transfers": transfers},
    }
    if clipped:
        # The norm is a barrier: nothing is updated before backward has ended.
        found["critical_path_seconds"] = backward + max(disk, forward + updating + transfers)
    return found


# -- in processes of their own ----------------------------------------------------------------------------


_held: dict[str, Any] = {}


def _start_plain(model: str, seq: int, precision: str) -> None:
    module = drawn_quickly(find_model(model)).to(PRECISIONS[precision])
    tune_memory(scarce=True)
    _held.update(module=module, batch=tokens(model, 1, seq))


def _plain_pass() -> tuple[float, float]:
    """Seconds of forward and of backward."""
    start = time.perf_counter()
    loss = _held["module"](**_held["batch"]).loss
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    _held["module"].zero_grad(set_to_none=True)
    return middle - start, end - middle


def _start_engine(model: str, seq: int, config: dict[str, Any]) -> None:
    module = find_model(model).on_meta()
    tune_memory(scarce=True)
    ours = Ours(model, tokens(model, 1, seq), {"optimizer": {"lr": LR}, **config}, module=module)
    _held.update(ours=ours)


def _engine_step() -> float:
    seconds, moved = _held["ours"].step_in_a_row()
    _held.setdefault("moved", []).append(moved)
    return seconds


def _engine_facts(repeats: int) -> dict[str, Any]:
    engine = _held["ours"].engine
    stats, moved = engine.stats(), _held["moved"][-repeats:]
    session = engine._session
    plan = session.cursor.plan
    memory = psutil.Process().memory_info()
    peak = peak_rss()
    updates = sum(update_bytes(session.shape, session.config.resolved_master))
    return {
        "ssd_read_bytes": statistics.median_low([step["ssd_read"] for step in moved]),
        "ssd_write_bytes": statistics.median_low([step["ssd_write"] for step in moved]),
        "least_streamed_bytes": least_streamed(session.shape, plan.record, session.traces.settings),
        "update_bytes": updates,
        "state_on_ssd": session.homes.streamed(session.shape) / sum(session.shape.state_bytes),
        "peak_device_bytes": stats["peak_bytes"]["device"],
        "rss_bytes": memory.rss,
        "peak_rss_bytes": peak,
        "fixed_rss_bytes": peak - stats["budget_bytes"]["device"],
    }


def peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def _end() -> None:
    if "ours" in _held:
        _held["ours"].close()
    _held.clear()
