"""Throughput on one rank and on several, against what one would use otherwise: DDP and FSDP2, on the same cores.

All three live in the same processes and step in turn on the same global batch, so that a machine that is slow for a
while is slow for all of them. Parameters are bf16 with fp32 masters everywhere; gradients cross the wire in bf16.
"""

from __future__ import annotations

import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ebbtide.bench.steps import LR, Ours, PlainLoop, built, tokens
from ebbtide.errors import RanksError
from ebbtide.runtime.distributed.rank_groups import RankGroup

STEPS = 2
"""In a row: what one leaves to be done beside the next step is part of the time."""
WARM_UP = 3
SATURATING = 64 << 20
"""Bytes that a rank sends in a collective whose rate no larger one passes."""
PATIENCE = 3600.0


def run(
    model: str, batch: int, seq: int, sizes: Sequence[int], repeats: int, report: Callable[[str], None]
) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    rows = []
    for size in sizes:
        report(f"{size} {'rank' if size == 1 else 'ranks'}")
        rows.append(_row(size, max(1, cores // size), model, batch, seq, repeats))
    return {"model": model, "batch": batch, "seq": seq, "cores": cores, "repeats": repeats, "rows": rows}


def _row(size: int, threads: int, model: str, batch: int, seq: int, repeats: int) -> dict[str, Any]:
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank, args=(rank, size, threads, store, answers, model, batch, seq, repeats)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            found = _answer(answers, processes)
        finally:
            for process in processes:
                process.join(30)
                process.kill()
    return {"ranks": size, "threads": threads, **found}


def _answer(answers: Any, processes: Sequence[Any]) -> dict[str, Any]:
    """The first rank's, or what befell another one."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            good, found = answers.get(timeout=1)
        except queue.Empty:
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise RanksError(f"a rank of the benchmark ended early: exit codes {codes}") from None
            continue
        if not good:
            raise RanksError(f"a rank of the benchmark failed: {found}")
        answer: dict[str, Any] = found
        return answer
    raise RanksError(f"the benchmark's ranks do not answer for {PATIENCE:.0f} s")


def _rank(
    rank: int,
    size: int,
    threads: int,
    store: str,
    answers: Any,
    model: str,
    batch: int,
    seq: int,
    repeats: int,
) -> None:
    from ebbtide.devices.heap import tune_memory

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    tune_memory(scarce=False)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        found = _measure(rank, size, model, batch, seq, repeats)
        if not rank:
            answers.put((True, found))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        answers.put((False, f"rank {rank}: {type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _measure(rank: int, size: int, model: str, batch: int, seq: int, repeats: int) -> dict[str, Any]:
    each = batch // size
    rows = {key: value[rank * each : (rank + 1) * each] for key, value in tokens(model, batch, seq).items()}
    ours = Ours(model, rows, {"precision": "bf16"})
    jobs: dict[str, _Job] = {
        "ours": ours,
        "ddp": _Ddp(model, rows, torch.device("cpu")),
        "fsdp2": _Fsdp(model, rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    losses: dict[str, float] = {}
    for number in range(WARM_UP + repeats):
        for name, job in jobs.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                losses[name] = job.step()
            if name == "ours":
                ours.engine.synchronize()
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    found = _rates(seconds, STEPS * batch * seq)
    found["losses"] = losses
    if size > 1:
        found |= _wire(ours)
    ours.close()
    return found


def _rates(seconds: Mapping[str, Sequence[float]], count: int) -> dict[str, Any]:
    """Tokens a second, and how ours compares, round by round."""
    found: dict[str, Any] = {
        f"{name}_tokens_per_second": count / statistics.median(each) for name, each in seconds.items()
    }
    for name in ("ddp", "fsdp2"):
        ratios = [theirs / mine for theirs, mine in zip(seconds[name], seconds["ours"], strict=True)]
        found[f"over_{name}"] = statistics.median(ratios)
    return found


def _wire(ours: Ours) -> dict[str, Any]:
    """How near the wire's best rate gathers of the engine's size come, and how often ranks agree before a collective."""
    session = ours.engine._session
    ranks = session.ranks
    assert ranks is not None
    slices = [chunk.nbytes for chunk in session.store.chunks.values() if chunk.kind == "param"]
    crew = RankGroup(ranks, ranks.size)
    sent, agreements = ranks.sent, ranks.agreements
    ours.step()
    ours.engine.synchronize()
    return {
        "slice_bytes": statistics.median(slices),
        "sent_bytes_per_step": ranks.sent - sent,
        "agreements_per_step": ranks.agreements - agreements,
        "gather_share": _gather_rate(crew, slices) / _gather_rate(crew, [SATURATING]),
    }


def _gather_rate(crew: RankGroup, slices: Sequence[int], rounds: int = 9) -> float:
    """Bytes a second that a rank sends in one gather after the other of such slices."""
    mine = torch.zeros(max(slices), dtype=torch.uint8)
    whole = torch.zeros(max(slices) * crew.size, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for each in slices:
            crew.gather(whole[: each * crew.size], mine[:each]).wait()
        seconds.append(time.perf_counter() - start)
    return sum(slices) * (crew.size - 1) / statistics.median(seconds)


class _Job(Protocol):
    def step(self) -> float:
        """Returns this rank's loss."""


class _Ddp(PlainLoop):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.module = nn.parallel.DistributedDataParallel(self.module)


class _Fsdp:
    def __init__(self, model: str, batch: Mapping[str, torch.Tensor]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.module = built(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layers in [module for module in self.module.modules() if isinstance(module, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR, fused=True)
        self.batch = batch

    def step(self) -> float:
        loss = self.module(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
