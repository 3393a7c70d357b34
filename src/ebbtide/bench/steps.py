"""Training steps to compare: the engine's, and plain PyTorch's, in bf16 with fp32 masters or in fp32."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.profiler import profile

from ebbtide.bench.progress import BenchProgress, Report, silent
from ebbtide.config import Config
from ebbtide.devices.cpu_device import fast_dtype
from ebbtide.engine import Engine, open_tiers
from ebbtide.models import ModelSpec, find_model
from ebbtide.runtime.parameters.compiled_blocks import repeated_blocks
from ebbtide.runtime.parameters.selection import PRECISIONS
from ebbtide.tracing.standalone import NAMES

LR = 1e-4
Result = TypeVar("Result")


def suited(precision: str) -> str:
    """`auto` is bf16 where the device multiplies it, else fp32: torch's way around takes a hundred times as long."""
    if precision != "auto":
        return precision
    return "bf16" if torch.cuda.is_available() else NAMES[fast_dtype()]


def tokens(model: str, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """One batch of random tokens for a language model."""
    spec = find_model(model)
    ids = torch.randint(0, spec.vocabulary, (batch, seq), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def drawn_quickly(spec: ModelSpec) -> nn.Module:
    """Weights for timing: a million random numbers, over and over. Drawing 7 billion takes longer than the steps."""
    with torch.device("meta"):
        module = spec.build(0)
    wanted = dict(module.named_buffers())
    # What buffers hold is only known to their constructors: a model of one layer has those that are no layer's.
    known = dict(spec.with_layers(1).build(0).named_buffers()) if wanted else {}
    if any(name not in known or known[name].shape != buffer.shape for name, buffer in wanted.items()):
        return spec.build(0)
    module.to_empty(device="cpu")
    for name, buffer in module.named_buffers():
        buffer.copy_(known[name])
    if hasattr(module, "tie_weights"):
        module.tie_weights()  # type: ignore[operator]
    noise = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in module.parameters():
            for part in parameter.view(-1).split(noise.numel()):
                part.copy_(noise[: part.numel()])
    return module


def built(model: str | ModelSpec) -> nn.Module:
    return (find_model(model) if isinstance(model, str) else model).build(0)


class PlainLoop:
    """Torch's fused AdamW, on fp32 masters of bf16 parameters or on fp32 parameters: what one writes by hand."""

    def __init__(
        self,
        model: str | ModelSpec,
        batch: Mapping[str, torch.Tensor],
        device: torch.device,
        precision: str = "bf16",
        module: nn.Module | None = None,
        blocks: bool = False,
    ) -> None:
        """`module`, where it is at hand, goes before one with drawn weights. `blocks`: compile those that repeat."""
        self.module = (module or built(model)).to(device)
        self.apart = precision != "fp32"
        self.masters = list(self.module.parameters())
        if self.apart:
            self.masters = [nn.Parameter(p.detach().clone()) for p in self.masters]
            self.module.to(PRECISIONS[precision])
        for _, block in repeated_blocks(self.module) if blocks else ():
            block.compile()
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)
        self.batch = {key: value.to(device) for key, value in batch.items()}

    def step(self) -> float:
        loss = self.module(**self.batch).loss
        loss.backward()
        pairs = list(zip(self.masters, self.module.parameters(), strict=True)) if self.apart else []
        for master, parameter in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        return float(loss.detach())


class Ours:
    """The engine under a config."""

    def __init__(
        self,
        model: str | ModelSpec,
        batch: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        checkpoint: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        module = module or built(model)
        if checkpoint:
            module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        settings = Config.read({"optimizer": {"lr": LR}, **config})
        self.engine = Engine(module, settings, tiers=open_tiers(settings))
        device = self.engine.device
        self.batch = {key: value.to(device) for key, value in batch.items()}

    def step(self) -> float:
        loss = self.engine(**self.batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def step_in_a_row(self) -> tuple[float, dict[str, int]]:
        """Seconds of a step among others, and the bytes that it moved. Of two the second counts: what it leaves to be
        done beside the next one is what it has had to do of the one before. What is left then weighs on nobody else.
        """
        self.step()
        _end_kernels()
        before = self.engine.stats()["moved_bytes"]
        start = time.perf_counter()
        self.step()
        _end_kernels()
        seconds = time.perf_counter() - start
        after = self.engine.stats()["moved_bytes"]
        self.engine.synchronize()
        return seconds, {link: after[link] - before[link] for link in after}

    def close(self) -> None:
        self.engine.close()
        gc.collect()


@contextmanager
def in_process(
    start: Callable[..., None], end: Callable[[], None], *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """A process of its own: what one engine leaves in the heap is not the next one's to bear."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (start, *arguments)) as pool:
        yield pool
        pool.submit(end).result()


def _begin(start: Callable[..., None], *arguments: Any) -> None:
    end_with_parent()
    start(*arguments)


def end_with_parent() -> None:
    """This process ends when the one that started it does, whatever ends that: it has gigabytes."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="ebbtide-parent", daemon=True).start()


def alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function returns in a process of its own, for the same reason."""
    with ProcessPoolExecutor(1, get_context("spawn"), end_with_parent) as pool:
        return pool.submit(function, *arguments).result()


def race(
    jobs: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 3,
    after_itself: bool = False,
    report: Report = silent,
) -> dict[str, list[float]]:
    """Seconds of jobs that run in turn; the first rounds (traces, plans, first touch) do not count. `after_itself`: each
    runs twice, and the second time counts."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    progress = BenchProgress(rounds + warm_up, report)
    for number in range(rounds + warm_up):
        for name, job in jobs.items():
            if after_itself:
                job()
            _end_kernels()
            start = time.perf_counter()
            job()
            _end_kernels()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
        progress.done()
    return seconds


def _end_kernels() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of the ratios taken round by round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def most_allocated(job: Callable[[], object], device: torch.device) -> int:
    """Bytes that the allocator gives out, at the most, beyond what is there."""
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(profile_memory=True, use_kineto=True) as watched:
        job()
    found = watched.kineto_results.events()
    events = sorted((one.start_ns(), one.nbytes()) for one in found if one.name() == "[memory]")
    return max(accumulate(count for _, count in events))
