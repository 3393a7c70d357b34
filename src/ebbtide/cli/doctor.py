"""`ebbtide doctor`: the machine measured, as a file for `ebbtide plan` and in words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from ebbtide.forecasting.doctor.examine import Findings


def doctor(
    out: Annotated[
        Path | None, Option(help="Write the machine file here, for `ebbtide plan --machine`; ends in .toml.")
    ] = None,
    folder: Annotated[
        Path, Option(help="A folder on the disk to measure; 1.3 GB must be free (160 MB with --quick).")
    ] = Path("."),
    quick: Annotated[bool, Option("--quick", help="A few seconds; rougher, and without spinning.")] = False,
    json: Annotated[bool, Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Measure this machine: operators, memory, links and disk; say what is slow or misconfigured."""
    if out is not None:
        if out.suffix != ".toml":
            raise ConfigError(f"--out: expected a file that ends in .toml, found {str(out)!r}")
        out.parent.mkdir(parents=True, exist_ok=True)
    from ebbtide.cli.doing import one_after_another
    from ebbtide.devices.heap import tune_memory
    from ebbtide.forecasting.doctor.examine import FULL, QUICK, examine

    tune_memory(scarce=False)
    begin = time.perf_counter()
    with one_after_another() as tell:
        found = examine(folder, QUICK if quick else FULL, lambda what: tell(f"measuring: {what}"))
    if out is not None:
        _write(out, found)
    if json:
        from ebbtide.cli.output import print_json

        seconds = time.perf_counter() - begin
        print_json(
            {
                "machine": found.machine.to_dict(),
                "raw": found.raw,
                "advice": found.advice,
                "file": None if out is None else str(out),
                "seconds": seconds,
            }
        )
    else:
        _show(found, out)


def _write(out: Path, found: Findings) -> None:
    from ebbtide.forecasting.doctor.machine_file import machine_toml

    quick = ", quickly" if found.raw["quick"] else ""
    heading = f"Measured by `ebbtide doctor`{quick}: {found.raw['device']}."
    out.write_text(machine_toml(found.machine, heading), encoding="utf-8")


def _show(found: Findings, out: Path | None) -> None:
    from rich.console import Console

    from ebbtide.cli.output import print_result, rows_table

    console = Console(soft_wrap=True, highlight=False)
    print_result(_facts(found))
    rows = [
        {
            key: value / 1e9 if key in ("matmul", "attention", "pointwise") else value
            for key, value in row.items()
        }
        for row in found.raw["operators"]["rows"]
    ]
    console.print(rows_table("operators: GFLOP/s of products and attention, GB/s of the rest", rows))
    for sentence in found.advice or ["Nothing that was checked is slow or misconfigured."]:
        console.print(f"- {sentence}", markup=False)
    where = f"Written to {out}." if out is not None else "`--out machine.toml` writes it as a machine file."
    console.print(where, markup=False)


def _facts(found: Findings) -> dict[str, Any]:
    """The lines of the table that people read: rates with their unit."""
    raw = found.raw
    rates: dict[str, float] = {
        "copy in RAM": raw["streams"]["copy"],
        "addition in place": raw["streams"]["add"],
        "first touch": raw["streams"]["first_touch"],
        "refill": raw["streams"]["refill"],
        "optimizer's update": raw["update"],
        "background copy": raw["copies"]["rate"],
        "pointwise operators": raw["operators"]["pointwise"],
        "disk, reading": raw["disk"]["read"],
        "disk, writing": raw["disk"]["write"],
        "disk, both at once": raw["disk"]["mixed"],
    }
    rates |= {f"link, {k}": v for k, v in raw.get("cuda", {}).items() if isinstance(v, float) and v > 1}
    facts: dict[str, Any] = {"device": raw["device"], "memory_bytes": found.machine.device.memory}
    facts |= {f"{name}, GB/s": value / 1e9 for name, value in rates.items()}
    facts |= {f"product in {name}, GFLOP/s": value / 1e9 for name, value in raw["products"].items()}
    facts["operator, at least, microseconds"] = 1e6 * raw["operators"]["launch"]
    if raw.get("spinning"):
        spin = raw["spinning"]
        facts["spinning, times as long"] = spin["default_beside"] / spin["passive_beside"]
    return facts
