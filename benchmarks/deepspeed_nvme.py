"""Side by side on one machine: DeepSpeed ZeRO-3 with NVMe offload, ebbtide with its SSD tier, plain PyTorch.

    python benchmarks/deepspeed_nvme.py --json

GPT-2 124M from its Hugging Face config without dropout, the same weights and tokens for all, bf16 computation with fp32
masters (or all in fp32, for processors that do not multiply bf16), AdamW, gradients clipped to a global norm of 1. Every
peer runs in a process of its own; they take turns, for
the machine is not equally fast all the time. DeepSpeed gets a virtual environment beside this script, with the torch and
transformers that run this script; its operators are compiled there once (some minutes).

Peak RSS is the kernel's (VmHWM), of the whole life of the process; `net` is that less what the process took before the
model was built (the libraries). Losses of the first steps are compared, so that nobody is faster by doing less.
Exits with 2 where something that is needed cannot be had, with 1 where the peers did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VENV = HERE / ".venv-deepspeed"
DEEPSPEED = "0.19.8"
OPERATORS = ("AsyncIOBuilder", "CPUAdamBuilder")
LIBAIO = ("libaio-dev", "libaio1", "libaio1t64")
"""Debian packages with its header and its library; the last is the library's name in newer releases."""

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 1.0
PEERS = ("deepspeed", "deepspeed-pipelined", "deepspeed-params", "ebbtide", "plain")
AGAINST = "deepspeed"
"""The configuration of DeepSpeed that `speedup` and `rss_ratio` are about: its smallest by far; the others, which the
rows have, are as fast within the noise of a machine."""
COMPARED, TOLERANCE = 3, 0.05
"""First losses that must agree, to this share of plain PyTorch's. Later ones drift apart: without warm-up of the
learning rate, rounding differences grow from step to step."""
STREAMED = 0.9
"""Share of the optimizer's state that ebbtide must keep on SSD for the comparison to be about SSD."""
MARK = "FACTS "
"""Begins the line in which a peer's process says what it measured; the libraries print what they like."""


class Missing(Exception):
    """Something that this comparison needs is not there."""


# -- the parent: environments, turns, tables ------------------------------------------------------------------


def main() -> int:
    options = parse()
    if options.peer:
        print(MARK + json.dumps(PEER[options.peer](Work(json.loads(options.work)))), flush=True)
        return 0
    try:
        prepare(options.peers)
        runs = take_turns(options)
    except Missing as error:
        print(f"deepspeed_nvme: {error}", file=sys.stderr)
        return 2
    result = summarise(options, runs)
    print_table(result)
    if options.json:
        print(json.dumps(result))
    for problem in result["problems"]:
        print(f"deepspeed_nvme: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--folder", help="on the disk to measure; left out: beside this script")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each process")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each peer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device-memory", default="1250MB", help="ebbtide's budget of RAM")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS), help="with commas")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.batch, options.steps, options.repeats, options.threads) < 1 or options.sequence < 2:
        parser.error("batch, steps, repeats and threads must be at least 1, sequence at least 2")
    if options.warm_up < COMPARED:
        parser.error(f"--warm-up must be at least {COMPARED}: their losses are compared")
    if set(options.peers) - set(PEERS):
        parser.error(f"--peers: expected some of {','.join(PEERS)}")
    return options


