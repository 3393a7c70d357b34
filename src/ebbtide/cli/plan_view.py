"""A forecast for people: a table for each tier with bars, the step's timeline in strips, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ebbtide.forecasting.simulation.verdict import NAMES
from ebbtide.units import format_size

if TYPE_CHECKING:
    from ebbtide.forecasting.forecaster import Forecast

BAR = 24
LEVELS = " ▏▎▍▌▋▊▉█"
LANES = {
    "compute": "device",
    "host": "host update",
    "host_to_device": "host→device",
    "device_to_host": "device→host",
    "ssd_read": "ssd read",
    "ssd_write": "ssd write",
    "wire": "wire",
}


def print_forecast(forecast: Forecast) -> None:
    console = Console()
    found = forecast.outlook
    console.print(_facts(forecast))
    for tier, tags in found.bytes.items():
        if sum(tags.values()):
            console.print(_tier(tier, tags))
    if found.timeline and found.step_seconds:
        console.print(f"one step, {found.step_seconds:.3g} s", highlight=False, markup=False)
        width = max(20, min(console.width, 120) - 14)
        for lane, strip in found.timeline.items():
            console.print(
                f"{LANES[lane]:>12} {_strip(strip, found.step_seconds, width)}", highlight=False, markup=False
            )
    for note in forecast.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if found.short is not None:
        console.print(found.short.message, highlight=False, markup=False)
    console.print(forecast.verdict, style="bold", highlight=False, markup=False)


def _facts(forecast: Forecast) -> Table:
    found = forecast.outlook
    table = Table(show_header=False, box=None)
    table.add_row("model", f"{forecast.model}, {found.params / 1e9:.3g}B parameters")
    devices = f"{forecast.gpus} device{'s' if forecast.gpus > 1 else ''}"
    table.add_row("machine", f"{forecast.machine}, {devices}, strategy {found.strategy}")
    margin = found.margin_chunks
    beside = f"{margin} of optimizer state fit" if margin >= 0 else f"{-margin} of parameters do not fit"
    table.add_row("chunks", f"of {found.chunk_size:,} elements, {100 * found.utilisation:.1f} % used; "
                  f"{beside} beside the highest tide")  # fmt: skip
    if forecast.max is not None:
        layers = f"{forecast.max.layers} layers, " if forecast.max.layers else ""
        table.add_row("largest", f"{forecast.max.params / 1e9:.3g}B, {layers}batch {forecast.max.batch}")
    if found.step_seconds:
        table.add_row(
            "speed",
            f"{found.step_seconds:.3g} s a step, {found.tokens_per_second:,.0f} tokens/s, "
            f"{found.tflops_per_device:.3g} TFLOPS a device; bound {found.bound_seconds:.3g} s",
        )
        moved = ", ".join(f"{NAMES[k]} {format_size(n)}" for k, n in found.moved_bytes.items() if n)
        table.add_row("moved", moved or "nothing")
        if found.ssd_written:
            days = found.endurance_days
            lasts = (
                f", used up in {days:,.0f} days" if days else "; with ssd.endurance, how long the disks last"
            )
            table.add_row("written", f"{format_size(found.ssd_written)} a step to a node's SSD{lasts}")
    if found.staleness:
        table.add_row("staleness", f"{found.staleness} passes")
    table.add_row("took", f"trace {forecast.trace_seconds:.1f} s, plan {forecast.plan_seconds:.1f} s")
    return table


def _tier(tier: str, tags: Mapping[str, int]) -> Table:
    total = sum(tags.values())
    name = tier if tier == "device" else f"{tier}, a device's share"
    table = Table(title=f"{name}: {format_size(total)}", title_justify="left", show_header=False, box=None)
    for tag, count in tags.items():
        if count:
            table.add_row(f"  {tag}", format_size(count), _bar(count / total))
    return table


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + LEVELS[eighths % 8].strip()


def _strip(strip: Iterable[tuple[float, float, str]], seconds: float, width: int) -> str:
    """How busy a lane is, piece by piece."""
    busy = [0.0] * width
    piece = seconds / width
    for start, end, _ in strip:
        for place in range(max(0, int(start / piece)), min(width, int(end / piece) + 1)):
            busy[place] += max(0.0, min(end, (place + 1) * piece) - max(start, place * piece))
    shades = " ░▒▓█"
    return "".join(shades[min(4, round(4 * part / piece + 0.3)) if part else 0] for part in busy)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Several answers side by side; columns that say nothing are left out."""
    made = [_cells(one) for one in rows]
    table = Table(box=None, padding=(0, 1))
    names = [name for name in made[0] if any(row[name] for row in made)]
    for name in names:
        left = name in ("strategy", "held back by")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "strategy")
    for cells in made:
        table.add_row(*(cells[name] for name in names))
    console = Console()
    console.print(table)
    for row in rows:
        if not row["fits"]:
            console.print(
                f"{row['strategy']}, {row['gpus']}: {row['short']['message']}", highlight=False, markup=False
            )


def _cells(row: dict[str, Any]) -> dict[str, str]:
    best, moved, fits = row["max"], row["moved_bytes"], row["fits"]
    cells = {"strategy": row["strategy"], "gpus": str(row["gpus"]), "fits": "yes" if fits else "no"}
    cells["largest"] = f"{best['params'] / 1e9:.3g}B" if best else ""
    cells["batch"] = str(best["batch"]) if best else ""
    seconds = row["step_seconds"] or 0.0
    link = moved["host_to_device"] + moved["device_to_host"] if fits else 0
    wire = moved["wire"] if fits else 0
    shown = {
        "step s": f"{seconds:.3g}",
        "tokens/s": f"{row['tokens_per_second'] or 0:,.0f}",
        "TFLOPS": f"{row['tflops_per_device'] or 0:.3g}",
        "of bound": f"{100 * (row['achieved_over_bound'] or 0):.0f} %",
        "link": format_size(link) if link else "",
        "wire": format_size(wire) if wire else "",
        "speed-up": f"{row['speed_up']:.2f}" if row["speed_up"] not in (None, 1.0) else "",
        "held back by": NAMES.get(row["bottleneck"], str(row["bottleneck"])),
    }
    return cells | (shown if fits else dict.fromkeys(shown, ""))
