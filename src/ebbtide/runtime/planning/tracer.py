"""Iterations as records: from a pass that runs, or from one that is only imagined, so that even the first has a plan."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.devices import Backend
from ebbtide.errors import warn_user
from ebbtide.planner.record import Record
from ebbtide.runtime.gradients.destinations import InPlaceGradients
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.runtime.parameters.unmanaged import Unmanaged
from ebbtide.runtime.planning.calls import Call
from ebbtide.tracing.hooks import Interceptor
from ebbtide.tracing.live_recorder import Recorder
from ebbtide.tracing.meter import AllocatorMeter, ByNode, StorageMeter, storage_bytes
from ebbtide.tracing.symbolic.escapes import Escapes
from ebbtide.tracing.symbolic.trace import FakeParameters, scalar_loss, trace_symbolically


class Tracer:
    """The pass that is recorded, where one is."""

    def __init__(self, backend: Backend, unmanaged: Unmanaged, kept: InPlaceGradients) -> None:
        self.recorder: Recorder | None = None
        self._backend, self._unmanaged, self._kept = backend, unmanaged, kept
        self._meter: Any = None
        self._outside: set[int] = set()
        """Storages of parameters outside the chunks."""
        self._beside = 0
        """Bytes of a GPU that others than the engine had when it began."""
        self._before = 0
        """Bytes that the meter saw when the pass began, and those of state that is to come."""
        self._carried = self._aside = 0
        """Of what the meter sees, outputs of earlier passes: in forward, and in backward."""
        self._imagined: Record | None = None
        self._over: tuple[Record, Any, int] | None = None
        self._nodes = ByNode()
        kept.watch_by(self)

    def begin(self) -> None:
        """The engine holds the model. What else is on a GPU by now (a teacher) lies beside the budget, which is of what
        was free; but what the model has outside the chunks, every plan counts."""
        backend = self._backend
        if backend.kind == "cuda":
            gc.collect()  # what is found is taken to stay
            found = torch.cuda.memory_allocated(backend.device) - backend.held()["device"]
            there = self._unmanaged.fixed_bytes() - self._unmanaged.missing_bytes()
            self._beside = max(0, found - there)

    def start(self, call: Call, held: int, imagined: Record | None) -> None:
        """`held`: bytes of earlier passes' outputs. An allocator counts all; a meter of storages, those it saw made.
        `imagined`: the same pass, as it was foreseen."""
        self._imagined = imagined
        backend = self._backend
        self._carried = self._aside = held if backend.kind == "cuda" else 0
        if backend.kind == "cuda":
            self._meter = AllocatorMeter(backend.device, lambda: backend.held()["device"], self._beside)
            fixed = self._unmanaged.missing_bytes()  # the rest is among what the allocator counts
            self._before = self._meter.alive() + fixed
        else:
            self._outside = self._unmanaged.storages()
            self._meter = StorageMeter(self._is_model_data, backend.device)
            self._meter.note((call.args, call.kwargs))
            fixed = self._unmanaged.fixed_bytes()
        backend.watch(self._meter)
        inputs = storage_bytes(
            value
            for value in tree_iter((call.args, call.kwargs))
            if isinstance(value, torch.Tensor) and value.device == backend.device
        )
        self.recorder = Recorder(call.signature, self._meter, fixed, inputs)

    def alive(self) -> int | None:
        """Bytes of non-model data that are there now, where a pass is recorded."""
        return None if self.recorder is None else self.recorder.alive()

    def reverse(self, held: int, beyond: Callable[[], list[torch.Tensor]]) -> None:
        """Backward begins, with so many bytes of earlier passes' outputs. `beyond`: what the loop's own operators have
        saved, which an allocator has counted."""
        self._aside = min(self._aside, held)
        if self.recorder is not None and isinstance(self._meter, StorageMeter):
            self._meter.note(beyond())

    def metered(self, by_node: bool) -> AbstractContextManager[Any]:
        """Around a pass. `by_node`: a backward that the user's code started, which `reach` is told of."""
        if not isinstance(self._meter, StorageMeter) or self.recorder is None:
            return nullcontext()
        return self._nodes.around(self._meter, self._meter.note) if by_node else self._meter

    def reach(self) -> None:
        """Such a backward has come to an output of forward: what is behind it is metered, too."""
        self._nodes.reach()

    def finish(self, packed: int = -1) -> bool:
        """The pass is over, in which autograd has saved so much; False where it was not recorded."""
        if self.recorder is None:
            return False
        if isinstance(self._meter, StorageMeter):
            for storage in self._unmanaged.gradients():
                self._meter.disown(storage)  # every moment has it by now
        found = self.recorder.finish(self._imagined)
        record = replace(found, carried=self._carried, aside=self._aside, packed=packed)
        self._over = (record, self._meter, self._before)
        self.abandon()
        return True

    def abandon(self) -> None:
        self.recorder = None
        self._backend.watch(None)

    @property
    def last(self) -> Record | None:
        """The record of the pass that is over, until it is taken."""
        return None if self._over is None else self._over[0]

    def take(self) -> Record | None:
        """The record of a pass that is over, once: with what it left alive when the next one is about to start. What was
        there before it did, its moments have already."""
        if self._over is None:
            return None
        (record, meter, before), self._over = self._over, None
        missing = self._unmanaged.missing_bytes() if isinstance(meter, AllocatorMeter) else 0
        return record.carrying(max(0, meter.alive() + missing - before))

    def claim(self, storage: int) -> None:
        """A gradient is kept as it is: no longer non-model data."""
        if isinstance(self._meter, StorageMeter):
            self._meter.disown(storage)

    def _is_model_data(self, storage: int) -> bool:
        return self._backend.owns(storage) or storage in self._outside or self._kept.owns(storage)


