"""`ebbtide plan`: whether a model trains on a machine, how fast, and what holds it back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ebbtide.cli.settings import SIZE, at_least, configure, one_of
from ebbtide.collecting import collecting_nothing
from ebbtide.config import Config
from ebbtide.errors import ConfigError
from ebbtide.units import parse_size

if TYPE_CHECKING:
    from ebbtide.forecasting.forecaster import Forecast, Forecaster, Workload
    from ebbtide.forecasting.simulation.machine import Machine

MODEL = (
    "A name as for train, one of the families gpt-1b to gpt-68b and angel-gpt-..., angel-t5-..., or spelled: "
    "gpt:layers=78,hidden=4096,heads=16 (also t5:, llama:, bert:)."
)
PAGE = ".html"
REPORT = "Write a page (FILE.html); or what is printed and the timeline, as JSON (any other name)."
STRATEGY = "ebbtide, patrickstar, angel-ptm, static or all-on-device."


def plan(
    model: Annotated[str, Option(help=MODEL)],
    machine: Annotated[str, Option(help="A machine file (TOML), or the name of a described machine.")],
    gpus: Annotated[
        str | None, Option(help="Devices; several numbers give a row each. Left out: all it has.")
    ] = None,
    batch: Annotated[int, Option(help="Sequences in a device's micro-batch.")] = 1,
    seq: Annotated[int, Option(help="Length of a sequence; images have their own.")] = 1024,
    checkpoint_activations: Annotated[
        bool, Option("--checkpoint-activations", help="Compute activations again in backward.")
    ] = False,
    offload_activations: Annotated[
        bool, Option("--offload-activations", help="Keep activations on the host until backward.")
    ] = False,
    accumulate: Annotated[int | None, Option(help="Micro-batches in a step.")] = None,
    clip: Annotated[float | None, Option(help="Clip the gradients to this global norm.")] = None,
    precision: Annotated[str | None, Option(help="bf16, fp16 or fp32.")] = None,
    master: Annotated[str | None, Option(help="auto, split or separate.")] = None,
    layout: Annotated[str | None, Option(help="chunk, page or tensor.")] = None,
    chunk_size: Annotated[str | None, Option(help=f"Of a chunk or page: auto, or {SIZE}.")] = None,
    placement: Annotated[str | None, Option(help="auto, host or static.")] = None,
    prefetch: Annotated[str | None, Option(help="on or off.")] = None,
    updates: Annotated[str | None, Option(help="exact, in-backward or lock-free.")] = None,
    max_staleness: Annotated[int | None, Option(help="Of lock-free updates.")] = None,
    strategy: Annotated[str, Option(help=STRATEGY)] = "ebbtide",
    compare: Annotated[bool, Option("--compare", help="All strategies side by side.")] = False,
    find_max: Annotated[str | None, Option(help="model (its layers vary) or batch.")] = None,
    min_tflops: Annotated[float, Option(help="What --find-max asks of each device.")] = 0.0,
    device_memory: Annotated[str | None, Option(help=f"In place of the machine's: {SIZE}.")] = None,
    host_memory: Annotated[str | None, Option(help=f"Of a node, in place of the machine's: {SIZE}.")] = None,
    ssd_memory: Annotated[str | None, Option(help=f"Of a node, in place of the machine's: {SIZE}.")] = None,
    report: Annotated[
        Path | None,
        Option(
            help="Write a page (FILE.html), or what is printed and the timeline as JSON (any other name)."
        ),
    ] = None,
    config: Annotated[
        Path | None, Option(help="Settings in TOML or JSON; a flag overrides its setting.")
    ] = None,
    json: Annotated[bool, Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Say before training whether it fits, how fast it goes and what holds it back."""
    settings = configure(
        config,
        {
            "--precision": precision,
            "--master": master,
            "--layout": layout,
            "--chunk-size": chunk_size,
            "--placement": placement,
            "--prefetch": None if prefetch is None else one_of("--prefetch", prefetch, ("on", "off")) == "on",
            "--updates": updates,
            "--max-staleness": max_staleness,
            "--accumulate": accumulate,
            "--clip": clip,
        },
    )
    at_least("--batch", batch, 1)
    at_least("--seq", seq, 2)
    if min_tflops < 0:
        raise ConfigError(f"--min-tflops: expected a number of at least 0, found {min_tflops:g}")
    if min_tflops and find_max is None:
        raise ConfigError("--min-tflops: expected --find-max beside it, which it is a condition of")
    if find_max is not None:
        one_of("--find-max", find_max, ("model", "batch"))
    from ebbtide.forecasting.simulation.machine import Machine
    from ebbtide.forecasting.simulation.strategies import STRATEGIES
    from ebbtide.models.lookup import look_up

    one_of("--strategy", strategy, STRATEGIES)
    described = _budgets(Machine.read(machine), device_memory, host_memory, ssd_memory)
    machines = [described.with_devices(count) for count in _counts(gpus)] or [described]
    look_up(model)
    several = compare or len(machines) > 1
    if several and report is not None and report.suffix == PAGE:
        raise ConfigError(
            f"--report: a page shows one forecast, found {str(report)!r} with --compare or several --gpus; name a .json"
        )
    from ebbtide.cli.doing import doing

    with collecting_nothing(), doing(f"tracing {model}, planning and simulating", silent=json):
        from ebbtide.forecasting.forecaster import Forecaster, Workload  # torch, from here on

        work = Workload(batch, seq, checkpoint_activations, offload_activations)
        forecaster = Forecaster(model, _without_budgets(settings, device_memory, host_memory, ssd_memory))
        strategies = list(STRATEGIES) if compare else [strategy]
        rows = [
            _answer(forecaster, one, work, name, find_max, min_tflops, compare)
            for one in machines
            for name in strategies
        ]
    _show(rows, several, report, json)


