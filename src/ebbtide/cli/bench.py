"""`ebbtide bench`: what the mechanisms cost, measured on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ebbtide.cli.settings import AUTO, SIZE, at_least, one_of
from ebbtide.errors import ConfigError
from ebbtide.units import parse_size

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)

Json = Annotated[bool, Option("--json", help="End with one line of JSON.")]
Model = Annotated[str, Option(help="A preset or the path of a config.json.")]
Batch = Annotated[int, Option(help="Sequences in a batch.")]
Seq = Annotated[int, Option(help="Length of a sequence.")]
Precision = Annotated[str, Option(help="bf16 or fp32; auto: bf16 where the processor multiplies it.")]
Repeats = Annotated[int, Option(help="Measured steps of each variant.")]
Quick = Annotated[
    bool, Option("--quick", help="In two minutes, on a small model: to see that it runs, not what it costs.")
]


SMALL = {"model": "gpt2-tiny", "seq": 128, "repeats": 3}
"""What --quick measures."""


@bench.command()
def update(
    context: typer.Context,
    elements: Annotated[int, Option(help="Parameters that are updated.")] = 100_000_000,
    rounds: Annotated[int, Option(help="Measured updates of each variant.")] = 7,
    threads: Annotated[int, Option(help="That all variants run on.")] = 2,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """The one-pass update against torch's fused AdamW with its casts, and against the memory."""
    if quick:
        elements = _quickly(context, "elements", 10_000_000, elements)
        rounds = _quickly(context, "rounds", 3, rounds)
    for flag, value in (("--elements", elements), ("--rounds", rounds), ("--threads", threads)):
        at_least(flag, value, 1)
    from ebbtide.bench.update import run

    _print(run(elements, rounds, threads), json)


