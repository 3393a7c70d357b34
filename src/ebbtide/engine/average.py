"""An exponential moving average of the weights, beside them in memory, exact and saved with the rest.

Every step's weights go into it, in master precision: average += (weight - average) * (1 - decay), each operation rounded
once, element by element, so that neither placement nor the number of ranks changes a bit. They are taken when nobody is
working on them: before the next update begins, or before somebody reads. For an evaluation average and weights change
places.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ebbtide.checkpoint import values
from ebbtide.checkpoint.tensor_parts import WEIGHTS, TensorPart, parts_of_model
from ebbtide.errors import ConfigError, StateError, warn_user
from ebbtide.memory.budget import AVERAGE
from ebbtide.memory.chunk_access import PORTION
from ebbtide.runtime.session import Averaged, Session

BEGINS = "average-"
"""The names of its tensors in a checkpoint; its decay follows."""


@dataclass(frozen=True)
class _AveragedTensor:
    """A parameter's average: this rank's elements of it."""

    weights: TensorPart
    flat: torch.Tensor

    def begin(self) -> None:
        """It is the weights of now."""
        for first, average in self.portions():
            self.weights.load(first, average)

    def portions(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(the first element of the whole tensor, this much of the average)."""
        begin, _ = self.weights.range
        for start in range(0, self.flat.numel(), PORTION):
            yield begin + start, self.flat[start : start + PORTION]


