"""Gathers that ranks need not agree on any more, for they did the same the last two times.

Between two things that ranks agree on they gather chunks, mostly the same ones in each step. All ranks have seen the
same agreements and taken part in the same gathers, so all know the same of what follows: what did so twice is
promised, and done without asking. A rank that wants something else first does what it has promised, for the others
count on it.

Nothing is promised beyond the end of a pass or of an update: a rank that is behind would give values that it has yet to
change.
"""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[int, int, int]
"""(how many agreements since the step began, what was agreed on, its subject)."""


class Ahead:
    def __init__(self) -> None:
        self._count = 0
        self._key: Key | None = None
        """None: nothing is promised until the next agreement."""
        self._run: list[int] = []
        """Chunks that all ranks gathered since the last agreement on something else."""
        self._last: dict[Key, Sequence[int]] = {}
        """The run that followed, the last time."""
        self._twice: dict[Key, Sequence[int]] = {}
        """What the last two had in common, from their beginning."""

    @property
    def promised(self) -> int | None:
        """The chunk that all ranks gather next, whatever they want."""
        run = self._twice.get(self._key, ()) if self._key is not None else ()
        return run[len(self._run)] if len(self._run) < len(run) else None

    def gathered(self, index: int) -> None:
        """All ranks did, together."""
        self._run.append(index)

    def agreed(self, deed: int, subject: int, step: bool) -> None:
        """On something else. `step`: another step begins."""
        self.stop()
        self._count = 0 if step else self._count + 1
        self._key = (self._count, deed, 0 if step else subject)

    def stop(self) -> None:
        """What follows is of another pass."""
        if self._key is not None:
            last = self._last.get(self._key)
            if last is not None:
                self._twice[self._key] = _common(last, self._run)
            self._last[self._key] = self._run
        self._key, self._run = None, []


def _common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """What both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return one[:count]
