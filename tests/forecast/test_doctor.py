"""`ebbtide doctor`: what it measures reads back, nothing stays behind, and what it says follows from figures."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.cli.app import run
from ebbtide.errors import ConfigError
from ebbtide.forecasting.doctor import disk_rates, operators
from ebbtide.forecasting.doctor.advice import advise
from ebbtide.forecasting.doctor.system import System
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.planner.record import ATTENTION, MATMUL

IMAGINES = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One quick examination, through the command."""
    import contextlib
    import io

    file = tmp_path_factory.mktemp("machine") / "new" / "this.toml"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = run(["doctor", "--quick", "--json", "--folder", str(folder), "--out", str(file)])
    assert status == 0
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0]), file


def test_the_file_is_what_was_measured(measured: tuple[dict[str, Any], Path]) -> None:
    found, file = measured
    machine = Machine.read(found["machine"])
    assert Machine.read(file) == machine
    assert machine.device.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert machine.device.precision == found["raw"]["precision"]
    assert found["file"] == str(file) and found["seconds"] > 0
    assert all(isinstance(sentence, str) for sentence in found["advice"])


def test_every_rate_is_positive(measured: tuple[dict[str, Any], Path]) -> None:
    found, _ = measured
    machine, raw = Machine.read(found["machine"]), found["raw"]
    # How many points: as the machine's pace allows.
    for curve in (machine.device.matmul, machine.device.attention):
        at = [x for x, _ in curve]
        assert at and at == sorted(set(at)) and all(y > 0 for _, y in curve)
    assert 0 < machine.device.launch < 1 and 0 < machine.device.efficiency <= 1
    rates = [machine.device.pointwise, machine.host.update, machine.links.host_device, machine.ssd.total]
    rates += [*raw["streams"].values(), *raw["copies"].values(), *raw["products"].values(), raw["update"]]
    rates += [raw["disk"][name] for name in ("read", "write", "mixed")]
    assert all(rate > 0 for rate in rates)
    assert machine.host.cores >= 1 and machine.host.reserved < machine.host.memory


