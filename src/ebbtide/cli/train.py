"""`ebbtide train`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ebbtide.cli.settings import CHECKPOINTS, SIZE, TrainTask, configure, offloaded, one_of
from ebbtide.config import Config
from ebbtide.errors import ConfigError
from ebbtide.strict import read_file

if TYPE_CHECKING:
    from ebbtide.cli.data import Text
    from ebbtide.cli.loop import Training

DATA = "A text file or folder; left out: the sources of the Python standard library, as bytes."
PLANNED = 2
"""Steps after which the plan is made from a traced pass."""
MODEL = "A preset (gpt2-tiny, llama-tiny, bert-tiny, t5-tiny, vit-tiny, gpt2-124m, gpt2-350m, gpt2-1b), the path of a config.json, or a folder with weights."  # noqa: E501


def train(
    model: Annotated[str, Option(help=MODEL)] = "gpt2-tiny",
    data: Annotated[str | None, Option(help=DATA)] = None,
    steps: Annotated[int, Option(help="Updates, in total.")] = 100,
    batch: Annotated[int, Option(help="Sequences in a micro-batch, over all ranks.")] = 4,
    seq: Annotated[int, Option(help="Length of a sequence; images have their own.")] = 128,
    accumulate: Annotated[int | None, Option(help="Micro-batches in a step.")] = None,
    clip: Annotated[float | None, Option(help="Clip the gradients to this global norm.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate.")] = None,
    schedule: Annotated[str, Option(help="Of the learning rate: constant, cosine or linear.")] = "constant",
    seed: Annotated[int, Option(help="Of drawn weights and of batches.")] = 0,
    eval_every: Annotated[int, Option(help="Steps between evaluations; 0: none.")] = 0,
    precision: Annotated[str | None, Option(help="bf16, fp16 or fp32.")] = None,
    master: Annotated[str | None, Option(help="auto, split or separate.")] = None,
    layout: Annotated[str | None, Option(help="chunk, page or tensor.")] = None,
    chunk_size: Annotated[str | None, Option(help=f"Of a chunk or page: auto, or {SIZE}.")] = None,
    placement: Annotated[str | None, Option(help="auto, host or static.")] = None,
    eviction: Annotated[str | None, Option(help="farthest-next-use, lru or list-order.")] = None,
    prefetch: Annotated[str | None, Option(help="on or off.")] = None,
    updates: Annotated[
        str | None, Option(help="exact, in-backward (no clipping, no accumulation) or lock-free.")
    ] = None,
    max_staleness: Annotated[
        int | None, Option(help="Steps that the values may be behind, where updates are lock-free.")
    ] = None,
    checkpoint_activations: Annotated[
        bool, Option("--checkpoint-activations", help="Compute activations again in backward.")
    ] = False,
    offload_activations: Annotated[
        str | None,
        Option(
            help="Keep on the host until backward: checkpoints, or all that is saved. Bare: checkpoints where "
            "there are some, else all."
        ),
    ] = None,
    device: Annotated[str | None, Option(help="auto, cuda or cpu.")] = None,
    device_memory: Annotated[str | None, Option(help=f"Chunks and activations: auto, or {SIZE}.")] = None,
    host_memory: Annotated[str | None, Option(help=f"auto, or {SIZE}.")] = None,
    ssd_memory: Annotated[str | None, Option(help=f"Of the folders together: {SIZE}.")] = None,
    ssd_dir: Annotated[str | None, Option(help="On a fast disk; for several, a list in the config.")] = None,
    config: Annotated[
        Path | None, Option(help="Settings in TOML or JSON; a flag overrides its setting.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for metrics and the trained weights.")] = None,
    log_moves: Annotated[
        Path | None, Option(help="A file (JSON lines): what each chunk moved over each link in each step.")
    ] = None,
    save_every: Annotated[int, Option(help="Steps between checkpoints, in --out; 0: none.")] = 0,
    keep: Annotated[int, Option(help="Checkpoints that stay, the newest.")] = 2,
    resume: Annotated[
        str | None,
        Option(
            help="auto: from the newest checkpoint in --out, if there is one; or the folder of a checkpoint."
        ),
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Say what stays where, and why, once the plan is made.")
    ] = False,
    json: Annotated[bool, Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Train a model within memory budgets."""
    task = TrainTask(
        model, data, steps, batch, seq, seed, schedule, eval_every, checkpoint_activations, save_every, keep
    )
    if out is None and (save_every or resume == "auto"):
        raise ConfigError("--save-every and --resume auto: expected --out FOLDER, where checkpoints are")
    settings = configure(
        config,
        {
            "--precision": precision,
            "--master": master,
            "--layout": layout,
            "--chunk-size": chunk_size,
            "--placement": placement,
            "--eviction": eviction,
            "--prefetch": None if prefetch is None else one_of("--prefetch", prefetch, ("on", "off")) == "on",
            "--updates": updates,
            "--max-staleness": max_staleness,
            "--offload-activations": offloaded(offload_activations, checkpoint_activations),
            "--accumulate": accumulate,
            "--clip": clip,
            "--lr": lr,
            "--device": device,
            "--device-memory": device_memory,
            "--host-memory": host_memory,
            "--ssd-memory": ssd_memory,
            "--ssd-dir": ssd_dir,
        },
    )
    _check(model, data, out, resume)
    from ebbtide.cli.data import load_text
    from ebbtide.cli.doing import doing
    from ebbtide.cli.loop import Training
    from ebbtide.cli.output import print_json, print_result
    from ebbtide.cli.world import joined

    with joined(settings.device.kind) as world:
        asked = settings.precision
        if precision is None:
            settings = _in_fast_precision(settings, config)
        with doing(f"building {model}, and taking it into chunks", silent=not world.first):
            text = load_text(data, out)
            world.require_same(_told(task, text, resume))
            training = Training(task, settings, text=text, world=world)
        try:
            ours = settings.precision != asked
            quiet = json or not world.first
            result = _run(training, out, log_moves, resume, quiet, ours, verbose and world.first)
        finally:
            training.close()
    if world.first:
        (print_json if json else print_result)(result)