def imagine(
    module: nn.Module,
    data: ModelData,
    interceptor: Interceptor,
    fixed: int,
    call: Call,
    saved: bool,
    free: int,
    escapes: Escapes | None = None,
) -> Record:
    """A symbolic trace, so that even the first iteration has a plan. Any operator may lack a fake kernel: it raises
    whatever that does. `saved`: with what forward saves. `free`: bytes that non-model data may take meanwhile."""
    fake = FakeParameters(
        tuple(data.run_of),
        tuple(p.shape for p in data.places),
        tuple(p.stride for p in data.places),
        tuple(data.store.chunks["param", p.chunk].dtype for p in data.places),
        tuple(p.requires_grad for p in data.parameters),
        data.store.backend.device,
        tuple(data.gradients_together().items()),
    )
    return trace_symbolically(
        module,
        fake,
        call.args,
        call.kwargs,
        call.signature,
        fixed,
        interceptor.substituted,
        scalar_loss,
        saved=saved,
        free=free,
        function=call.function,
        escapes=escapes,
    )


class SymbolicPasses:
    def __init__(
        self,
        module: nn.Module,
        data: ModelData,
        interceptor: Interceptor,
        unmanaged: Unmanaged,
        saved: bool,
        obstacle: str,
    ) -> None:
        """`saved`: activations may leave the device, so it is to be known which are saved. `obstacle`: why passes cannot
        be imagined, where that is known."""
        self._module, self._data, self._interceptor = module, data, interceptor
        self._unmanaged, self._saved = unmanaged, saved
        self.obstacle = obstacle
        self.note = ""
        """Why there was no trace, the last time."""
        self._told: set[str] = set()

    def imagine(self, call: Call) -> Record | None:
        if self.obstacle:
            self.note = self.obstacle
            return None
        self.note = ""
        ledger, escapes = self._data.store.ledger, Escapes()
        try:
            return imagine(
                self._module,
                self._data,
                self._interceptor,
                self._unmanaged.fixed_bytes(),
                call,
                saved=self._saved,
                free=ledger.level["device"] + ledger.room("device"),
                escapes=escapes,
            )
        except Exception as reason:
            # Any operator may lack a fake kernel; the first iteration is then cautious instead.
            self.note = f"{type(reason).__name__}: {reason}"
            return None
        finally:
            self._tell(escapes)

    def _tell(self, escapes: Escapes) -> None:
        for held in escapes.find():
            if held not in self._told:
                self._told.add(held)
                warn_user(
                    f"forward, or a hook, keeps a tensor of a pass that was only imagined, which has no values: {held}. "
                    "Keep it where the engine can put it back (an attribute of the module), or keep it only "
                    "`if not ebbtide.imagining()`"
                )
