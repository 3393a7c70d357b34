"""What earlier passes left: outputs that the loop still holds, and forward passes whose backward has not come.

`out = engine(**batch)` keeps the last outputs until forward has given new ones, and a loop that validates may keep
those of a larger batch. A trace knows what its own pass leaves; the rest lies beside the plan. A forward pass whose
outputs are gone waits for nothing. One that comes while others wait (a sum of two losses) takes its room beside what
they saved.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from ebbtide.devices import Backend
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record
from ebbtide.planner.shape import ModelShape
from ebbtide.planner.uses import SCALARS
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.runtime.planning.calls import PLAIN, Call, leaves, tensors
from ebbtide.runtime.planning.plan_cache import KnownInput, PlanCache
from ebbtide.runtime.planning.tracer import SymbolicPasses
from ebbtide.tracing.saved_storages import saved_beyond


class LiveOutputs:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """By the address of a storage's object: its bytes, and whether it is still there."""
        self._old: set[int] = set()

    def add(self, output: Any) -> None:
        """A pass has given this. The memory is what counts: a view of it keeps all."""
        for leaf in tensors(output):
            if leaf.layout != torch.strided or is_wrapper(leaf):
                continue
            try:
                storage = leaf.untyped_storage()
            except NotImplementedError:
                continue  # within a transform of torch.func; it goes with it
            key = storage._cdata
            if storage.device.type == self._backend.device.type and not self._backend.owns(key):
                self._held[key] = storage.nbytes(), weakref.ref(storage)
                self._old.discard(key)

    def begin(self) -> None:
        """A training pass begins: what is there is old."""
        self._tidy()
        self._old = set(self._held)

    @property
    def nbytes(self) -> int:
        """Of all that are still held."""
        self._tidy()
        return sum(count for count, _ in self._held.values())

    @property
    def old(self) -> int:
        """Of those from before the pass that is under way."""
        self._tidy()
        return sum(self._held[key][0] for key in self._old if key in self._held)

    def _tidy(self) -> None:
        gone = [key for key, (_, there) in self._held.items() if there() is None]
        for key in gone:
            del self._held[key]


def beside(held: int, known: int) -> int:
    """Bytes that outputs take beside a plan which knows of some. A few losses have room at every moment of it."""
    return max(0, held - known - SCALARS // 2)


_KEY = "ebbtide: outputs of a forward pass"
REMEMBERED = 32


class _OutputsMark:
    """Of a forward pass's outputs: it is there as long as one can go back from one of them."""

    __slots__ = ("__weakref__",)


@dataclass
class _Pass:
    saved: int = 0
    """Bytes that it left for backward, as far as that is known."""
    peak: int = 0
    """And those of non-model data at its highest, with its own backward."""
    nodes: range = range(0)
    """Those of autograd's graph that it made, by number."""
    mark: weakref.ref[_OutputsMark] | None = None
    """None where nobody can say whether its outputs are gone."""

    @property
    def gone(self) -> bool:
        return self.mark is not None and self.mark() is None


class PendingForwards:
    def __init__(self, data: ModelData, traces: PlanCache, imagining: SymbolicPasses) -> None:
        self._data, self._traces, self._imagining = data, traces, imagining
        self._passes: list[_Pass] = []
        self._known: OrderedDict[Any, Record | None] = OrderedDict()
        """What one pass of a kind takes, where others waited when it came."""
        self._last: tuple[tuple[Record, int, int, ModelShape], KnownInput] | None = None
        """With what waited: plans are found once where nothing has changed."""

    @property
    def count(self) -> int:
        """Forward passes since the last backward, those included that are gone."""
        return len(self._passes)

    @property
    def partly_gone(self) -> bool:
        """Whether some outputs are: a trace of all passes has no use."""
        return any(one.gone for one in self._passes)

    @property
    def one_left(self) -> bool:
        """Whether all are but those of the last."""
        return all(one.gone for one in self._passes[:-1])

    @property
    def gone(self) -> bool:
        """Whether all outputs are, so that nobody will go back."""
        return bool(self._passes) and all(one.gone for one in self._passes)

    def clear(self) -> None:
        """They are over."""
        self._passes.clear()

    def begin(self) -> None:
        """One is about to run."""
        now = torch._C._autograd._get_sequence_nr()
        self._passes.append(_Pass(nodes=range(now, sys.maxsize)))

    def made(self, ways: list[torch.Tensor] | None) -> None:
        """It has run, and one can go back from these; None where that cannot be told."""
        if self._passes:
            last = self._passes[-1]
            last.nodes = range(last.nodes.start, torch._C._autograd._get_sequence_nr())
        if ways is None or not self._passes:
            return
        mark = _OutputsMark()
        for tensor in ways:
            node: Any = tensor.grad_fn
            node.metadata[_KEY] = mark
        self._passes[-1].mark = weakref.ref(mark)

    def beyond(self, loss: torch.Tensor | None) -> list[torch.Tensor]:
        """What the user's own operators have saved between outputs and a loss, where that can be told."""
        if loss is None or not self._passes:
            return []
        return saved_beyond(loss, self._is_inside)

    def _is_inside(self, node: Any) -> bool:
        """Whether a node is a pass's, of this engine or of another, or older than all that run now."""
        number = node._sequence_nr()
        inside = number < self._passes[0].nodes.start or any(number in one.nodes for one in self._passes)
        return inside or _KEY in node.metadata

    def planned(self, plan: Plan, moments: int) -> None:
        """The first one has run so many moments of the plan's iteration."""
        record = plan.record
        place = (moments - 1) % len(record.moments)
        one = place == record.forward
        left = record.left_by_forward if one else record.moments[place].alive - record.fixed
        self._passes[0].saved = min(left, plan.levels[moments - 1] - record.fixed)
        self._passes[0].peak = record.peak - record.fixed

    def beside(self, call: Call) -> KnownInput | None:
        """What is known of one that comes while others wait: all that it takes is beside what they have saved, and its
        gradients may be added to. Whose backward comes first nobody knows. None where it cannot be imagined."""
        record = self._imagined(call)
        if record is None:
            return None
        last, others = self._passes[-1], [one for one in self._passes[:-1] if not one.gone]
        last.saved, last.peak = record.left_by_forward, record.peak - record.fixed
        count = sum(one.saved for one in others)
        theirs = max((one.peak - one.saved for one in others), default=0) + count + last.saved + record.fixed
        case = record, count, theirs, self._traces.shape
        if self._last is None or self._last[0] != case:
            self._last = case, KnownInput(_beside(record, count, theirs))
        return self._last[1]

    def _imagined(self, call: Call) -> Record | None:
        key = call.signature, tuple(p.requires_grad for p in self._data.parameters)
        if key not in self._known:
            self._known[key] = self._imagining.imagine(call)
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[key]


def _beside(record: Record, count: int, theirs: int) -> Record:
    """A pass beside `count` bytes, in whose backward others may come to `theirs`."""
    moments = tuple(
        replace(m, peak=max(m.peak + count, theirs if j > record.forward else 0), alive=m.alive + count)
        for j, m in enumerate(record.moments)
    )
    return replace(record, moments=moments, arrivals=record.arrivals * 2)


def ways_back(output: Any) -> list[torch.Tensor] | None:
    """Those of a forward pass's outputs that one can go back from. None where that cannot be told: who returns something
    of their own knows."""
    found = list(leaves(output))
    given = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    if not given or not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in found):
        return None
    ways = [tensor for tensor in given if tensor.requires_grad]
    return None if any(tensor.grad_fn is None for tensor in ways) else ways
