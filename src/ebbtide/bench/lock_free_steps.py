"""Lock-free updates against exact ones where the disk is the bottleneck: steps a second, staleness, and what is learnt.

Most of the optimizer state is on SSD and the sequence is short. Engines train the same model on the same text from the
same weights, each in a process of its own, in turn, for the same number of seconds at a time; between turns pending
updates end, and text that is not trained on is evaluated, neither of which counts. In each turn the first steps are left
out of the rates: they would owe their updates to those that come after.

Lock-free updates hold a copy of the parameters and gradients that wait in RAM, for which exact ones have a use, too. So
there are two exact engines: one with as much of its state on SSD, in the RAM that this takes, and one with as much RAM.

Or by steps: from a checkpoint of exact ones, both go on for as many.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ebbtide.bench.ssd_budgets import for_share
from ebbtide.bench.steps import in_process, median_ratio, suited
from ebbtide.config import Config
from ebbtide.devices.heap import tune_memory
from ebbtide.engine import Engine, open_tiers
from ebbtide.models import Batches, find_model

MODEL = "gpt2-350m"
EVALUATED = 16
"""Batches of the text that is not trained on."""
GB = 10**9
EXACT, EQUAL_RAM, FREE = "exact", "exact with as much RAM", "lock-free"


def run(
    train: torch.Tensor,
    valid: torch.Tensor,
    model: str = MODEL,
    share: float = 0.9,
    batch: int = 1,
    seq: int = 64,
    turns: int = 3,
    seconds: float = 30.0,
    max_staleness: int = 4,
    folder: Path | None = None,
    precision: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`train` and `valid`: text, as bytes."""
    precision = suited(precision)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kinds = _kinds(model, share, batch, seq, max_staleness, precision, Path(scratch))
        report(f"{model}: {len(kinds)} engines are made")
        with ExitStack() as stack:
            processes = {
                kind: stack.enter_context(in_process(_start, _end, model, batch, seq, train, valid, settings))
                for kind, settings in kinds.items()
            }
            begun = {kind: process.submit(_evaluate).result() for kind, process in processes.items()}
            found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
            for number in range(turns):
                for kind, process in processes.items():
                    found[kind].append(process.submit(_turn, seconds, max_staleness + 2).result())
                    done = found[kind][-1]
                    report(
                        f"turn {number + 1}, {kind}: {done['steps_per_second']:.3g} steps a second, "
                        f"loss {done['valid_loss']:.4g}"
                    )
            facts = {kind: process.submit(_facts).result() for kind, process in processes.items()}
    rates = {kind: [one["steps_per_second"] for one in rows] for kind, rows in found.items()}

    def speed_up(other: str) -> float:
        return median_ratio(rates[FREE], rates[other])

    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "precision": precision,
        "seconds_a_turn": seconds,
        "max_staleness": max_staleness,
        "speed_up": speed_up(EXACT),
        "speed_up_at_equal_ram": speed_up(EQUAL_RAM),
        **{_key(kind): _summary(found[kind], begun[kind], facts[kind]) for kind in kinds},
    }


