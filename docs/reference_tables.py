"""Fills `<!-- settings -->` and `<!-- engine -->` in the documents with tables made from the source.

mkdocs calls `on_page_markdown` for each page. A setting's sentence is the string under its field in config.py, a
method's the first paragraph of its docstring.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from ebbtide import Engine, config
from ebbtide.errors import ConfigError
from ebbtide.strict import Key, Section, checks

TABLES = (
    config.Config,
    config.DeviceConfig,
    config.HostConfig,
    config.SsdConfig,
    config.OptimizerConfig,
)


def sentences(table: type[Section]) -> dict[str, str]:
    """By field: the string that stands under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            assert isinstance(after.value, ast.Constant)
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def allowed(table: type[Section], name: str) -> str:
    """What a setting may be, as the message says it that refuses another value."""
    try:
        checks(table)[name](Key("key", name), object())
    except ConfigError as refused:
        return str(refused).partition("expected ")[2].partition(", found <object")[0]
    raise AssertionError(f"{table.__name__}.{name} takes anything")


def settings(table: type[Section]) -> Iterator[str]:
    said = sentences(table)
    for field in fields(table):
        if field.default is MISSING:
            continue  # a table of its own
        default = "" if field.default in (None, (), "") else f"`{_written(field.default)}`"
        yield f"| `{field.name}` | {allowed(table, field.name)} | {default} | {said.get(field.name, '')} |"


def settings_tables() -> str:
    lines = []
    for table in TABLES:
        title = f"`[{table.path}]`" if table.path else "Top level"
        lines += [
            f"## {title}",
            "",
            "| setting | value | default | meaning |",
            "|---|---|---|---|",
            *settings(table),
            "",
        ]
    return "\n".join(lines)


def methods() -> Iterator[tuple[str, str]]:
    """Of the engine, each with its first paragraph."""
    for name in dir(Engine):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(Engine, name)
        shown, documented = f"engine.{name}", member
        if isinstance(member, property):
            documented = member.fget
        elif callable(member):
            given = list(inspect.signature(member).parameters.values())[1:]
            shown += f"({', '.join(str(p.replace(annotation=p.empty)) for p in given)})"
        text = inspect.getdoc(documented) or ""
        yield shown, " ".join(text.partition("\n\n")[0].split())


def engine_table() -> str:
    rows = [f"| `{shown}` | {text} |" for shown, text in methods()]
    return "\n".join(["| call | what it does |", "|---|---|", *rows])


def on_page_markdown(markdown: str, **_: Any) -> str:
    for marker, made in (("<!-- settings -->", settings_tables), ("<!-- engine -->", engine_table)):
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