class _DueStep:
    """A step whose weights are not in the average yet, or in some of it: what ends that half-way is gone on from."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.taken: set[tuple[int, int]] = set()
        """Portions: the parameter, and the first element."""
        self.taking: tuple[int, int, torch.Tensor] | None = None
        """One that is under way: the parameter, the first element, and what its average comes to."""


class Average:
    """What `engine.ema(decay)` gives. `decay` may be set between steps."""

    def __init__(self, session: Session, decay: float) -> None:
        self._decay = require_decay(decay)
        self.label = f"{BEGINS}{decay}"
        self._session = session
        self._due: list[_DueStep] = []
        """The last step, if its weights are not in it yet."""
        self._exchanging: tuple[int, int, torch.Tensor, torch.Tensor] | None = None
        """Of a swap that is under way: the parameter, its first element, and what average and weights were there."""
        self._exchanged: set[tuple[int, int]] = set()
        self._tier = session.store.near
        self._kept: list[_AveragedTensor] = []
        self._reserved: list[weakref.finalize[..., Average]] = []
        self._trained: object = None
        """What was trained when it looked for weights last."""
        self.widen()

    @property
    def decay(self) -> float:
        return self._decay

    @decay.setter
    def decay(self, value: float) -> None:
        self._decay = require_decay(value)

    # -- what it takes in -----------------------------------------------------------------------------

    def widen(self) -> None:
        """Takes in weights that it has not: at its beginning all that are trained, later those that are unfrozen, which
        are their own average until then."""
        session, trained = self._session, self._trained_now()
        if trained == self._trained:
            return
        known = {kept.weights.key for kept in self._kept}
        parts = [part for part in _trained_weights(session) if part.key not in known]
        if not parts:
            self._trained = trained
            return
        sizes = [part.range[1] - part.range[0] for part in parts]
        nbytes = 4 * sum(sizes)
        session.room.make(self._tier, nbytes)
        session.ledger.reserve(self._tier, AVERAGE, nbytes)
        release = weakref.finalize(self, session.ledger.release, self._tier, AVERAGE, nbytes)
        try:
            self._settle()
            found = [
                _AveragedTensor(part, torch.empty(size, device="cpu"))
                for part, size in zip(parts, sizes, strict=True)
            ]
            for kept in found:
                kept.begin()
        except BaseException:
            release()
            raise
        self._reserved.append(release)
        self._kept += found
        self._trained = trained

    def _trained_now(self) -> object:
        """Changes where parameters get a master."""
        known = {kept.weights.key for kept in self._kept}
        outside = self._session.unmanaged.parameters.items()
        return list(self._session.data.trained), [
            parameter.requires_grad or f"{WEIGHTS}/{name}" in known for name, parameter in outside
        ]

    def stepped(self) -> None:
        """The weights have had an update."""
        self._due.append(_DueStep(self.decay))

    def catch_up(self) -> None:
        """Takes in the weights of the last step. Nothing has changed them since."""
        if not self._due:
            return
        [due] = self._due
        share = 1.0 - due.decay
        self._finish_taking(due)
        for number, kept in enumerate(self._kept):
            for first, average in kept.portions():
                if (number, first) in due.taken:
                    continue
                weights = torch.empty_like(average)
                kept.weights.load(first, weights)
                torch.add(average, weights.sub_(average).mul_(share), out=weights)
                due.taking = number, first, weights
                self._finish_taking(due)
        self._due.clear()

    def _finish_taking(self, due: _DueStep) -> None:
        if due.taking is None:
            return
        number, first, result = due.taking
        kept = self._kept[number]
        begin, _ = kept.weights.range
        kept.flat[first - begin : first - begin + result.numel()].copy_(result)
        due.taken.add((number, first))
        due.taking = None

    # -- what it gives --------------------------------------------------------------------------------

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The module's weights are the averages meanwhile: for evaluation, export, or reading by name. Training is
        refused. Ranks that share chunks call it together."""
        if self._session.swapped:
            raise StateError("an average is in place of the weights already; one at a time")
        self._session.reclaim()  # gradients may lie where parameters were
        self._session.catch_up_averages()
        self._session.swapped = f"the average with decay {self.decay} is in place of the weights"
        try:
            self._exchange(into=True)
            yield
        finally:
            self._exchange(into=False)
            self._session.swapped = ""

    def _exchange(self, into: bool) -> None:
        """Average and weights change places, portion by portion. What ended it half-way is gone on from: a portion is
        written again from what both were, and not exchanged twice."""
        self._finish_portion()
        for number, kept in enumerate(self._kept):
            for first, average in kept.portions():
                if ((number, first) in self._exchanged) is into:
                    continue
                weights = torch.empty_like(average)
                kept.weights.load(first, weights)
                self._exchanging = number, first, average.clone(), weights
                self._finish_portion()

    def _finish_portion(self) -> None:
        if self._exchanging is None:
            return
        number, first, average, weights = self._exchanging
        kept = self._kept[number]
        begin, _ = kept.weights.range
        kept.weights.store(first, average)
        kept.flat[first - begin : first - begin + weights.numel()].copy_(weights)
        self._exchanged ^= {(number, first)}
        self._exchanging = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages by name, in fp32, and whatever else the module's state_dict has as it is."""
        with self.swapped_in():
            return values.state_dict(self._session)

    # -- saved with the rest --------------------------------------------------------------------------

    def parts(self) -> Iterator[TensorPart]:
        self.catch_up()
        self.widen()
        for kept in self._kept:
            yield self._part(kept)

    def _part(self, kept: _AveragedTensor) -> TensorPart:
        begin, end = kept.weights.range

        def load(first: int, out: torch.Tensor) -> None:
            out.copy_(kept.flat[first - begin : first - begin + out.numel()])

        def store(first: int, flat: torch.Tensor) -> None:
            low, high = max(first, begin), min(first + flat.numel(), end)
            if low < high:
                kept.flat[low - begin : high - begin].copy_(flat[low - first : high - first])

        def lend(first: int, count: int) -> None:
            return None

        key = f"{self.label}/{kept.weights.key.partition('/')[2]}"
        return replace(kept.weights, key=key, load=load, store=store, lend=lend)

    def loaded(self, stored: Collection[str]) -> None:
        """A checkpoint with these tensors was loaded: of what its average has not there is a new beginning. Where the
        rest is there, those were frozen when it was saved, and are their own average."""
        self._due.clear()
        for kept in self._kept:
            if self._part(kept).key not in stored:
                kept.begin()

    def close(self) -> None:
        """Gives its memory back."""
        if self._session.swapped:
            raise StateError(f"{self._session.swapped}: end swapped_in() before close()")
        if self in self._session.averages:
            self._session.averages.remove(self)
            self._kept.clear()
            for release in self._reserved:
                release()
            self._settle()

    def _settle(self) -> None:
        """Plans have more or less room from now on."""
        room = self._session.room
        self._session.traces.settle(room.budget("device"), room.budget("host"))


def _trained_weights(session: Session) -> Iterator[TensorPart]:
    """Those that have a master, or are in fp32 themselves; others are frozen."""
    for part in parts_of_model(session):
        if part.key.startswith(f"{WEIGHTS}/") and part.dtype == torch.float32:
            yield part


def warn_of_lost(stored: Collection[str], averages: Sequence[Averaged]) -> None:
    """Of those that a loaded checkpoint has and the engine has not."""
    there = {key.partition("/")[0] for key in stored if key.startswith(BEGINS)}
    for label in sorted(there - {one.label for one in averages}):
        decay = label.removeprefix(BEGINS)
        warn_user(
            f"load: the checkpoint has an average of the weights with decay {decay}, and this engine has none with it, "
            f"so it was left out: call engine.ema({decay}) before engine.load() to go on with it"
        )


def require_decay(decay: float) -> float:
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ConfigError(f"ema: expected a decay from 0 to 1, such as 0.999, found {decay!r}")
    return float(decay)
