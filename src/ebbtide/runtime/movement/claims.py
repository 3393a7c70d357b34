"""Claims: what an engine takes of the device beside its chunks, and what other engines' claims leave it.

It keeps the sums. Who makes room for a claim is the eviction's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from ebbtide.memory.budget import Ledger
from ebbtide.runtime.movement.plan_cursor import IDLE, RUNNING, PlanCursor


@dataclass(frozen=True, slots=True)
class Claim:
    nbytes: int = 0
    guess: bool = False
    """A guess keeps room free for its own engine. It keeps no other engine from anything."""


class Claims:
    def __init__(self, ledger: Ledger, cursor: PlanCursor) -> None:
        self._ledger, self._cursor = ledger, cursor
        self.of_pass = Claim()
        """Non-model data of the pass that runs, or that is expected to."""
        self.lasting = 0
        """Of it, what stays between passes: parameters outside the chunks, and buffers."""
        self.outputs = 0
        """Beside it: outputs of earlier passes that the loop still holds, as far as no plan knows of them."""
        self.while_waiting: int | None = None
        """Of the pass's claim, what is there until its backward, where that is known. Another engine may evaluate in
        the rest meanwhile."""
        self.imagined = False
        """The pass's claim is that of an evaluation that was imagined, whether there is a plan or not."""
        self._evaluates = False
        self._most_elsewhere = 0
        self._others: tuple[weakref.ref[Claims], ...] = ()

    @property
    def level(self) -> int:
        return self.of_pass.nbytes

    def begin_turn(self, everyone: Iterable[Claims], evaluates: bool) -> bool:
        """This engine goes on, maybe after another one, whose claim is over unless it is in the midst of a pass. Gives
        whether there are others."""
        self._evaluates = evaluates
        everyone = {self, *everyone}
        if len(everyone) == 1 and not self._others:
            return False
        for one in everyone:
            if one is not self and one._cursor.phase == IDLE:
                one.of_pass, one.outputs = Claim(one.lasting), 0
            one._others = tuple(weakref.ref(other) for other in everyone if other is not one)
        return True

    def end_turn(self) -> None:
        self._evaluates = False

    @property
    def waits(self) -> bool:
        """Whether a forward pass has run whose backward is still to come."""
        return self.while_waiting is not None and self._cursor.phase == RUNNING

    def elsewhere(self) -> int:
        """Bytes of other engines' claims that are no guess."""
        others = (other for one in self._others if (other := one()) is not None)
        return sum(
            other._kept_from(self._evaluates) + other.outputs for other in others if not other.of_pass.guess
        )

    def _kept_from(self, evaluation: bool) -> int:
        """Of the pass's claim, what another engine cannot have: a training pass may go back through this one's."""
        waiting = self.while_waiting if evaluation and self.waits else None
        return self.level if waiting is None else min(self.level, waiting)

    def take_most_elsewhere(self) -> int:
        """The most that other engines have claimed beside a pass of this one since the last call."""
        most, self._most_elsewhere = self._most_elsewhere, 0
        return most

    def set_level(self, level: int, guess: bool = False) -> None:
        elsewhere = self.elsewhere() if self._others else 0
        self.of_pass = Claim(level, guess)
        self._most_elsewhere = max(elsewhere, self._most_elsewhere)
        self._ledger.set_level("device", level + self.outputs, guess, elsewhere)

    def set_outputs(self, count: int) -> None:
        self.outputs = count
        self.set_level(self.level, self.of_pass.guess)

    def most(self) -> int:
        """The highest level that fits beside what is reserved, other engines' claims and outputs that are held."""
        taken = self._ledger.reserved["device"] + self.elsewhere() + self.outputs
        return max(0, self._ledger.budgets["device"] - taken)
