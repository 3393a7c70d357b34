"""The five tensor states, kept per run of tensors that are used together.

    FREE -> COMPUTE -> HOLD | HOLD_AFTER_FWD | HOLD_AFTER_BWD -> COMPUTE ...

A run in COMPUTE pins its chunks on the device; a HOLD-like run's chunks may be anywhere; FREE has no payload.
After forward HOLD_AFTER_FWD goes back to HOLD, because checkpointing recomputes forward inside backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from ebbtide.errors import StateError


class State(IntEnum):
    FREE = 0
    COMPUTE = 1
    HOLD = 2
    HOLD_AFTER_FWD = 3
    HOLD_AFTER_BWD = 4


_LEGAL: dict[State, frozenset[State]] = {
    State.FREE: frozenset({State.COMPUTE, State.HOLD}),
    State.COMPUTE: frozenset({State.HOLD, State.HOLD_AFTER_FWD, State.HOLD_AFTER_BWD}),
    State.HOLD: frozenset({State.COMPUTE, State.FREE}),
    State.HOLD_AFTER_FWD: frozenset({State.COMPUTE, State.HOLD}),
    State.HOLD_AFTER_BWD: frozenset({State.COMPUTE, State.HOLD}),
}


class RunStates:
    """The state and the use count of every run, with the last transitions for the error that needs them."""

    def __init__(self, names: Sequence[str], remembered: int = 4096) -> None:
        self._names = names
        self._state = [State.HOLD] * len(names)
        self._count = [0] * len(names)
        self._history: deque[tuple[int, int, State, State]] = deque(maxlen=remembered)
        self.moment = 0

    def state(self, run: int) -> State:
        return self._state[run]

    def uses(self, run: int) -> int:
        return self._count[run]

    def access(self, run: int) -> bool:
        """Counts one more use; true where it is the first, and the chunks must be pinned."""
        self._count[run] += 1
        if self._count[run] > 1:
            return False
        self._move(run, State.COMPUTE)
        return True

    def release(self, run: int, target: State) -> bool:
        """Counts one use less; true where it was the last, and the chunks may go."""
        if self._count[run] < 1:
            raise StateError(f"{self._names[run]} is released but not in use", self.history(run))
        self._count[run] -= 1
        if self._count[run]:
            return False
        self._move(run, target)
        return True

    def set(self, run: int, target: State) -> None:
        """A transition that is no use: to HOLD between the passes, to and from FREE."""
        if self._state[run] is not target:
            self._move(run, target)

    def settle(self) -> None:
        """The end of a pass: what was held after forward or backward is merely held."""
        for run, state in enumerate(self._state):
            if state is State.HOLD_AFTER_FWD or state is State.HOLD_AFTER_BWD:
                self._move(run, State.HOLD)

    def drop(self) -> None:
        """A pass ended early, maybe between two lines of this: nothing is in use."""
        for run, state in enumerate(self._state):
            self._count[run] = 0
            if state is State.COMPUTE:
                self._move(run, State.HOLD)

    def _move(self, run: int, target: State) -> None:
        old = self._state[run]
        if target not in _LEGAL[old]:
            raise StateError(
                f"{self._names[run]}: {old.name} cannot become {target.name}; from {old.name} only "
                f"{', '.join(sorted(s.name for s in _LEGAL[old]))} is legal",
                self.history(run),
            )
        self._state[run] = target
        self._history.append((self.moment, run, old, target))

    def history(self, run: int) -> list[str]:
        """The run's transitions, oldest first."""
        return [
            f"moment {moment}: {old.name} -> {new.name}"
            for moment, of, old, new in self._history
            if of == run
        ]