def test_nothing_stays_behind(measured: tuple[dict[str, Any], Path], folder: Path) -> None:
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--folder", "nowhere/at/all"], ["--folder", "nowhere/at/all", "create it"]),
        (["--folder", "{file}"], ["--folder", "expected a folder"]),
        (["--out", "machine.yaml"], ["--out", ".toml", "'machine.yaml'"]),
        (["--flodder", "x"], ["--flodder", "did you mean '--folder'?"]),
    ],
)
def test_bad_input(
    flags: list[str], fragments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run(["doctor", "--quick", *(flag.format(file=file) for flag in flags)]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert [fragment for fragment in fragments if fragment not in captured.err] == []


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has .* free, and measuring takes 1.* PiB"):
        disk_rates.measure(tmp_path, 2**50, 1, 1.0)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="is the disk full"):
        disk_rates.measure(tmp_path, 64 << 20, 1, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuses(path: Any, flags: int, *mode: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            real(path, flags & ~os.O_DIRECT, *mode)  # some make the file and refuse afterwards
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuses)
    found = disk_rates.measure(tmp_path, 64 << 20, 1, 1.0)
    assert not found.direct and min(found.read, found.write, found.mixed) > 0
    assert list(tmp_path.iterdir()) == []


def test_operators_are_those_that_the_trace_counts() -> None:
    """The curves' places are the operations a byte of products of these shapes, forward and backward."""
    measurement = operators.Measurement(torch.device("cpu"), torch.float32, 2, 10.0)
    measurement.round()
    found = measurement.result()
    assert [x for x, _ in found.matmul] == sorted({x for x, _ in found.matmul})
    assert len(found.attention) == 2  # sequences of 64: forward and backward
    assert found.launch > 0 and found.pointwise > 0 and found.start >= 0 and found.drift >= 1
    kinds = {work.kind for probe in measurement._probes for work in probe.seconds}
    assert {MATMUL, ATTENTION} < kinds


def test_a_line_through_blocks_of_different_sizes() -> None:
    """Seconds an operator and bytes a second, from what blocks took that differ in both."""
    blocks = [(n, count, 5e-5 * n + count / 2e10) for n, count in ((30, 10**7), (34, 8 * 10**7), (60, 10**9))]
    assert operators._start(blocks) == pytest.approx(5e-5)
    assert operators._start(blocks[:1]) == 0.0 and operators._start([]) == 0.0
    assert operators._start([(30, 10**7, 1e-3), (30, 10**8, 2e-2)]) == 0.0  # the larger is the slower


SYSTEM = System("a processor", (), 8, 8, 16 << 30, 16 << 30, 15 << 30, 0, 1, "madvise", "passive", 0.1)
RAW: dict[str, Any] = {
    "spinning": {"default_beside": 1.0, "passive_beside": 1.0},
    "streams": {"first_touch": 5e9, "refill": 20e9},
    "precision": "bf16",
    "products": {"bf16": 2e12, "fp32": 3e11},
    "operators": {"drift": 1.05},
    "disk": {"folder": "/d", "file_system": "ext4", "direct": True, "read": 2e9, "write": 2e9, "mixed": 2e9},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RAW)
    table, name = path.split(".")
    raw.setdefault(table, {})[name] = value
    return raw


def test_a_sound_machine_needs_no_advice() -> None:
    assert advise(SYSTEM, RAW) == []
    assert advise(SYSTEM, RAW | {"spinning": None}) == []


@pytest.mark.parametrize(
    ("system", "raw", "fragments"),
    [
        ({}, changed("spinning.default_beside", 2.2), ["2.2 times as long", "OMP_WAIT_POLICY=passive"]),
        ({}, changed("disk.mixed", 1e9), ["1.00 GB/s", "reads and writes at once"]),
        ({}, changed("disk.direct", False), ["O_DIRECT", "page cache"]),
        ({}, changed("disk.file_system", "tmpfs"), ["tmpfs", "RAM and no disk"]),
        ({}, changed("disk.write", 1e8), ["0.10 GB/s", "240 seconds"]),
        ({}, changed("products.bf16", 1e11), ["bf16 are slower than in fp32", "100 against 300"]),
        ({}, RAW | {"precision": "fp32"}, ["no instructions for products in bf16", 'precision = "fp32"']),
        ({}, changed("operators.drift", 1.8), ["1.8 times as long", "shared"]),
        ({"cores": 2}, RAW, ["2 of the processor's 8 cores"]),
        ({"memory": 8 << 30, "available": 7 << 30}, RAW, ["8.00 GiB of 16.0 GiB"]),
        ({"available": 4 << 30}, RAW, ["4.00 GiB of 16.0 GiB", "12.0 GiB are in use"]),
        ({"swap_used": 1 << 30}, RAW, ["1.00 GiB are swapped out"]),
        ({"huge_pages": "never"}, RAW, ["huge pages are off", "5.0 GB/s", "20.0"]),
        ({"numa_nodes": 2}, RAW, ["2 NUMA nodes"]),
    ],
)
def test_advice(system: dict[str, Any], raw: dict[str, Any], fragments: list[str]) -> None:
    sentences = advise(replace(SYSTEM, **system), raw)
    assert [f for f in fragments if not any(f in sentence for sentence in sentences)] == []


@pytest.mark.heavy
def test_tables_against_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what the tables say of real models and what those take; `-s` shows it."""
    from ebbtide.devices.heap import tune_memory
    from ebbtide.forecasting.doctor import check

    tune_memory(scarce=False)  # as the command does
    rows = check.run()
    with capsys.disabled():
        for row in rows:
            print(row)
    assert all(row["predicted_seconds"] > 0 for row in rows)