@bench.command()
def overhead(
    context: typer.Context,
    model: Model = "gpt2-124m",
    batch: Batch = 2,
    seq: Seq = 256,
    repeats: Repeats = 15,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """A step with everything resident against plain PyTorch's."""
    _measure_steps(context, "ebbtide.bench.overhead", {"model": "gpt2-tiny", "repeats": 5})


@bench.command()
def compiled(
    context: typer.Context,
    model: Model = "gpt2-124m",
    batch: Batch = 2,
    seq: Seq = 512,
    repeats: Repeats = 7,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Steps with compiled blocks against plain PyTorch's with the same: resident, and with room for a quarter."""
    _measure_steps(context, "ebbtide.bench.compiled_steps", SMALL)


@bench.command()
def loss(
    context: typer.Context,
    tokens: Annotated[int, Option(help="That the loss is of.")] = 8192,
    vocabulary: Annotated[int, Option(help="Words.")] = 131_072,
    width: Annotated[int, Option(help="Of the hidden states.")] = 512,
    repeats: Repeats = 3,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Head and loss by blocks of tokens against all logits at once: time and memory."""
    if quick:
        tokens = _quickly(context, "tokens", 2048, tokens)
        vocabulary = _quickly(context, "vocabulary", 50_000, vocabulary)
        width = _quickly(context, "width", 128, width)
        repeats = _quickly(context, "repeats", 2, repeats)
    options = {"tokens": tokens, "vocabulary": vocabulary, "width": width, "repeats": repeats}
    for name, value in options.items():
        at_least(f"--{name}", value, 1)
    from ebbtide.bench.loss_pieces import run

    _print(run(**options, precision=_precision(precision), report=_say), json)


@bench.command()
def offload(
    context: typer.Context,
    model: Model = "gpt2-124m",
    batch: Batch = 2,
    seq: Seq = 256,
    repeats: Repeats = 7,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """A step under ever smaller device budgets against the resident one."""
    _measure_steps(context, "ebbtide.bench.budget_cost", SMALL)


@bench.command()
def forecast(
    context: typer.Context,
    models: Annotated[str, Option(help="Presets, with commas.")] = "gpt2-124m,gpt2-350m,gpt2-1b",
    seqs: Annotated[str, Option(help="Lengths of a sequence, with commas.")] = "256,1024",
    repeats: Repeats = 5,
    visits: Annotated[int, Option(help="How often each row is measured, all rows in turn.")] = 2,
    journal: Annotated[
        Path | None, Option(help="A file for what is measured; given again, the run goes on from there.")
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Predicted and measured steps, bytes moved and peaks, on this machine as `doctor` measures it."""
    if quick:
        models = _quickly(context, "models", "gpt2-tiny", models)
        seqs = _quickly(context, "seqs", "128", seqs)
        repeats = _quickly(context, "repeats", 2, repeats)
        visits = _quickly(context, "visits", 1, visits)
    at_least("--repeats", repeats, 1)
    at_least("--visits", visits, 1)
    lengths = []
    for part in seqs.split(","):
        if not (part.isascii() and part.isdecimal()) or int(part) < 2:
            raise ConfigError(f"--seqs: expected lengths such as 256,1024, found {seqs!r}")
        lengths.append(int(part))
    from ebbtide.bench.forecast_accuracy import run

    found = run(tuple(models.split(",")), tuple(lengths), repeats, None, _say, journal, visits)
    _print(found, json)


@bench.command()
def ssd(
    context: typer.Context,
    models: Annotated[str, Option(help="Presets, with commas.")] = "gpt2-350m,gpt2-1b",
    shares: Annotated[str, Option(help="Of the optimizer state, on SSD, with commas.")] = "0.5,0.9",
    seq: Seq = 256,
    repeats: Repeats = 5,
    folder: Annotated[Path | None, Option(help="On the disk to be used; left out, the system's.")] = None,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Optimizer state on SSD: a step against what disk and cores must do, all measured in this run."""
    if quick:
        models = _quickly(context, "models", "gpt2-124m", models)
        shares = _quickly(context, "shares", "0.9", shares)
        repeats = _quickly(context, "repeats", 1, repeats)
        seq = _quickly(context, "seq", 64, seq)
    at_least("--repeats", repeats, 1)
    at_least("--seq", seq, 2)
    found = _precision(precision)
    from ebbtide.bench.ssd_steps import run

    parts = tuple(_share("--shares", part, shares) for part in shares.split(","))
    _print(run(tuple(models.split(",")), parts, seq, repeats, folder, found, report=_say), json)


@bench.command()
def lockfree(
    context: typer.Context,
    model: Model = "gpt2-350m",
    share: Annotated[float, Option(help="Of the optimizer state, on SSD.")] = 0.9,
    batch: Batch = 1,
    seq: Seq = 64,
    turns: Annotated[int, Option(help="Of each engine.")] = 3,
    seconds: Annotated[float, Option(help="That an engine trains for in a turn.")] = 30.0,
    max_staleness: Annotated[int, Option(help="Steps that values may be behind.")] = 4,
    after: Annotated[
        int, Option(help="Exact steps that both go on from; 0: by time, from the beginning.")
    ] = 0,
    steps: Annotated[int, Option(help="With --after: steps of each of the two engines.")] = 300,
    data: Annotated[str | None, Option(help="A text file or folder; left out, Python's library.")] = None,
    folder: Annotated[Path | None, Option(help="On the disk to be used; left out, the system's.")] = None,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Lock-free updates against exact ones, with state on SSD: steps a second, and what is learnt in equal time (or,
    with --after, in equal steps)."""
    if quick:
        model = _quickly(context, "model", "gpt2-tiny", model)
        turns = _quickly(context, "turns", 1, turns)
        seconds = _quickly(context, "seconds", 8.0, seconds)
    for flag, value, least in (
        ("--batch", batch, 1),
        ("--seq", seq, 2),
        ("--turns", turns, 1),
        ("--max-staleness", max_staleness, 1),
        ("--after", after, 0),
        ("--steps", steps, 1),
    ):
        at_least(flag, value, least)
    if not 0 < seconds <= 3600:
        raise ConfigError(f"--seconds: expected seconds above 0 and up to 3600, found {seconds}")
    from ebbtide.bench.lock_free_steps import go_on, run
    from ebbtide.cli.data import load_text

    text = load_text(data)
    part = _share("--share", str(share), str(share))
    common = (text.train, text.valid, model, part, batch, seq)
    rest = (max_staleness, folder, _precision(precision))
    if after:
        found = go_on(*common, after, steps, *rest, report=_say)
    else:
        found = run(*common, turns, seconds, *rest, report=_say)
    _print(found, json)


@bench.command()
def scale(
    device_memory: Annotated[str, Option(help=f"RAM for chunks and activations: {SIZE}.")],
    host_memory: Annotated[str, Option(help=f"RAM beside it: {SIZE}.")] = "0",
    ssd_memory: Annotated[str, Option(help=f"{SIZE}.")] = "0",
    ssd_dir: Annotated[Path | None, Option(help="On the disk to be used; left out, the system's.")] = None,
    ssd_endurance: Annotated[str, Option(help="Bytes that may be written in the disk's life (TBW).")] = "0",
    seq: Seq = 1024,
    batch: Batch = 1,
    steps: Annotated[int, Option(help="Measured steps.")] = 3,
    precision: Precision = AUTO,
    json: Json = False,
) -> None:
    """The largest GPT that trains exactly within budgets: found by the plan, proved with real steps."""
    for flag, value, least in (("--seq", seq, 2), ("--batch", batch, 1), ("--steps", steps, 1)):
        at_least(flag, value, least)
    sizes = [parse_size(text) for text in (device_memory, host_memory, ssd_memory, ssd_endurance)]
    found = _precision(precision)
    from ebbtide.bench.scale import run

    device, host, ssd, endurance = sizes
    _print(run(device, host, ssd, ssd_dir, seq, batch, steps, endurance, found, report=_say), json)


@bench.command()
def ranks(
    context: typer.Context,
    model: Model = "gpt2-124m",
    batch: Annotated[int, Option(help="Sequences in the batch that all ranks share.")] = 4,
    seq: Seq = 256,
    sizes: Annotated[str, Option(help="Numbers of ranks, with commas.")] = "1,2,4",
    repeats: Repeats = 5,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Throughput on one rank and on several, against plain DDP and FSDP2 on the same cores."""
    if quick:
        model = _quickly(context, "model", "gpt2-tiny", model)
        sizes = _quickly(context, "sizes", "1,2", sizes)
        repeats = _quickly(context, "repeats", 2, repeats)
    options = _options(model, batch, seq, repeats)
    numbers = []
    for part in sizes.split(","):
        if not (part.isascii() and part.isdecimal()) or not 1 <= int(part) <= 64:
            raise ConfigError(f"--sizes: expected numbers of ranks such as 1,2,4, found {sizes!r}")
        if batch % int(part):
            raise ConfigError(
                f"--batch: expected a multiple of {part}, for so many ranks share it; found {batch}"
            )
        numbers.append(int(part))
    from ebbtide.bench.rank_scaling import run

    _print(run(**options, sizes=numbers, report=_say), json)


@bench.command()
def recording(
    context: typer.Context,
    model: Model = "gpt2-124m",
    batch: Batch = 2,
    seq: Seq = 256,
    repeats: Repeats = 7,
    precision: Precision = AUTO,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """What engine.record takes of a step: charges counted, times what one takes; and steps in pairs."""
    _measure_steps(context, "ebbtide.bench.recording_cost", SMALL)


@bench.command()
def save(
    context: typer.Context,
    model: Model = "gpt2-1b",
    repeats: Annotated[int, Option(help="Checkpoints of each kind.")] = 6,
    folder: Annotated[
        Path | None,
        Option(help="On the disk to be used, with room for four checkpoints; left out, the system's."),
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """How fast a checkpoint is written, against what the disk takes in the same minute, and what RAM that takes."""
    if quick:
        model = _quickly(context, "model", "gpt2-124m", model)
        repeats = _quickly(context, "repeats", 1, repeats)
    at_least("--repeats", repeats, 1)
    from ebbtide.bench.save_speed import run

    _print(run(model, repeats, folder, report=_say), json)


@bench.command()
def overlap(
    unit: Annotated[float, Option(help="Seconds of each sleep.")] = 0.02,
    repeats: Repeats = 5,
    json: Json = False,
) -> None:
    """Pairs of resources that have as much to do, made of sleeps: how much longer than one of them a step takes."""
    at_least("--repeats", repeats, 1)
    if not 0.001 <= unit <= 10:
        raise ConfigError(f"--unit: expected seconds from 0.001 to 10, found {unit}")
    from ebbtide.bench.overlap import run

    _print(run(unit, repeats), json)


def _quickly(context: typer.Context, name: str, quick: Any, found: Any) -> Any:
    """The quick value, unless another was asked for."""
    source = context.get_parameter_source(name)
    return quick if source is None or source.name == "DEFAULT" else found


def _measure_steps(context: typer.Context, module: str, small: Mapping[str, Any]) -> None:
    """Steps of a model, by the options that such benchmarks have. `small`: some of them, with --quick."""
    asked = dict(context.params)
    if asked["quick"]:
        asked |= {name: _quickly(context, name, value, asked[name]) for name, value in small.items()}
    options = _options(asked["model"], asked["batch"], asked["seq"], asked["repeats"])
    options["precision"] = _precision(asked["precision"])
    from ebbtide.devices.heap import tune_memory

    run = import_module(module).run
    tune_memory(scarce=False)
    _print(run(**options, report=_say), asked["json"])


def _precision(asked: str) -> str:
    return one_of("--precision", asked, (AUTO, "bf16", "fp32"))


def _share(flag: str, part: str, given: str) -> float:
    try:
        share = float(part)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"{flag}: expected shares above 0 and up to 1 such as 0.5, found {given!r}")
    return share


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _options(model: str, batch: int, seq: int, repeats: int) -> dict[str, Any]:
    for flag, value in (("--batch", batch), ("--seq", seq), ("--repeats", repeats)):
        at_least(flag, value, 1)
    return {"model": model, "batch": batch, "seq": seq, "repeats": repeats}


def _print(result: Mapping[str, Any], json: bool) -> None:
    from ebbtide.cli.output import print_json, print_result

    (print_json if json else print_result)(result)
