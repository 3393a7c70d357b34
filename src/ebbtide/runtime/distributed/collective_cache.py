"""Collectives that ranks need not agree on any more, for they did the same the last two times.

Between two things that ranks agree on in a pass they gather chunks and reduce gradients, mostly the same ones in each
step. All ranks have seen the same agreements and taken part in the same collectives, so all know the same of what
follows: what did so twice is promised, and done without asking. A rank that wants something else first does what it has
promised, for the others count on it. With each agreement ranks say how much of what was promised they had a use for, and
the rest is not promised again. A reduction that some rank is not ready for ends what is promised.

Note [within a pass]: nothing is promised beyond it. Values change between passes, and a rank that has yet to change them
would give old ones to those that are ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence

Item = tuple[int, int, int]
"""(deed, subject, check)."""
Run = list[Item | None]
"""None: what was promised, and could not be done."""
Key = tuple[int, int, int]
"""(how many agreements since the pass began, what was agreed on, its subject)."""
MOST = 100_000
"""Keys; passes that are never alike would fill the memory."""


class CollectiveCache:
    def __init__(self) -> None:
        self._count = 0
        self._key: Key | None = None
        """None: no pass is under way."""
        self._promise: Sequence[Item] = ()
        self._done = 0
        """Of what is promised."""
        self.wanted = 0
        """How far this rank had a use for it."""
        self._run: Run = []
        """What all ranks did since the last agreement on something else."""
        self._last: dict[Key, Run] = {}
        """The run that followed, the last time."""
        self._twice: dict[Key, Sequence[Item]] = {}
        """What the last two had in common, from their beginning."""

    @property
    def promised(self) -> Item | None:
        """What all ranks do next, whatever they want."""
        return self._promise[self._done] if self._done < len(self._promise) else None

    def kept(self, wanted: bool) -> None:
        """What was promised next is done; whether this rank has a use for it."""
        self._run.append(self._promise[self._done])
        self._done += 1
        if wanted:
            self.wanted = self._done

    def refused(self) -> None:
        """What was promised last could not be done, for some rank was not ready: it has left the way, and what else was
        promised would not be done either."""
        if self._run:
            self._run[-1] = None
        self._promise = self._promise[: self._done]

    def heard(self, wanted: int) -> None:
        """Ranks agree on something: how far any of them had a use for what was promised."""
        self._run[wanted : self._done] = ()
        self._promise, self._done, self.wanted = (), 0, 0

    def did(self, item: Item) -> None:
        """All ranks alike, as they agreed; it may be promised."""
        if self._key is not None:
            self._run.append(item)

    def agreed(self, deed: int, subject: int) -> None:
        """On something that is never promised."""
        if self._key is None:
            return
        self._learn()
        self._count += 1
        self._open((self._count, deed, subject))

    def begin(self) -> None:
        """All ranks have begun a pass."""
        self._count = 0
        self._open((0, 0, 0))

    def end(self) -> None:
        """The pass is over for all ranks."""
        if self._key is not None:
            self._learn()
        self.stop()

    def stop(self) -> None:
        """What was under way is given up."""
        self._key, self._run = None, []
        self.heard(0)

    def _open(self, key: Key) -> None:
        self._key, self._run = key, []
        self._promise = self._twice.get(key, ())

    def _learn(self) -> None:
        assert self._key is not None
        if len(self._last) > MOST:
            self._last.clear()
            self._twice.clear()
        last = self._last.get(self._key)
        if last is not None:
            self._twice[self._key] = _common(last, self._run)
        self._last[self._key] = self._run


def _common(one: Run, other: Run) -> Sequence[Item]:
    """What both begin with."""
    found: list[Item] = []
    for a, b in zip(one, other, strict=False):
        if a is None or a != b:
            break
        found.append(a)
    return found