def _answer(
    forecaster: Forecaster,
    machine: Machine,
    work: Workload,
    strategy: str,
    find_max: str | None,
    min_tflops: float,
    compare: bool,
) -> Forecast:
    from ebbtide.forecasting.forecast import find_largest

    if find_max is None:
        return forecaster.answer(machine, work, strategy, explain=not compare)
    try:
        return find_largest(forecaster, machine, work, strategy, find_max, min_tflops)
    except ConfigError:
        if not compare:
            raise
        return forecaster.answer(machine, work, strategy, explain=False)  # side by side, none is an answer


def _counts(text: str | None) -> list[int]:
    if text is None:
        return []
    counts = []
    for part in text.split(","):
        if not (part.strip().isascii() and part.strip().isdecimal()) or int(part) < 1:
            raise ConfigError(f"--gpus: expected numbers of devices such as 8 or 1,2,4,8, found {text!r}")
        counts.append(int(part))
    return counts


def _budgets(machine: Machine, device: str | None, host: str | None, ssd: str | None) -> Machine:
    sizes: dict[str, int | None] = {}
    for flag, given, least in (("device", device, 1), ("host", host, 0), ("ssd", ssd, 0)):
        try:
            sizes[flag] = None if given is None else parse_size(given)
            if given is not None and parse_size(given) < least:
                raise ConfigError(f"expected a size above zero, found {given!r}")
        except ConfigError as error:
            raise ConfigError(f"--{flag}-memory: {error}") from None
    return machine.with_memory(**sizes)


def _without_budgets(config: Config, device: str | None, host: str | None, ssd: str | None) -> Config:
    """A flag overrides its setting."""
    given = {"device.memory": (device, "auto"), "host.memory": (host, "auto"), "ssd.memory": (ssd, 0)}
    return config.with_({key: unset for key, (flag, unset) in given.items() if flag is not None})


def _show(rows: list[Forecast], several: bool, report: Path | None, as_json: bool) -> None:
    from ebbtide.cli.output import print_json
    from ebbtide.cli.plan_view import print_forecast, print_rows

    result = _result(rows, several)
    if report is not None:
        _write(report, rows, result)
    if as_json:
        print_json(result)
    elif several:
        print_rows(result["rows"])
    else:
        print_forecast(rows[0])


def _write(report: Path, rows: list[Forecast], result: dict[str, Any]) -> None:
    if report.suffix == PAGE:
        from ebbtide.report.build_page import write_page
        from ebbtide.report.forecast_figures import forecast_figures

        write_page(forecast_figures(rows[0].to_dict(), rows[0].outlook), report)
        return
    from json import dumps

    timelines = [row.outlook.timeline for row in rows]
    report.write_text(dumps({**result, "timelines": timelines}, indent=1), encoding="utf-8")


def _result(rows: list[Forecast], several: bool) -> dict[str, Any]:
    if not several:
        return rows[0].to_dict()
    made = [row.to_dict() for row in rows]
    for row, first in zip(made, _firsts(made), strict=True):
        before, now = first["tokens_per_second"], row["tokens_per_second"]
        row["speed_up"] = now / before if now and before else None
    return {"model": rows[0].model, "machine": rows[0].machine, "rows": made}


def _firsts(rows: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """For each row the first one of its strategy, which its speed is held against."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        yield first.setdefault(row["strategy"], row)