def go_on(
    train: torch.Tensor,
    valid: torch.Tensor,
    model: str,
    share: float,
    batch: int,
    seq: int,
    first: int,
    more: int,
    max_staleness: int,
    folder: Path | None = None,
    precision: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`first` exact steps, and from there `more` of each kind."""
    precision = suited(precision)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kinds = _kinds(model, share, batch, seq, max_staleness, precision, Path(scratch))
        del kinds[EQUAL_RAM]
        # Exact steps have the same numbers, whatever is where: all in RAM they take least time.
        kinds[EXACT] |= {
            "device": for_share(kinds[EXACT], model, 0.0, batch, seq, state_alone=True)["device"]
        }
        saved = Path(scratch) / "saved"
        with in_process(_start, _end, model, batch, seq, train, valid, kinds[EXACT]) as exact:
            exact.submit(_steps, first).result()
            begun = exact.submit(_evaluate).result()
            exact.submit(_save, saved).result()
        report(f"{first} exact steps: loss {begun:.4g}")
        found: dict[str, dict[str, Any]] = {}
        for kind, settings in kinds.items():
            with in_process(_start, _end, model, batch, seq, train, valid, settings) as process:
                process.submit(_load, saved, first).result()
                again = process.submit(_evaluate).result()
                process.submit(_steps, more).result()
                loss = process.submit(_evaluate).result()
                found[kind] = {"valid_losses": [again, loss], **process.submit(_facts).result()}
            report(f"{more} {kind} steps more: loss {loss:.4g}")
    ends = {kind: one["valid_losses"][-1] for kind, one in found.items()}
    return {
        "model": model,
        "batch": batch,
        "seq": seq,
        "precision": precision,
        "max_staleness": max_staleness,
        "steps": [first, more],
        "loss_ratio": ends[FREE] / ends[EXACT],
        **{_key(kind): one for kind, one in found.items()},
    }


def _kinds(
    model: str, share: float, batch: int, seq: int, max_staleness: int, precision: str, folder: Path
) -> dict[str, dict[str, Any]]:
    """The settings of each engine: who has `share` of its state on SSD, or as much RAM as one that has."""
    common: dict[str, Any] = {
        "precision": precision,
        "clip": 1.0,
        "optimizer": {"lr": 1e-4},
        "max_staleness": max_staleness,
    }
    exact, free = common | {"updates": "exact"}, common | {"updates": "lock-free"}

    lean = for_share(exact, model, share, batch, seq)
    ample = for_share(free, model, share, batch, seq, state_alone=True)
    kinds = {EXACT: exact | lean, EQUAL_RAM: exact | ample, FREE: free | ample}
    for kind, settings in kinds.items():
        (folder / _key(kind)).mkdir()
        settings["ssd"] = settings["ssd"] | {"folder": str(folder / _key(kind))}
    return kinds


def _key(kind: str) -> str:
    return kind.replace("-", "_").replace(" ", "_")


def _summary(rows: list[dict[str, Any]], begun: float, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "steps_per_second": statistics.median(row["steps_per_second"] for row in rows),
        "steps": sum(row["steps"] for row in rows),
        "valid_losses": [begun, *(row["valid_loss"] for row in rows)],
        "drain_seconds": [row["drain_seconds"] for row in rows],
        **facts,
    }


# -- in processes of their own ----------------------------------------------------------------------------


_held: dict[str, Any] = {}


def _start(
    model: str, batch: int, seq: int, train: torch.Tensor, valid: torch.Tensor, settings: Mapping[str, Any]
) -> None:
    spec = find_model(model)
    config = Config.read(settings)
    torch.manual_seed(0)
    engine = Engine(spec.on_meta(), config, tiers=open_tiers(config))
    tune_memory(scarce=False)
    batches = {
        name: Batches(spec, text, batch, seq, 0) for name, text in (("train", train), ("valid", valid))
    }
    _held.update(engine=engine, steps=0, **batches)


def _step() -> None:
    engine = _held["engine"]
    loss = engine(**_held["train"].at(_held["steps"])).loss
    engine.backward(loss)
    engine.step()
    _held["steps"] += 1


def _turn(seconds: float, first: int) -> dict[str, Any]:
    """Trains for so long; `first`: steps that do not count in the rate."""
    engine, begun, before = _held["engine"], time.perf_counter(), _held["steps"]
    marks: list[float] = []
    while time.perf_counter() - begun < seconds or len(marks) < first + 2:
        _step()
        marks.append(time.perf_counter())
    engine.synchronize()
    drained = time.perf_counter() - marks[-1]
    return {
        "steps": _held["steps"] - before,
        "steps_per_second": (len(marks) - first) / (marks[-1] - marks[first - 1]),
        "drain_seconds": drained,
        "valid_loss": _evaluate(),
    }


def _steps(count: int) -> None:
    for _ in range(count):
        _step()


def _save(path: Path) -> None:
    _held["engine"].save(path)


def _load(path: Path, steps: int) -> None:
    _held["engine"].load(path)
    _held["steps"] = steps


def _evaluate() -> float:
    engine = _held["engine"]
    engine.module.eval()
    with torch.no_grad():
        losses = [float(engine(**_held["valid"].at(i)).loss) for i in range(EVALUATED)]
    engine.module.train()
    return statistics.mean(losses)


def _facts() -> dict[str, Any]:
    engine = _held["engine"]
    stats, session = engine.stats(), engine._session
    shape = session.shape
    return {
        "state_on_ssd": session.homes.streamed(shape) / sum(shape.state_bytes),
        "budget_bytes": stats["budget_bytes"]["device"],
        "peak_device_bytes": stats["peak_bytes"]["device"],
        "ssd_read_bytes": stats["moved_bytes"]["ssd_read"],
        "ssd_write_bytes": stats["moved_bytes"]["ssd_write"],
        "staleness": stats["lock_free"],
    }


def _end() -> None:
    if "engine" in _held:
        _held["engine"].close()
    _held.clear()
