"""Runs the engine on a model of the zoo and compares with the reference; counts bytes by a way of its own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

import ebbtide
import reference
import zoo
from ebbtide.errors import BudgetError
from ebbtide.tracing.hooks.gradient_sums import carried_out

LR = 1e-3


class Count(TorchDispatchMode):
    """Live bytes of all storages that operators make, and of the memory that the back end handed out.

    Independent of ledger and trace: it knows only operators' outputs and what the back end counts itself. Under any such
    mode autograd adds nothing in place; that it does without is held in `test_tied.py`.
    """

    def __init__(self, engine: ebbtide.Engine) -> None:
        super().__init__()
        self.backend = engine._tiers.backend
        self.live: dict[int, tuple[int, Any]] = {}
        self.total = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = carried_out(func, args, kwargs or {})
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        self.peak = max(self.peak, self.total + self.backend.held()["device"])
        return out

    def given(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch that a loader has made: what it took to make it is the loader's."""
        for value in batch.values():
            self._see(value)
        self.peak = max(self.peak, self.total + self.backend.held()["device"])
        return batch

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or self.backend.owns(key) or storage.device.type == "meta":
            return  # imagined tensors have a storage, too, but no memory
        self.total += storage.nbytes()
        self.live[key] = (storage.nbytes(), weakref.ref(storage, lambda _: self._gone(key)))

    def _gone(self, key: int) -> None:
        found = self.live.pop(key, None)
        if found is not None:
            self.total -= found[0]


@dataclass(frozen=True)
class Run:
    sha: str
    losses: list[float]
    stats: dict[str, Any]
    counted: int
    """The most device bytes by the independent count."""


def config_of(**changes: Any) -> dict[str, Any]:
    """Tests run on the CPU unless they ask for another device."""
    changes["device"] = {"kind": "cpu", **changes.get("device", {})}
    base = {"clip": 1.0, "poison": True, "chunk_size": "64KiB", "optimizer": {"lr": LR}}
    if changes.get("layout") == "tensor":
        del base["chunk_size"]
    return base | changes


@cache
def expected(
    name: str,
    checkpointing: str,
    steps: int,
    precision: str = "bf16",
    clip: float | None = 1.0,
    accumulate: int = 1,
    device: str = "cpu",
) -> tuple[str, tuple[float, ...]]:
    dtype = reference.ROUND[precision]
    sha, losses = reference.train(
        zoo.build(name, checkpointing).to(device),
        lambda step: batch_of(name, step, dtype, device),
        steps,
        precision,
        lr=LR,
        clip=clip,
        accumulate=accumulate,
    )
    return sha, tuple(losses)


def batch_of(name: str, step: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    return {key: value.to(device) for key, value in zoo.cast(zoo.ZOO[name].batch(step), dtype).items()}


def run(name: str, checkpointing: str, steps: int, config: dict[str, Any]) -> Run:
    dtype = reference.ROUND[config.get("precision", "bf16")]
    accumulate = config.get("accumulate", 1)
    engine = ebbtide.initialize(zoo.build(name, checkpointing), config)
    try:
        losses: list[float] = []
        with Count(engine) as count:
            for step in range(steps * accumulate):
                with _disable_current_modes():
                    batch = batch_of(name, step, dtype, engine.device)
                count.given(batch)
                out = engine(**batch)  # held meanwhile, as it mostly is
                engine.backward(out.loss)
                engine.step()
                losses.append(out.loss.item())
                del out
                engine.check_integrity()
        return Run(engine.weights_sha256(), losses, engine.stats(), count.peak)
    finally:
        engine.close()


def least_budget(name: str, checkpointing: str, steps: int, config: dict[str, Any]) -> tuple[int, Run]:
    """The smallest device budget that works, found by following the refusals' advice, and its run."""
    budget = 200_000
    for _ in range(12):
        try:
            return budget, run(name, checkpointing, steps, with_budget(config, budget))
        except BudgetError as error:
            assert error.tier == "device" and error.short > 0
            budget += error.short
    raise AssertionError(f"no budget up to {budget} works for {name}")


def with_budget(config: dict[str, Any], budget: int) -> dict[str, Any]:
    return config | {"device": {**config["device"], "memory": budget}}


def facts(name: str, checkpointing: str, config: dict[str, Any]) -> tuple[int, int, int]:
    """(non-model peak, model data bytes, parameter bytes) of the resident run."""
    done = run(name, checkpointing, 2, config)
    tags = done.stats["tags"]["device"]
    return done.stats["non_model_peak"], sum(tags.values()), tags["param"]
