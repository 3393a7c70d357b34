"""`ebbtide demo`: a small GPT learns to write Python in less device memory than it needs."""

from __future__ import annotations

import time
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from ebbtide.cli.data import Text
    from ebbtide.cli.loop import Training

SHAPE = {"n_layer": 3, "n_embd": 128, "n_head": 4, "n_positions": 128, "initializer_range": 0.08}
"""Drawn wider than GPT-2, for a width of 128: the first thousand steps bring twice as much."""
BATCH, SEQ, LR = 4, 128, 2e-3
CHECKED = 3
"""Steps after which the weights are compared with those of the unrestricted run."""
SECONDS = 80
"""Of training, however slow the machine is: with everything around it less than two minutes."""
MOST = 2000
"""Steps, however fast it is."""
PROMPTS = (b"def ", b"if s", b"clas", b"impo")
WRITTEN = 110
KINDS = {
    "param": "parameters",
    "grad": "gradients",
    "master": "master weights",
    "momentum": "momentum",
    "variance": "variance",
}


def demo() -> None:
    """Train a small GPT under a device budget of its activations plus a quarter of its model data."""
    from ebbtide.bench.steps import suited
    from ebbtide.cli.data import load_text
    from ebbtide.units import format_size

    console = Console(highlight=False, soft_wrap=True)
    text = load_text(None)
    console.print(f"A small GPT reads {text.source}. First {CHECKED} steps with all the memory there is:")
    precision = suited("auto")
    free = _unrestricted(text, precision)
    budget = free["non_model"] + free["model"] // 4
    console.print(
        f"  {free['params'] / 1e6:.1f}M parameters in {precision}: {format_size(free['model'])}"
        " of model data, padding of chunks included\n"
        f"  {format_size(free['non_model'])} of activations and temporaries at the peak\n"
        f"Now with {format_size(budget)} of device memory: the activations and a quarter of the model data."
    )
    training = _training(text, precision, min(MOST, CHECKED + int(SECONDS / free["step_seconds"])), budget)
    try:
        sha = _train(training)
        losses = [step.loss for step in training.history]
        console.print(
            f"\nThe loss went from {losses[0]:.2f} to {mean(losses[-20:]):.2f} in {len(losses)} steps "
            f"(it stops after {SECONDS} seconds), at {training.tokens_per_second:,.0f} tokens a second."
        )
        _print_moves(console, training)
        console.print(
            f"\nSHA-256 of the weights after {CHECKED} steps:\n  unrestricted   {free['sha256']}\n"
            f"  in the budget  {sha}\n  {'the same bits' if sha == free['sha256'] else 'DIFFERENT: a bug'}\n"
            "\nWhat the model now writes:"
        )
        for sample in _write(training):
            console.rule(style="dim")
            console.print(sample, markup=False)
        console.rule(style="dim")
    finally:
        training.close()


def _train(training: Training) -> str:
    """Until the steps or the time is used up; the hash of the weights after the checked steps."""
    from ebbtide.cli.watched_steps import with_progress

    sha = ""
    deadline = time.monotonic() + SECONDS
    for step in with_progress(training, json=False):
        if step.number == CHECKED:
            sha = training.engine.weights_sha256()
        elif time.monotonic() > deadline:
            break
    return sha


def _training(text: Text, precision: str, steps: int, budget: int | str) -> Training:
    from ebbtide.cli.loop import Training
    from ebbtide.cli.settings import TrainTask
    from ebbtide.config import Config
    from ebbtide.models.presets import PRESETS
    from ebbtide.models.spec import spec_of

    settings = {"precision": precision, "optimizer.lr": LR, "device.memory": budget, "clip": 1.0}
    task = TrainTask("demo", None, steps, BATCH, SEQ)
    spec = spec_of(task.model, PRESETS["gpt2-tiny"] | SHAPE)
    return Training(task, Config().with_(settings), text, spec)


def _unrestricted(text: Text, precision: str) -> dict[str, Any]:
    training = _training(text, precision, CHECKED, "auto")
    try:
        for _ in training.steps():
            pass
        stats = training.engine.stats()
        return {
            "params": training.parameters,
            "non_model": stats["non_model_peak"],
            "model": sum(stats["tags"]["device"].values()),
            "step_seconds": min(step.seconds for step in training.history),
            "sha256": training.engine.weights_sha256(),
        }
    finally:
        training.close()


def _print_moves(console: Console, training: Training) -> None:
    from ebbtide.cli.output import rows_table
    from ebbtide.units import format_size

    stats = training.engine.stats()
    tiers = stats["peak_bytes"]
    kinds = [kind for kind in KINDS if any(stats["tags"][tier].get(kind) for tier in tiers)]
    rows = [
        {"bytes of": KINDS[kind], **{t: format_size(stats["tags"][t].get(kind, 0)) for t in tiers}}
        for kind in kinds
    ]
    rows.append({"bytes of": "all, with activations"} | {t: format_size(tiers[t]) for t in tiers})
    rows.append({"bytes of": "the budget"} | {t: format_size(stats["budget_bytes"][t]) for t in tiers})
    steps = len(training.history)
    links = [
        {"link": link.replace("_", " "), "moved": format_size(count), "a step": format_size(count // steps)}
        for link, count in stats["moved_bytes"].items()
    ]
    console.print(rows_table("Where the bytes were, at the peak of each", rows))
    console.print(rows_table("What moved", links))
    console.print(
        f"{stats['fetches']:,} times a chunk was fetched, {stats['evictions']:,} times one was written back; "
        f"{stats['drops']:,} times a copy left without traffic, for the host had the same."
    )


def _write(training: Training) -> list[str]:
    """What the model now writes: a few samples at once, always the same for the same weights."""
    import torch

    prompts = torch.tensor([list(prompt) for prompt in PROMPTS])
    engine = training.engine
    engine.module.eval()
    torch.manual_seed(0)
    with engine.resident(), torch.no_grad():
        device = next(engine.module.parameters()).device
        ids = engine.module.generate(  # type: ignore[operator]
            prompts.to(device), max_new_tokens=WRITTEN, do_sample=True, temperature=0.6, pad_token_id=0
        )
    engine.module.train()
    return ["".join(_printable(byte) for byte in row).rstrip() for row in ids.tolist()]


def _printable(byte: int) -> str:
    return chr(byte) if byte == ord("\n") or 32 <= byte < 127 else "."