def _told(task: TrainTask, text: Text, resume: str | None) -> dict[str, Any]:
    """What all ranks must be told alike beside the config, which the engine compares. The text may have a path of its
    own on each machine."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in asdict(task).items() if name != "data"}
    return {**flags, "--resume": resume, "the text of --data (its digest)": text.digest}


def _check(model: str, data: str | None, out: Path | None, resume: str | None) -> None:
    """Names and paths, before torch is imported."""
    from ebbtide.checkpoint.folders import RunFolder, find, step_of
    from ebbtide.cli.data import check_text
    from ebbtide.models.lookup import look_up

    look_up(model)
    if data is not None:
        check_text(data)
    if resume not in (None, "auto"):
        find(resume)
    if out is not None:
        _open_folder(out)
        if resume is None and (earlier := RunFolder(out / CHECKPOINTS).latest()) is not None:
            raise ConfigError(
                f"--out: {out} has the checkpoints of an earlier run, up to step {step_of(earlier)}, and those of a new "
                "run would take their place; --resume auto goes on with that run, else choose another folder"
            )


def _in_fast_precision(settings: Config, file: Path | None) -> Config:
    """Where nothing says the precision, and bf16 would be emulated: fp32. It is said with the first step."""
    import torch

    from ebbtide.devices.cpu_device import fast_dtype

    kind = settings.device.kind
    on_cpu = kind == "cpu" or (kind == "auto" and not torch.cuda.is_available())
    said = file is not None and "precision" in read_file(file, "config")
    if said or not on_cpu or settings.master != "auto" or fast_dtype() is not torch.float32:
        return settings
    return settings.with_({"precision": "fp32"})


def _open_folder(out: Path) -> None:
    """Before hours of training: what comes of them can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out: {out} cannot be written to ({error.strerror}); choose a folder that can"
        ) from None


def _run(
    training: Training,
    out: Path | None,
    log_moves: Path | None,
    resume: str | None,
    json: bool,
    precision_is_ours: bool,
    verbose: bool,
) -> dict[str, Any]:
    """What training came to."""
    import torch

    from ebbtide.cli.checkpoints import Checkpoints
    from ebbtide.cli.doing import doing
    from ebbtide.cli.moves_log import MovesLog
    from ebbtide.cli.output import say
    from ebbtide.cli.watched_steps import with_progress

    checkpoints = Checkpoints(training, out or Path())
    before = checkpoints.resume(resume) if resume is not None else None
    if before is not None:
        # The run may have ended before its model was written, or lacked the room.
        if out is not None:
            with doing(f"writing the model to {out}", silent=not training.world.first):
                training.engine.export(out, torch.float32)
        return before
    saving = out is not None and training.task.save_every > 0
    first = training.world.first
    if out is not None:
        training.record(out)
    with (
        MovesLog(log_moves if first else None) as moves,
        checkpoints.told_to_end() if saving else nullcontext(),
    ):
        for step in with_progress(training, json):
            if log_moves is not None:
                moves.add(step.number, training.engine.stats()["moved_by_chunk"])
            if precision_is_ours and not json and len(training.history) == training.resumed + 1:
                say("this processor has no bf16 instructions: the precision is fp32 (else: --precision bf16)")
            if verbose and len(training.history) == training.resumed + PLANNED:
                for line in str(training.engine.explain()).splitlines():
                    say(line)
            if step.valid_loss is not None and not json:
                say(f"evaluated after step {step.number}: loss {step.valid_loss:.4f}")
            if saving:
                checkpoints.after(step.number)
        complete = len(training.history) == training.task.steps
        if saving and not complete:
            checkpoints.save()  # at once: whoever told it to end waits for seconds only
        with doing("reading the weights for their hash", silent=not first):
            result = training.summary()
        if saving and complete:
            checkpoints.save(result)
        if training.recording is not None:
            training.recording.describe(result=result)
        if out is not None:
            with doing(f"writing the model to {out}", silent=not first):
                training.engine.export(out, torch.float32)
    if first:
        _say_where(training, out, saving, complete)
    return result


def _say_where(training: Training, out: Path | None, saving: bool, complete: bool) -> None:
    """Why the result is short, and where everything is."""
    from ebbtide.cli.output import say

    done, steps = len(training.history), training.task.steps
    if not complete:
        say(f"stopped by {training.ended} after step {done} of {steps}; --resume auto goes on from there")
    if out is not None:
        checkpoints = f", checkpoints in {out / CHECKPOINTS}" if saving else ""
        say(f"the model is in {out}, metrics in {out / 'metrics.jsonl'}{checkpoints}")
        say(f"`ebbtide report {out}` shows what the run did")