def take_turns(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each process measured, by peer; one of each in a round."""
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in options.peers}
    for number in range(options.repeats):
        for peer in options.peers:
            started = time.monotonic()
            runs[peer].append(run_peer(peer, options))
            facts = runs[peer][-1]
            say(
                f"round {number + 1} of {options.repeats}, {peer}: {statistics.median(facts['seconds']):.2f} s a step, "
                f"peak {gib(facts['peak'])}, {time.monotonic() - started:.0f} s in all"
            )
    return runs


def run_peer(peer: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder or HERE, prefix=".nvme-") as folder:
        work = {
            "folder": folder,
            "batch": options.batch,
            "sequence": options.sequence,
            "steps": options.steps,
            "warm_up": options.warm_up,
            "threads": options.threads,
            "device_memory": options.device_memory,
            "precision": options.precision,
        }
        python = VENV / "bin" / "python" if peer.startswith("deepspeed") else sys.executable
        command = [str(python), __file__, "--peer", peer, "--work", json.dumps(work)]
        done = subprocess.run(command, env=environment(options.threads), capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        raise Missing(f"{peer} failed with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(found[-1].removeprefix(MARK).replace(folder, "FOLDER"))


def environment(threads: int) -> dict[str, str]:
    """What all peers run under, and what DeepSpeed needs in place of a launcher and of a system-wide libaio."""
    unpacked = VENV / "libaio" / "usr"
    libraries = [str(path.parent) for path in unpacked.glob("lib/**/libaio.so")]
    changes = {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(threads),
        "MAX_JOBS": str(threads),
        "PATH": os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(HERE.parent / "src"),
        "TORCH_EXTENSIONS_DIR": str(VENV / "extensions"),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if libraries:
        changes |= {
            "CFLAGS": f"-I{unpacked / 'include'}",
            "CPATH": str(unpacked / "include"),
            "LDFLAGS": f"-L{libraries[0]}",
            "LIBRARY_PATH": libraries[0],
            "LD_LIBRARY_PATH": libraries[0],
        }
    return {**os.environ, **changes}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- DeepSpeed's environment ----------------------------------------------------------------------------------


def prepare(peers: list[str]) -> None:
    try:
        version("torch"), version("transformers")
    except ModuleNotFoundError as error:
        raise Missing(f"run it with ebbtide's environment (make install): {error}") from None
    if any(peer.startswith("deepspeed") for peer in peers):
        make_environment()


def make_environment() -> None:
    """A virtual environment with DeepSpeed and its compiled operators; what is there already is kept."""
    wanted = {name: version(name).split("+")[0] for name in ("torch", "transformers")}
    wanted |= {"deepspeed": DEEPSPEED, "python": platform.python_version()}
    ready = VENV / "ready.json"
    if ready.exists() and json.loads(ready.read_text()) == wanted:
        return
    if shutil.which("g++") is None:
        raise Missing("g++ is needed to compile DeepSpeed's operators")
    if not (VENV / "bin" / "python").exists():
        say(f"making {VENV}")
        run("a virtual environment", sys.executable, "-m", "venv", str(VENV))
    packages = [f"{name}=={wanted[name]}" for name in ("torch", "transformers")]
    install(*packages, "ninja", "setuptools", "wheel")
    install("--no-build-isolation", f"deepspeed=={DEEPSPEED}")  # its set-up looks at the torch that is there
    find_libaio()
    compile_operators()
    ready.write_text(json.dumps(wanted))


def install(*packages: str) -> None:
    say("installing " + " ".join(packages))
    run("pip", str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", *packages)


def find_libaio() -> None:
    """The header and library that DeepSpeed's disk operator is linked with: the system's, or unpacked beside it."""
    if links_libaio():
        return
    say("unpacking libaio")
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with tempfile.TemporaryDirectory() as folder:
            for package in LIBAIO:
                subprocess.run(["apt-get", "download", "-q", package], cwd=folder, capture_output=True)
            for archive in Path(folder).glob("*.deb"):
                run("dpkg-deb", "dpkg-deb", "-x", str(archive), str(VENV / "libaio"))
    if not links_libaio():
        raise Missing("libaio's header and library are needed (libaio-dev), and could not be downloaded")


def links_libaio() -> bool:
    program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }"
    command = ["g++", "-x", "c++", "-", "-laio", "-o", os.devnull]
    return not subprocess.run(
        command, input=program, text=True, capture_output=True, env=environment(1)
    ).returncode


def compile_operators() -> None:
    """Ahead of the runs, so that none of them spends its time or memory on it."""
    say("compiling DeepSpeed's operators: some minutes")
    for lock in VENV.glob("extensions/*/lock"):
        lock.unlink()  # of a build that was ended: the next one would wait for it forever
    builders = " ".join(f"get_accelerator().create_op_builder('{name}').load();" for name in OPERATORS)
    program = f"from deepspeed.accelerator import get_accelerator; {builders}"
    run("compiling DeepSpeed's operators", str(VENV / "bin" / "python"), "-c", program)


def run(what: str, *command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(len(os.sched_getaffinity(0)))
    )
    if done.returncode:
        raise Missing(f"{what} failed:\n{(done.stdout + done.stderr)[-3000:]}")


# -- a peer's process -----------------------------------------------------------------------------------------


class Work:
    """What a peer is asked to do, and the meters around its steps."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.folder, self.threads = asked["folder"], asked["threads"]
        self.steps, self.warm_up = asked["steps"], asked["warm_up"]
        self.batch, self.sequence = asked["batch"], asked["sequence"]
        self.device_memory, self.precision = asked["device_memory"], asked["precision"]
        self.before = 0

    def model(self) -> Any:
        """GPT-2 124M with the weights of seed 0. Called once the libraries are loaded: what follows is the peer's."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.set_num_threads(self.threads)
        self.before = memory("VmRSS")
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()

    def tokens(self) -> dict[str, Any]:
        """One batch, again and again: a loss that falls shows that the updates do something."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 50_257, (self.batch, self.sequence), generator=generator)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    def measure(self, step: Callable[[], Any]) -> dict[str, Any]:
        """`step` makes one and returns its loss, a tensor."""
        built = memory("VmHWM")
        losses, seconds = [], []
        (read, written), cpu = disk_bytes(), 0.0
        for number in range(self.warm_up + self.steps):
            if number == self.warm_up:
                (read, written), cpu = disk_bytes(), sum(os.times()[:2])
            start = time.perf_counter()
            losses.append(float(step().detach()))
            seconds.append(time.perf_counter() - start)
        after = disk_bytes()
        return {
            "seconds": seconds[self.warm_up :],
            "losses": losses,
            "cpu_seconds": (sum(os.times()[:2]) - cpu) / self.steps,
            "before": self.before,
            "built_peak": built,
            "peak": memory("VmHWM"),
            "disk_read": (after[0] - read) // self.steps,
            "disk_written": (after[1] - written) // self.steps,
        }


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise Missing(f"/proc/self/status has no {field}")


def disk_bytes() -> tuple[int, int]:
    """(read, written) by this process, as the kernel counts what reaches the disk."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"]), int(facts["write_bytes"])


def deepspeed_settings(work: Work, variant: str) -> dict[str, Any]:
    """Offload as its documentation has it, with buffers for a model of this size: the defaults are for far larger
    ones, and with them it takes more memory and is no faster. `pin_memory` does nothing on a CPU."""
    nvme = {"device": "nvme", "nvme_path": work.folder, "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 20_000_000,
        "reduce_bucket_size": 50_000_000,
        "offload_optimizer": {**nvme, "buffer_count": 4},
    }
    if variant == "pipelined":  # with the default, 4 buffers, an assertion fails
        zero["offload_optimizer"] |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    if variant == "params":
        # A buffer holds one parameter, and the largest, the embedding, has 38.6 million elements. 5 (the default)
        # or 8 buffers end the second step with "Not enough buffers"; this is one for each parameter.
        zero["offload_param"] = {**nvme, "buffer_count": 52, "buffer_size": 40_000_000, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": work.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
        },
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }


def step_of(engine: Any, batch: Any) -> Callable[[], Any]:
    """The same three calls for both engines."""

    def step() -> Any:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def run_deepspeed(work: Work, variant: str = "") -> dict[str, Any]:
    import deepspeed
    from transformers import GPT2LMHeadModel  # noqa: F401  (libraries count as loaded before the model)

    settings = deepspeed_settings(work, variant)
    model = work.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return work.measure(step_of(engine, work.tokens())) | {"settings": settings}


def run_ebbtide(work: Work) -> dict[str, Any]:
    from transformers import GPT2LMHeadModel  # noqa: F401

    import ebbtide

    settings = {
        "precision": work.precision,
        "clip": CLIP,
        "threads": work.threads,
        "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
        "device": {"memory": work.device_memory},
        "host": {"memory": 0},
        "ssd": {"folder": work.folder, "memory": "4GB"},
    }
    model = work.model()
    engine = ebbtide.initialize(model, settings)
    ebbtide.tune_memory(engine)  # as `ebbtide train` does
    facts = work.measure(step_of(engine, work.tokens())) | {"settings": settings}
    stats = engine.stats()
    facts["streamed_share"] = 1 - stats["device_state_chunks"] / stats["chunks"]
    facts["stats"] = {key: stats[key] for key in ("moved_bytes", "peak_bytes", "stall_seconds", "tags")}
    engine.close()
    return facts


def run_plain(work: Work) -> dict[str, Any]:
    import torch
    from transformers import GPT2LMHeadModel  # noqa: F401

    model = work.model()
    masters = list(model.parameters())
    if apart := work.precision == "bf16":
        masters = [parameter.detach().clone().requires_grad_() for parameter in masters]
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    batch = work.tokens()

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        pairs = list(zip(masters, model.parameters(), strict=True)) if apart else []
        for master, parameter in pairs:
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        return loss

    return work.measure(step) | {"settings": {"masters": "fp32", "fused": True}}


PEER = {
    "deepspeed": run_deepspeed,
    "deepspeed-pipelined": partial(run_deepspeed, variant="pipelined"),
    "deepspeed-params": partial(run_deepspeed, variant="params"),
    "ebbtide": run_ebbtide,
    "plain": run_plain,
}


# -- what comes of it -----------------------------------------------------------------------------------------


def summarise(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rows = [row(peer, found, runs.get("ebbtide")) for peer, found in runs.items()]
    by_peer = {entry["peer"]: entry for entry in rows}
    result: dict[str, Any] = {
        "model": "gpt2-124m",
        "batch": options.batch,
        "sequence": options.sequence,
        "precision": options.precision,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "repeats": options.repeats,
        "rows": rows,
    }
    if AGAINST in by_peer and "ebbtide" in by_peer:
        result["speedup"] = by_peer[AGAINST]["ebbtide_speedup"]
        result["rss_ratio"] = by_peer[AGAINST]["ebbtide_rss_ratio"]
    result["problems"] = [*different_work(runs), *too_little_streamed(runs)]
    result["versions"] = versions()
    result["settings"] = {peer: found[0]["settings"] for peer, found in runs.items()}
    result["environment"] = {"OMP_WAIT_POLICY": "passive", "threads": options.threads}
    result["machine"] = machine(Path(options.folder or HERE))
    return result


def row(peer: str, found: list[dict[str, Any]], ours: list[dict[str, Any]] | None) -> dict[str, Any]:
    """One peer's figures: medians over its processes."""
    entry = {
        "peer": peer,
        "seconds": statistics.median(second for run in found for second in run["seconds"]),
        "seconds_by_run": [statistics.median(run["seconds"]) for run in found],
        "cpu_seconds": statistics.median(run["cpu_seconds"] for run in found),
        "peak_rss": middle(found, "peak"),
        "net_peak_rss": int(statistics.median(run["peak"] - run["before"] for run in found)),
        "peak_rss_by_run": [run["peak"] for run in found],
        "peak_rss_before_training": middle(found, "built_peak"),
        "disk_read_per_step": middle(found, "disk_read"),
        "disk_written_per_step": middle(found, "disk_written"),
        "losses": found[0]["losses"],
    }
    if ours is not None and peer != "ebbtide":
        # Round by round: the two processes of a round met the same machine, more or less.
        entry["ebbtide_speedup"] = statistics.median(
            statistics.median(a["seconds"]) / statistics.median(b["seconds"])
            for a, b in zip(found, ours, strict=True)
        )
        entry["ebbtide_rss_ratio"] = middle(ours, "peak") / entry["peak_rss"]
    if peer == "ebbtide":
        entry |= {"streamed_share": found[0]["streamed_share"], "stats": found[0]["stats"]}
    return entry


def middle(found: list[dict[str, Any]], field: str) -> int:
    return int(statistics.median(run[field] for run in found))


def different_work(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
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


def too_little_streamed(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [
        f"ebbtide kept only {found['streamed_share']:.0%} of the state on SSD: lower --device-memory"
        for found in runs.get("ebbtide", ())
        if found["streamed_share"] < STREAMED
    ]


def versions() -> dict[str, str]:
    names = {name: version(name) for name in ("torch", "transformers")}
    return names | {"deepspeed": DEEPSPEED, "python": platform.python_version()}


def machine(folder: Path) -> dict[str, Any]:
    kind = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    mount = subprocess.run(["df", "--output=source,fstype", folder], capture_output=True, text=True).stdout
    return {
        "cpu": kind,
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": " ".join(mount.splitlines()[-1].split()) if mount else "",
        "load_at_end": os.getloadavg()[0],
    }


def print_table(result: dict[str, Any]) -> None:
    names = (
        "peer",
        "s/step",
        "cpu s",
        "peak RSS",
        "net",
        "read/step",
        "written/step",
        "ebbtide faster",
        "its RSS",
    )
    lines = [names]
    for entry in result["rows"]:
        compared = "ebbtide_speedup" in entry
        lines.append(
            (
                entry["peer"],
                f"{entry['seconds']:.2f}",
                f"{entry['cpu_seconds']:.2f}",
                gib(entry["peak_rss"]),
                gib(entry["net_peak_rss"]),
                gib(entry["disk_read_per_step"]),
                gib(entry["disk_written_per_step"]),
                f"{entry['ebbtide_speedup']:.2f}x" if compared else "",
                f"{entry['ebbtide_rss_ratio']:.0%}" if compared else "",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
