"""The same work by ebbtide and by others, side by side on one machine: seconds a step and memory.

    python benchmarks/peers/run_peers.py ram --model gpt2-124m --out peers.json   # everything in RAM
    python benchmarks/peers/run_peers.py nvme --out peers.json                    # optimizer state on SSD

A model from its Hugging Face config without dropout, the same weights and tokens for all, AdamW, gradients clipped to a
global norm of 1; bf16 with fp32 masters, or fp32 where the processor does not multiply bf16. Each peer runs in a process
of its own, and they take turns, for a machine is not equally fast all the time. What another system cannot run is a row
with its own error. DeepSpeed and torchao get an environment in build/peers (some minutes the first time).

Peak RSS is the kernel's (VmHWM) once the first steps are behind; `whole` is that of the process's life, what compiling
takes in it. Losses of the first steps are compared, so that nobody is faster by doing less.
Exits with 2 where something that is needed cannot be had, with 1 where the peers did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]

import environment  # noqa: E402
from child_errors import error_in  # noqa: E402
from environment import Missing, say  # noqa: E402
from provenance import ROOT, provenance  # noqa: E402

COMPARED, TOLERANCE = 3, 0.05
"""First losses that must agree, to this share of plain PyTorch's. Later ones drift apart: without warm-up of the
learning rate, rounding differences grow from step to step."""
STREAMED = 0.9
"""Share of the optimizer's state that the engine must keep on SSD for the comparison to be about SSD."""
MARK = "FACTS "
"""Begins the line in which a peer's process says what it measured; the libraries print what they like."""
Run = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    file: str
    """Beside this one; its `start` is called."""
    options: dict[str, Any] = field(default_factory=dict)
    against: str = ""
    """The row of ours that does the same."""
    theirs: bool = False
    """It needs the environment of the others' packages."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of its process."""


KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Freed memory stays in the heap: no page is given back and faulted in anew. It takes more RSS."""


def _zero(against: str, **options: Any) -> Peer:
    return Peer("deepspeed_zero", options, against, theirs=True)


RAM = {
    "plain": Peer("plain_pytorch", {}, "ebbtide"),
    "plain-kept": Peer("plain_pytorch", {}, "ebbtide", variables=KEPT),
    "ebbtide": Peer("ebbtide_engine"),
    "plain-compiled-kept": Peer("plain_pytorch", {"compiled": True}, "ebbtide-compiled", variables=KEPT),
    "plain-compiled": Peer("plain_pytorch", {"compiled": True}, "ebbtide-compiled"),
    "ebbtide-compiled": Peer("ebbtide_engine", {"compiled": True}),
    "ebbtide-quarter": Peer("ebbtide_engine", {"compiled": True, "quarter": True}),
    "fsdp2": Peer("fsdp2", {}, "ebbtide"),
    "fsdp2-compiled": Peer("fsdp2", {"compiled": True}, "ebbtide-compiled"),
    "fsdp2-offload": Peer("fsdp2", {"offload": True}, "ebbtide"),
    "zero-2": _zero("ebbtide", stage=2),
    "zero-3": _zero("ebbtide", stage=3),
    "torchao-offload": Peer("torchao_optimizers", {"kind": "offload"}, "ebbtide", theirs=True),
    "torchao-8-bit": Peer("torchao_optimizers", {"kind": "8-bit"}, "ebbtide", theirs=True),
}
ON_DISK: dict[str, Any] = {"state": "nvme"}
NVME = {
    "plain": Peer("plain_pytorch"),
    "ebbtide": Peer("ebbtide_engine", {"ssd": True}),
    "zero-3": _zero("ebbtide", **ON_DISK),
    # With the default, 4 buffers, an assertion fails.
    "zero-3-pipelined": _zero("ebbtide", **ON_DISK, buffer_count=12, pipeline_read=True, pipeline_write=True),
    "zero-3-parameters": _zero("ebbtide", **ON_DISK, parameters=True),
}
SETS = {"ram": RAM, "nvme": NVME}


# -- the parent: turns, tables --------------------------------------------------------------------------------


def main() -> int:
    options = parse()
    peers = {name: SETS[options.set][name] for name in options.peers}
    if options.peer:
        print(MARK + json.dumps(measured(peers[options.peer], options)), flush=True)
        return 0
    try:
        if any(peer.theirs for peer in peers.values()):
            environment.make(disk=options.set == "nvme")
    except Missing as error:
        say(f"run_peers: {error}")
        return 2
    result = take_turns(peers, options)
    print_table(result)
    for problem in result["problems"]:
        say(f"run_peers: {problem}")
    return 1 if result["problems"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=tuple(SETS), help="where the model data may be")
    parser.add_argument("--model", default="gpt2-124m", help="a preset of ebbtide's")
    parser.add_argument("--out", type=Path, help="a file for the result; written after each round")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each process")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each peer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device-memory", default="auto", help="ebbtide's budget of RAM")
    parser.add_argument("--peers", help="some of the set, with commas")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.batch, options.steps, options.repeats, options.threads) < 1 or options.sequence < 2:
        parser.error("batch, steps, repeats and threads must be at least 1, sequence at least 2")
    if options.warm_up < COMPARED:
        parser.error(f"--warm-up must be at least {COMPARED}: their losses are compared")
    known = list(SETS[options.set])
    options.peers = options.peers.split(",") if options.peers else known
    if set(options.peers) - set(known):
        parser.error(f"--peers: expected some of {','.join(known)}")
    return options


def take_turns(peers: dict[str, Peer], options: argparse.Namespace) -> dict[str, Any]:
    """One process of each peer in a round; who failed once is not asked again."""
    runs: dict[str, list[Run]] = {name: [] for name in peers}
    errors: dict[str, str] = {}
    result: dict[str, Any] = {}
    for number in range(options.repeats):
        for name, peer in peers.items():
            if name in errors:
                continue
            started = time.monotonic()
            found = run_peer(name, peer, options)
            if isinstance(found, str):
                errors[name] = found
                say(f"round {number + 1} of {options.repeats}, {name}: {found}")
                continue
            runs[name].append(found)
            say(
                f"round {number + 1} of {options.repeats}, {name}: {statistics.median(found['seconds']):.2f} s a step, "
                f"peak {gib(found['peak'])}, {time.monotonic() - started:.0f} s in all"
            )
        result = summary(peers, runs, errors, options)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def run_peer(name: str, peer: Peer, options: argparse.Namespace) -> Run | str:
    """What its process measured, else its error."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="peer-") as folder:
        command = [str(environment.PYTHON if peer.theirs else sys.executable), *sys.argv, "--peer", name]
        done = subprocess.run(
            command,
            env=environment.variables(options.threads) | peer.variables | {"PEER_FOLDER": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        return f"ended with {done.returncode}: {error_in(done.stderr)}"[:300]
    measured: Run = json.loads(found[-1].removeprefix(MARK).replace(folder, "FOLDER"))
    return measured


# -- a peer's process -----------------------------------------------------------------------------------------


def measured(peer: Peer, options: argparse.Namespace) -> Run:
    """The libraries are loaded before the model is built: what it takes from there on is the peer's."""
    import torch

    peer_module = import_module(peer.file)
    from task import Task, measure, memory

    from ebbtide.bench.steps import tokens
    from ebbtide.models import find_model

    torch.set_num_threads(options.threads)
    spec = find_model(options.model)
    with torch.device("meta"):
        spec.build(0)
    before = memory("VmRSS")
    module = spec.build(0).train()
    module.config.use_cache = False
    task = Task(
        module,
        tokens(options.model, options.batch, options.sequence),
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        options.precision,
        Path(os.environ["PEER_FOLDER"]),
        options.device_memory,
    )
    running = peer_module.start(task, **peer.options)
    return measure(running, options.warm_up, options.steps) | {"before": before}


# -- what comes of it -----------------------------------------------------------------------------------------


def summary(
    peers: dict[str, Peer],
    runs: dict[str, list[Run]],
    errors: dict[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    asked = ("set", "model", "batch", "sequence", "precision", "steps", "warm_up", "repeats")
    whence = provenance(shlex.join(["python", "benchmarks/peers/run_peers.py", *without_out(sys.argv[1:])]))
    done = {name: found for name, found in runs.items() if found}
    rows = [row(name, found, runs.get(peers[name].against, [])) for name, found in done.items()]
    return {
        **whence,
        **{name: getattr(options, name) for name in asked},
        "rows": [*rows, *({"peer": name, "error": said} for name, said in errors.items())],
        "problems": [*different_work(done), *too_little_streamed(options, done)],
        "versions": whence["versions"] | {"deepspeed": environment.DEEPSPEED, "torchao": environment.TORCHAO},
        "settings": {name: found[0]["settings"] for name, found in done.items()},
        "environment": {"OMP_WAIT_POLICY": "passive", "threads": options.threads},
        "machine": whence["machine"] | {"load_at_end": os.getloadavg()[0]},
    }


def without_out(arguments: list[str]) -> list[str]:
    """Where the result goes is no part of what was measured."""
    return [
        one
        for before, one in zip(["", *arguments], arguments, strict=False)
        if before != "--out" and not one.startswith("--out")
    ]


def row(name: str, found: list[Run], ours: list[Run]) -> dict[str, Any]:
    """One peer's figures: medians over its processes."""
    entry = {
        "peer": name,
        "seconds": statistics.median(second for run in found for second in run["seconds"]),
        "seconds_by_run": [statistics.median(run["seconds"]) for run in found],
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in found),
        "peak_rss": middle(found, "peak"),
        "net_peak_rss": int(statistics.median(run["peak"] - run["before"] for run in found)),
        "peak_rss_by_run": [run["peak"] for run in found],
        "whole_peak_rss": middle(found, "whole_peak"),
        "disk_read_per_step": middle(found, "disk_read"),
        "disk_written_per_step": middle(found, "disk_written"),
        "losses": found[0]["losses"],
    }
    both = list(zip(found, ours, strict=False))
    if both:
        # Round by round: the two processes of a round met the same machine, more or less.
        entry["time_over_ours"] = statistics.median(
            statistics.median(one["seconds"]) / statistics.median(other["seconds"]) for one, other in both
        )
        entry["rss_over_ours"] = entry["peak_rss"] / middle(ours, "peak")
    if "stats" in found[0]:
        entry |= {"streamed_share": found[0]["streamed_share"], "stats": found[0]["stats"]}
    return entry


def middle(found: list[Run], name: str) -> int:
    return int(statistics.median(run[name] for run in found))


def different_work(runs: dict[str, list[Run]]) -> list[str]:
    """Where first losses disagree: weights, tokens, clipping or updates are not the same then."""
    if not runs.get("plain"):
        return []
    expected = runs["plain"][0]["losses"][:COMPARED]
    return [
        f"{peer}'s first losses {found['losses'][:COMPARED]} are not those of plain PyTorch, {expected}"
        for peer, all_runs in runs.items()
        for found in all_runs
        if any(abs(a - b) > TOLERANCE * b for a, b in zip(found["losses"], expected, strict=False))
    ]


def too_little_streamed(options: argparse.Namespace, runs: dict[str, list[Run]]) -> list[str]:
    return [
        f"ebbtide kept only {found['streamed_share']:.0%} of the state on SSD: lower --device-memory"
        for found in (runs.get("ebbtide", ()) if options.set == "nvme" else ())
        if found["streamed_share"] < STREAMED
    ]


def print_table(result: dict[str, Any]) -> None:
    lines = [("peer", "s/step", "cpu s", "peak RSS", "net", "whole", "its time over ours", "its RSS")]
    for entry in result["rows"]:
        if "error" in entry:
            continue
        compared = "time_over_ours" in entry
        lines.append(
            (
                entry["peer"],
                f"{entry['seconds']:.2f}",
                f"{entry['cpu_seconds']:.2f}",
                gib(entry["peak_rss"]),
                gib(entry["net_peak_rss"]),
                gib(entry["whole_peak_rss"]),
                f"{entry['time_over_ours']:.2f}" if compared else "",
                f"{entry['rss_over_ours']:.2f}" if compared else "",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    for entry in result["rows"]:
        if "error" in entry:
            print(f"{entry['peer']}: {entry['error']}")


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
