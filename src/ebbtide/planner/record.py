"""The trace as data: what one iteration does, moment by moment. Pure; made by `tracing`, read by `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

FORWARD, BACKWARD, GRADIENT, UPDATE = range(4)
PHASES = ("forward", "backward", "gradient", "update")


def event(phase: int, subject: int) -> int:
    """What a moment starts with, as one number: a unit (forward), a run (backward), a parameter (gradient)
    or a chunk index (update) enters."""
    return subject * 4 + phase


MATMUL, ATTENTION, CONVOLUTION, OTHER = "matmul", "attention", "convolution", "other"


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator does, on whatever machine."""

    kind: str
    flops: int
    bytes: int
    """Read and written, each operand once."""


@dataclass(frozen=True, slots=True)
class Moment:
    event: int
    peak: int
    """Bytes of non-model data on the device, the most inside the moment."""
    host_seconds: float = 0.0
    work: tuple[Work, ...] = ()
    """By operator; empty where the operators were not seen (a live trace on a GPU)."""
    alive: int = 0
    """Bytes of non-model data at the end of the moment."""

    @property
    def phase(self) -> int:
        return self.event % 4

    @property
    def subject(self) -> int:
        return self.event // 4


@dataclass(frozen=True, slots=True)
class Access:
    """A run is in use from the start of moment `first` to the end of moment `last`."""

    run: int
    first: int
    last: int
    phase: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A parameter's gradient arrives at a moment."""

    parameter: int
    moment: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that forward saves for backward, outside of what is computed again."""

    bytes: int
    first: int
    """The moment that saved it first."""
    alone: int
    """The first moment from whose start nothing but backward wants it; -1: there is none."""
    back: int
    """The first moment that wants it back; -1: there is none."""
    checkpoint: bool = False
    """A checkpointed region's input."""


@dataclass(frozen=True)
class Record:
    signature: str
    """What the iteration was given: shapes and dtypes, training or not."""
    moments: tuple[Moment, ...]
    accesses: tuple[Access, ...]
    arrivals: tuple[Arrival, ...]
    fixed: int = 0
    """Bytes of unmanaged parameters and buffers, in every moment's peak."""
    source: str = "live"
    between: int = 0
    """Bytes of non-model data from the end of the pass to the next: what the loop still holds, and its next
    input."""
    saved: tuple[Saved, ...] = ()
    """In the order in which they were saved; only where activations are to be offloaded."""
    turns: tuple[int, ...] = ()
    """Moments that begin after a backward which is not the last: a pipeline's schedule goes on with forward."""
    forward: int = -1
    """The last moment that began before backward; -1 where that is not known."""
    at_backward: int = -1
    """Bytes of non-model data when backward began; -1 where that is not known."""
    carried: int = 0
    """Bytes of earlier passes' outputs that forward's moments have."""
    aside: int = 0
    """And those that backward's have."""
    packed: int = -1
    """Bytes that autograd has saved but for weights, each as often as it was; -1 where that is not known."""

    @property
    def flops(self) -> int:
        return sum(work.flops for moment in self.moments for work in moment.work)

    @property
    def left_by_forward(self) -> int:
        """Bytes that one forward pass leaves for backward, at most."""
        if self.at_backward >= 0:
            return self.at_backward - self.fixed
        return self.moments[self.forward].peak - self.fixed if self.forward >= 0 else 0

    @property
    def left(self) -> int:
        """Bytes that the pass leaves: of its outputs, of the next input, and of gradients outside the chunks."""
        return max(0, self.between - self.fixed)

    @property
    def peak(self) -> int:
        return max((moment.peak for moment in self.moments), default=self.fixed)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Record:
        def moment(row: Mapping[str, Any]) -> Moment:
            return Moment(**{**row, "work": tuple(Work(**work) for work in row["work"])})

        parts = {
            "moments": tuple(map(moment, data["moments"])),
            "accesses": tuple(Access(**row) for row in data["accesses"]),
            "arrivals": tuple(Arrival(**row) for row in data["arrivals"]),
            "saved": tuple(Saved(**row) for row in data["saved"]),
            "turns": tuple(data.get("turns", ())),
        }
        return Record(**{**data, **parts})

    def carrying(self, count: int) -> Record:
        """The same trace where `count` bytes of the iteration before (outputs that the loop still holds)
        live until the forward pass ends and the loop lets go of them."""
        if not count:
            return self
        end = self.forward
        if end < 0:
            end = next((j for j, m in enumerate(self.moments) if m.phase != FORWARD), len(self.moments))
        moments = tuple(
            replace(m, peak=m.peak + count) if j <= end else m for j, m in enumerate(self.moments)
        )
        return replace(self, moments=moments, carried=self.carried + count)
