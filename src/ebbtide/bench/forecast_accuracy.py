"""The forecast against the machine: what was predicted and what was measured, side by side.

Who else is on the machine slows some minutes, and not others. So each case is visited twice, with all others between,
and the machine is measured after each visit. Engines, which cannot wait for that, are given the file of the first
measurement, and all plans are made with it; one description, the middle of all measurements, says how long they take.

Four budgets a model: everything on the device; optimizer state outside; parameters that spill, too; and RAM as one tier
with nine tenths of the optimizer state on SSD.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ebbtide.bench.steps import Ours, alone, tokens
from ebbtide.config import Config
from ebbtide.devices.heap import tune_memory
from ebbtide.errors import ConfigError
from ebbtide.forecasting.doctor.examine import BRIEF, FULL, Effort, examine
from ebbtide.forecasting.doctor.machine_file import machine_toml
from ebbtide.forecasting.forecaster import Forecast, Forecaster, Workload
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.outlook import Outlook, look
from ebbtide.memory.links import SSD_READ, SSD_WRITE, TO_DEVICE, TO_HOST
from ebbtide.models import find_model

LINKS = (TO_DEVICE, TO_HOST, SSD_READ, SSD_WRITE)
MODELS = ("gpt2-124m", "gpt2-350m", "gpt2-1b")
SEQUENCES = (256, 1024)
VISITS, APART = 2, 0.05
"""How often a case is measured, where nobody says; once more where its visits differ by more than this share."""
WARM_UP = 5
"""Steps until everything is where it belongs: two are traced, then what the first plan left on SSD is fetched."""
LASTING = 10.0
"""Seconds that a visit measures at least: a few short steps in a row are all slow or all fast."""
BATCH = 1
SLACK = 7 * 10**9 // 2
"""RAM that is left to the process itself: libraries, heap fragments, what operators use inside."""
OUTSIDE, SPILLING = (4.25, 6.0, 8.0, 10.0), (1.75, 2.5, 3.0)
"""Bytes a parameter on the device beside activations, for state outside and for parameters that spill; the first with
which the rest fits beside it is taken."""
ON_SSD, FILES = 5.0, 12
"""Bytes a parameter in RAM beside activations (parameters, gradients that wait for the norm, a tenth of the state), and
on SSD."""


@dataclass(frozen=True)
class ForecastCase:
    model: str
    seq: int
    name: str
    device: int
    """Bytes; so are `host` and `ssd`."""
    host: int
    ssd: int = 0


def run(
    models: tuple[str, ...] = MODELS,
    seqs: tuple[int, ...] = SEQUENCES,
    repeats: int = 5,
    folder: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
    journal: Path | None = None,
    visits: int = VISITS,
) -> dict[str, Any]:
    """`journal`: a file that keeps what was measured; a run that was ended goes on from it. `visits`: how often a
    row is measured, and from two on once more where they are apart."""
    with tempfile.TemporaryDirectory() as scratch:
        disk, path = folder or Path(scratch), Path(scratch) / "machine.toml"
        kept = _Journal(journal)
        if not kept.machines:
            report("measuring the machine")
            kept.add_machine(alone(_examine, disk, FULL))
        path.write_text(machine_toml(kept.machines[0], "As it was found at first."), encoding="utf-8")
        jobs = list(_jobs(models, seqs, kept.machines[0]))
        for number in range(visits + 1):
            for case, forecaster in jobs:
                seen = kept.visits[case]
                if len(seen) == number and (number < visits or _apart(seen)):
                    kept.add_visit(case, alone(_measured, case, path, forecaster.config, disk, repeats))
                    step = seen[-1]["step_seconds"]
                    report(f"{case.model}, sequence {case.seq}, {case.name}: {step:.3f} s a step")
                    kept.add_machine(alone(_examine, disk, BRIEF))
        machine = Machine.read(_middle([one.to_dict() for one in kept.machines]))
        rows = [
            _row(case, _expected(f, kept.machines[0], machine, case), kept.visits[case]) for case, f in jobs
        ]
    return {"machine": machine.to_dict(), "repeats": repeats, **_summary(rows), "rows": rows}


class _Journal:
    """What was measured, in the order in which it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.machines: list[Machine] = []
        self.visits: dict[ForecastCase, list[dict[str, Any]]] = defaultdict(list)
        if path is not None and path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    self._take(json.loads(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(
                        f"--journal: {path}, line {number} is no measurement ({error}); remove it, or name another file"
                    ) from None

    def _take(self, found: dict[str, Any]) -> None:
        if "machine" in found:
            self.machines.append(Machine.read(found["machine"]))
        else:
            self.visits[ForecastCase(**found["case"])].append(found["visit"])

    def add_machine(self, machine: Machine) -> None:
        self.machines.append(machine)
        self._add({"machine": machine.to_dict()})

    def add_visit(self, case: ForecastCase, visit: dict[str, Any]) -> None:
        self.visits[case].append(visit)
        self._add({"case": asdict(case), "visit": visit})

    def _add(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _examine(folder: Path, effort: Effort) -> Machine:
    """The heap is kept, as it is where steps are measured: operators whose results are faulted in anew each time are a
    fifth as fast."""
    tune_memory(scarce=False)
    return examine(folder, effort).machine


def _middle(found: Sequence[Any]) -> Any:
    """Of what is alike in all: numbers one by one, the points of curves by their place."""
    first = found[0]
    if isinstance(first, dict):
        return {key: _middle([one[key] for one in found]) for key in first}
    if isinstance(first, (list, tuple)):
        points: dict[float, list[float]] = defaultdict(list)
        for x, y in (point for one in found for point in one):
            points[x].append(y)
        return [[x, statistics.median(points[x])] for x in sorted(points) if 2 * len(points[x]) > len(found)]
    return statistics.median_high(found) if isinstance(first, (int, float)) else first


def _apart(visits: Sequence[Mapping[str, Any]]) -> bool:
    seconds = [found["step_seconds"] for found in visits]
    return max(seconds) > (1 + APART) * min(seconds)


def _jobs(
    models: Sequence[str], seqs: Sequence[int], machine: Machine
) -> Iterator[tuple[ForecastCase, Forecaster]]:
    for model in models:
        forecaster = Forecaster(model, {"clip": 1.0, "precision": machine.device.precision or "bf16"})
        for seq in seqs:
            for case in _cases(forecaster, machine, model, seq):
                yield case, forecaster


def _cases(forecaster: Forecaster, machine: Machine, model: str, seq: int) -> Iterator[ForecastCase]:
    work = Workload(BATCH, seq)
    seen = forecaster.see(work, machine)
    tide, params = seen.trace.record.peak, seen.params
    ram = machine.host.memory - machine.host.reserved - SLACK
    yield ForecastCase(model, seq, "all on the device", ram, 0)
    for name, choices in (("state outside", OUTSIDE), ("parameters spill", SPILLING)):
        for each in choices:
            device = tide + int(each * params)
            host = min(ram - device, int(14.5 * params))
            case = ForecastCase(model, seq, name, device, host)
            if host > 0 and _forecast(forecaster, machine, case).outlook.fits:
                yield case
                break
    yield ForecastCase(model, seq, "state on SSD", tide + int(ON_SSD * params), 0, FILES * params)


def _forecast(forecaster: Forecaster, machine: Machine, case: ForecastCase) -> Forecast:
    budgets = machine.with_memory(case.device, case.host, case.ssd)
    return forecaster.answer(budgets, Workload(BATCH, case.seq), explain=False)


def _expected(forecaster: Forecaster, at_first: Machine, machine: Machine, case: ForecastCase) -> Outlook:
    """The plan that engines make with the file that they were given, on the machine as it was found all along: of two
    plans that are worth the same, rates that differ by a hundredth choose another one."""
    plan = _forecast(forecaster, at_first, case).outlook.plan
    if plan is None:
        raise RuntimeError(f"{case} does not fit")  # the cases are made to
    budgets = machine.with_memory(case.device, case.host, case.ssd)
    return look(forecaster.question(budgets, Workload(BATCH, case.seq), "ebbtide"), plan=plan)


def _row(case: ForecastCase, outlook: Outlook, visits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    predicted = _predicted(outlook)
    measured = {name: statistics.median(found[name] for found in visits) for name in predicted}
    return {
        "model": case.model,
        "seq": case.seq,
        "budget": case.name,
        "device_bytes": case.device,
        "host_bytes": case.host,
        "ssd_bytes": case.ssd,
        **{f"predicted_{name}": value for name, value in predicted.items()},
        **{f"measured_{name}": value for name, value in measured.items()},
        "visits": [found["step_seconds"] for found in visits],
        "steps": sum(found["steps"] for found in visits),
        "step_ratio": predicted["step_seconds"] / measured["step_seconds"],
        "moved_ratio": _ratio(predicted["moved_bytes"], measured["moved_bytes"]),
        "device_peak_ratio": _ratio(predicted["device_peak_bytes"], measured["device_peak_bytes"]),
        "host_peak_ratio": _ratio(predicted["host_peak_bytes"], measured["host_peak_bytes"]),
        "ssd_peak_ratio": _ratio(predicted["ssd_peak_bytes"], measured["ssd_peak_bytes"]),
        "bound_seconds": outlook.bound_seconds,
    }


def _ratio(predicted: float, measured: float) -> float | None:
    return predicted / measured if measured else None if predicted else 1.0


def _predicted(outlook: Outlook) -> dict[str, Any]:
    return {
        "step_seconds": outlook.step_seconds,
        "moved_bytes": sum(outlook.moved_bytes[link] for link in LINKS),
        "device_peak_bytes": sum(outlook.bytes["device"].values()),
        "host_peak_bytes": sum(outlook.bytes["host"].values()),
        "ssd_peak_bytes": sum(outlook.bytes["ssd"].values()),
    }


def _measured(case: ForecastCase, path: Path, config: Config, folder: Path, repeats: int) -> dict[str, Any]:
    budgets = {"device.memory": case.device, "host.memory": case.host, "ssd.memory": case.ssd}
    settings = config.with_({"machine": str(path), **budgets, "ssd.folder": str(folder) if case.ssd else ""})
    # From the meta device, chunk by chunk: the weights in fp32 beside their chunks would be too much for large models.
    module = find_model(case.model).on_meta()
    ours = Ours(case.model, tokens(case.model, BATCH, case.seq), settings.to_dict(), module=module)
    tune_memory(scarce=False)  # what building took goes back, what steps free is kept
    try:
        for _ in range(WARM_UP):
            ours.step()
        # From rest to rest, in steps that are all alike: else moves at a border would be counted in either.
        ours.engine.synchronize()
        # What was there before the first plan was made has gone since: the forecast is of the steps that follow.
        ours.engine._session.ledger.count_anew()
        before = _moved(ours.engine.stats())
        ours.step()  # what each step leaves to be done beside the next one, those that are timed find, too
        seconds: list[float] = []
        while len(seconds) < repeats or sum(seconds) < LASTING:
            start = time.perf_counter()
            ours.step()
            seconds.append(time.perf_counter() - start)
        ours.engine.synchronize()
        stats = ours.engine.stats()
    finally:
        ours.close()
    return {
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "moved_bytes": (_moved(stats) - before) / (len(seconds) + 1),
        "device_peak_bytes": stats["peak_bytes"]["device"],
        "host_peak_bytes": stats["peak_bytes"]["host"],
        "ssd_peak_bytes": stats["peak_bytes"]["ssd"],
    }


def _moved(stats: Mapping[str, Any]) -> int:
    return sum(stats["moved_bytes"][link] for link in LINKS)


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far predictions are off, as shares of what was measured."""
    step = [abs(row["step_ratio"] - 1) for row in rows]
    peaks = [row[name] for row in rows for name in ("device_peak_ratio", "host_peak_ratio", "ssd_peak_ratio")]
    moved = [row["moved_ratio"] for row in rows]
    return {
        "step_error_median": statistics.median(step),
        "step_error_worst": max(step),
        "moved_error_worst": max(abs(ratio - 1) for ratio in moved if ratio is not None),
        "peak_error_worst": max(abs(ratio - 1) for ratio in peaks if ratio is not None),
    }
