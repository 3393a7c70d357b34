"""Plain data from a file, looked at before it is believed: types, ranges and names, with the place of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ebbtide.errors import IntegrityError

LARGEST = 1 << 62
"""No count, size or offset is larger."""


class Plain:
    """A value, and where it is from."""

    __slots__ = ("_at", "_within", "value")

    def __init__(self, value: Any, within: Plain | str, at: str | int = "") -> None:
        """`within`: the place as text, or the value that has this one at `at`."""
        self.value, self._within, self._at = value, within, at

    @property
    def place(self) -> str:
        if isinstance(self._within, str):
            return self._within
        return (
            f"{self._within.place}[{self._at}]"
            if isinstance(self._at, int)
            else f"{self._within.place}: {self._at}"
        )

    @classmethod
    def parse(cls, content: bytes, place: str) -> Plain:
        try:
            return cls(json.loads(content), place)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{place}: is damaged ({error}); load another checkpoint") from error

    def wrong(self, expected: str, found: Any = None) -> NoReturn:
        shown = repr(self.value if found is None else found)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        raise IntegrityError(
            f"{self.place}: is damaged: expected {expected}, found {shown}; load another checkpoint"
        )

    def items(self) -> dict[str, Plain]:
        if not isinstance(self.value, dict):
            self.wrong("names with values")
        return {key: Plain(one, self, key) for key, one in self.value.items()}

    def fields(self, *names: str, others: tuple[str, ...] = ()) -> list[Plain]:
        """Those of a mapping that has all of these, and at most `others` beside."""
        found = self.items()
        missing = [name for name in names if name not in found]
        unknown = [name for name in found if name not in (*names, *others)]
        if missing or unknown:
            self.wrong(f"{', '.join(names)}", found=", ".join(found) or "nothing")
        return [found[name] for name in names]

    def entries(self, count: int | None = None) -> list[Plain]:
        if not isinstance(self.value, list) or (count is not None and len(self.value) != count):
            self.wrong("a list" if count is None else f"a list of {count}")
        return [Plain(one, self, place) for place, one in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not _encodes(self.value):
            self.wrong("text")
        return self.value

    def number(self, least: int = 0, most: int = LARGEST) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            self.wrong(
                f"a whole number from {least} on" if most == LARGEST else f"a whole number in {least}..{most}"
            )
        return self.value

    def real(self) -> float:
        if type(self.value) not in (int, float):
            self.wrong("a number")
        return float(self.value)

    def numbers(self) -> tuple[int, ...]:
        if isinstance(self.value, list) and all(
            type(one) is int and 0 <= one <= LARGEST for one in self.value
        ):
            return tuple(self.value)
        return tuple(one.number() for one in self.entries())

    def each(self, read: Callable[[Plain], Any]) -> Mapping[str, Any]:
        return {key: read(one) for key, one in self.items().items()}


def _encodes(text: str) -> bool:
    """JSON can spell halves of characters, which no file can be named by."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
