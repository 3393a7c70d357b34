"""What ranks that share chunks want, each for itself, and what follows from it for all of them.

Pure: every rank knows the same wishes, and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.errors import StateError

GATHER, REDUCE, END, LOSS, STEP, VALUES, SAVE, LOAD, TOKENS, BEGIN, FORWARD, DONE, EVALUATED = range(1, 14)
WISHES = {
    GATHER: "gathers chunk",
    REDUCE: "reduces the gradients of chunk",
    END: "ends a backward pass; chunks left:",
    LOSS: "begins a backward pass, number",
    STEP: "takes a step, number",
    VALUES: "reads or writes values by name, of parameter",
    SAVE: "saves after step",
    LOAD: "loads after step",
    BEGIN: "begins a forward pass, micro-batch",
    FORWARD: "ends a forward pass, micro-batch",
    DONE: "ends an update, step",
    EVALUATED: "ends an evaluation, micro-batch",
    TOKENS: "exchanges tokens with experts (ten times the layer, and which exchange):",
}


class Wish(NamedTuple):
    """What a rank wants next."""

    deed: int
    subject: int
    """A chunk, or what else it is about; at the end of a pass, how many chunks wait."""
    round: int
    """How many passes it has begun, and steps it has ended."""
    check: int = 0
    """Equal where ranks know the same of what they want."""
    used: int = 0
    """How far it had a use for what was promised."""

    def __str__(self) -> str:
        return f"{WISHES[self.deed]} {self.subject} (round {self.round})"

    @property
    def what(self) -> tuple[int, int]:
        return self.deed, self.subject

    @property
    def item(self) -> tuple[int, int, int]:
        """As it can be promised."""
        return self.deed, self.subject, self.check


def judge(mine: Wish, wishes: Sequence[Wish]) -> tuple[int, int] | None:
    """What is done together next, as (deed, subject); None where that is nothing, for ranks disagree on which
    gradients are complete."""
    # Who is behind goes first: it may still have to update what the others want.
    gathers = sorted((one.round, one.subject) for one in wishes if one.deed == GATHER)
    if gathers:
        return GATHER, gathers[0][1]
    deeds = {one.deed for one in wishes}
    for left in (FORWARD, EVALUATED):  # a rank ran forward twice, or evaluates more often than others
        if left in deeds and len(deeds) > 1:
            return mine.what if mine.deed == left else (left, -1)
    waits = REDUCE in deeds and deeds <= {REDUCE, TOKENS, END}
    if len({one.round for one in wishes}) > 1 or (len(deeds) > 1 and not waits):
        said = "; ".join(f"rank {rank} {one}" for rank, one in enumerate(wishes))
        raise StateError(
            f"ranks do not do the same: {said}. All of them must call the engine's methods alike, in the same order"
        )
    if deeds == {END} or all(one.what == mine.what for one in wishes):
        return mine.what
    if waits:
        return None
    raise StateError(f"ranks ask for different things: {', '.join(map(str, wishes))}")
