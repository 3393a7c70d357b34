"""What a person sees: lines on standard error, tables on standard output; or one line of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ebbtide.report.plain_files import finite
from ebbtide.units import format_size

_console: Console | None = None
panels: list[object] = []
"""A live panel, while one is shown: it is the only thing that may redraw."""


def console() -> Console:
    """Standard error, for all that is said while a command runs."""
    global _console
    if _console is None:
        _console = Console(stderr=True)
    return _console


def say(message: str) -> None:
    """A line, above the bar where there is one."""
    console().print(f"ebbtide: {message}", highlight=False, markup=False, soft_wrap=True)


def is_watched() -> bool:
    """Whether a person looks at a terminal that can redraw, and has not asked for plain text (NO_COLOR)."""
    return console().is_terminal and not console().is_dumb_terminal and not os.environ.get("NO_COLOR")


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def print_json(result: Mapping[str, Any]) -> None:
    """One line. JSON has no NaN: what is not finite becomes null."""
    print(json.dumps(finite(result), allow_nan=False), flush=True)


def print_result(result: Mapping[str, Any]) -> None:
    """Any command's dict: its scalars as a table, each list of rows as a table of its own."""
    console = Console()
    facts = Table(show_header=False, box=None)
    facts.add_column()
    facts.add_column(overflow="fold")
    tables = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables.append(rows_table(key, value))
        elif isinstance(value, Mapping):
            for name, item in value.items():
                facts.add_row(f"{key}.{name}", show(key, item))
        elif not isinstance(value, list) and value is not None:
            facts.add_row(key, show(key, value))
    console.print(facts)
    for table in tables:
        console.print(table)


COLUMNS = 8
"""As many fit 80 characters; what has more facts is written with one row a fact."""


def rows_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(columns) > COLUMNS:
        return _upright(title, rows, columns)
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(show(column, row.get(column)) for column in columns))
    return table


def _upright(title: str, rows: Sequence[Mapping[str, Any]], facts: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in range(1 + len(rows)):
        table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(fact, *(show(fact, row.get(fact)) for row in rows))
    return table


def show(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key.endswith("bytes") and isinstance(value, int):
        return format_size(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {show(key, item)}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
