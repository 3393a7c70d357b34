"""The tables in which modules keep their parameters and children, made to say when they are changed or read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import nn

from ebbtide.errors import UnsupportedError


class Readers(Protocol):
    """Who reads parameters now: what a table asks, and tells."""

    active: list[int]
    """By run: how many of its modules, and foreign readers, run."""
    resting: bool

    def change(self) -> None: ...

    def foreign_read(self, run: int, parameter: nn.Parameter) -> Any: ...


def refuse_copy(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "a managed module cannot be copied or pickled while its weights are not all in one place: within "
        "engine.resident() copy.deepcopy gives an ordinary module with its values, and engine.state_dict() gives them "
        "anywhere"
    )


class WatchedTable(dict[str, Any]):
    """Tells when an entry is put in or taken out: a module that is changed is looked at before its next pass."""

    __slots__ = ("_changed",)

    def __init__(self, values: dict[str, Any], changed: Callable[[], None]) -> None:
        super().__init__(values)
        self._changed = changed

    def __setitem__(self, name: str, value: Any) -> None:
        if dict.get(self, name) is not value:
            self._changed()
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        self._changed()
        dict.__delitem__(self, name)

    def pop(self, *args: Any) -> Any:
        self._changed()
        return dict.pop(self, *args)

    def popitem(self) -> Any:
        self._changed()
        return dict.popitem(self)

    def clear(self) -> None:
        self._changed()
        dict.clear(self)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._changed()
        dict.update(self, *args, **kwargs)

    def setdefault(self, name: str, value: Any = None) -> Any:
        self._changed()
        return dict.setdefault(self, name, value)

    __deepcopy__ = refuse_copy
    __reduce_ex__ = refuse_copy


class ParameterTable(WatchedTable):
    """A module's `_parameters` that tells when a parameter is read while its module is not running.

    nn.MultiheadAttention never calls `out_proj`, it reads its weight; tied heads and functional code do alike.
    """

    __slots__ = ("_readers", "_runs")

    def __init__(self, values: dict[str, Any], runs: dict[str, int], readers: Readers) -> None:
        """`runs`: by name."""
        super().__init__(values, readers.change)
        self._runs, self._readers = runs, readers

    def __getitem__(self, name: str) -> Any:
        run = self._runs.get(name)
        if run is not None and not self._readers.active[run] and not self._readers.resting:
            return self._readers.foreign_read(run, dict.__getitem__(self, name))
        return dict.__getitem__(self, name)
