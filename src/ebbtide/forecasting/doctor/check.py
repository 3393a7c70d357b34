"""Whether the tables predict: forward and backward of real models, as summed up and as measured, in turn.

python -m ebbtide.forecasting.doctor.check
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch

from ebbtide.forecasting.doctor.examine import FULL, compute_device, device_values
from ebbtide.forecasting.doctor.operators import Measurement
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.models import find_model
from ebbtide.tracing.standalone import trace

CASES = (
    ("gpt2-124m", 2, 256),
    ("gpt2-124m", 1, 1024),
    ("gpt2-350m", 1, 256),
    ("gpt2-tiny", 4, 128),
    ("gpt2-124m", 4, 64),
    ("llama-tiny", 2, 256),
    ("bert-tiny", 4, 128),
    ("gpt2-124m", 1, 512),
)


def run(
    cases: Iterable[tuple[str, int, int]] = CASES, rounds: int = 5, shapes: int = 99
) -> list[dict[str, Any]]:
    """Each round measures the operators once and takes one pass of every model, so that a machine whose speed drifts
    is the same one for both."""
    device, dtype = compute_device()
    passes = [(case, *_prepared(*case, device, dtype)) for case in cases]
    seconds: dict[tuple[str, int, int], list[float]] = {case: [] for case, _, _ in passes}
    measurement = Measurement(device, dtype, shapes, FULL.pass_seconds)
    for _ in range(rounds):
        measurement.round()
        for case, step, _ in passes:
            begin = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[case].append(time.perf_counter() - begin)
    rest = {"memory": "1GB", "bandwidth": "1GB/s"}
    values = {"name": "check", "device": {**rest, **device_values(measurement.result())}}
    machine = Machine.read({**values, "host": {**rest, "cores": 1}, "links": {"host_device": "1GB/s"}})
    rows = []
    for (model, batch, seq), _, works in passes:
        predicted = sum(machine.seconds(work) for work in works)
        measured = statistics.median(seconds[model, batch, seq])
        rows.append(
            {
                "model": model,
                "batch": batch,
                "seq": seq,
                "predicted_seconds": predicted,
                "measured_seconds": measured,
                "ratio": predicted / measured,
            }
        )
    return rows


def _prepared(model: str, batch: int, seq: int, device: Any, dtype: Any) -> tuple[Any, list[Any]]:
    spec = find_model(model)
    module = spec.build(0).to(device, dtype)
    ids = torch.randint(0, spec.vocabulary, (batch, seq), device=device)
    inputs = {"input_ids": ids, "labels": ids}
    with torch.device("meta"):
        imagined = spec.build(0)
    record = trace(imagined, {name: value.to("meta") for name, value in inputs.items()}, dtype).record
    works = [work for moment in record.moments for work in moment.work]

    def step() -> None:
        module(**inputs).loss.backward()
        for parameter in module.parameters():
            parameter.grad = None

    step()
    return step, works
